"""Steps of training as people write them: several backward passes, scaled losses, checkpoints, unused results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.backend.models import MODELS
from tests.checking import DEVICE, compare_tensor, compiled

Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor], list[Tensor]]
STEPS = 3


def batches(x: Tensor) -> Iterator[Tensor]:
    for number in range(STEPS):
        yield torch.randn(x.shape, generator=torch.Generator(DEVICE).manual_seed(number), device=DEVICE).to(x.dtype)


def accumulated(run: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
    """Two steps, each after three backward passes that add up in the same gradients."""
    losses = []
    for _ in range(2):
        optimiser.zero_grad()
        for batch in batches(x):
            loss = run(batch).square().mean() / STEPS
            loss.backward()
            losses.append(loss.detach())
        optimiser.step()
    return losses


def kept(run: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
    """One backward pass goes through a graph twice."""
    loss = run(x).square().mean()
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    optimiser.step()
    return [loss.detach()]


@pytest.mark.rotating
@pytest.mark.parametrize("step", [accumulated, kept])
@pytest.mark.parametrize("name", ["mlp", "block"])
def test_gradients_add_up(name: str, step: Step) -> None:
    torch.manual_seed(1)
    model, x = MODELS[name].make(), MODELS[name].example()
    ours, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    losses = [
        step(run, torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9), given)
        for own, run, given in ((ours, compiled(ours), x), (model, model, x), (wide, wide, x.double()))
    ]
    for number, triple in enumerate(zip(*losses, strict=True)):
        compare_tensor(f"loss {number}", *triple, absolute=1e-4)
    for key, mine in ours.named_parameters():
        own = (mine.grad, model.get_parameter(key).grad, wide.get_parameter(key).grad)
        compare_tensor(key, *(g for g in own if g is not None), absolute=1e-4)


def test_scaled_losses_under_autocast() -> None:
    """A step whose gradients overflow is left out and lowers the scale, in both alike."""
    torch.manual_seed(1)
    model, x = MODELS["mlp"].make(), MODELS["mlp"].example()
    ours = copy.deepcopy(model)

    def trained(own: nn.Module, run: nn.Module) -> tuple[list[float], float]:
        optimiser, scaler, losses = torch.optim.SGD(own.parameters(), lr=0.05), torch.amp.GradScaler(DEVICE), []
        for number, batch in enumerate((*batches(x), x)):
            optimiser.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = run(batch).float().square().mean()
            scaler.scale(loss * (torch.inf if number == 1 else 1.0)).backward()
            scaler.unscale_(optimiser)
            nn.utils.clip_grad_norm_(own.parameters(), 1.0)
            scaler.step(optimiser)
            scaler.update()
            losses.append(loss.item())
        return losses, scaler.get_scale()

    (mine, scale), (theirs, expected) = trained(ours, compiled(ours)), trained(model, model)
    assert scale == expected < 65536
    assert mine == pytest.approx(theirs, rel=0.03)
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.01)


def attend(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def keeps_products(_: object, op: Any, *__: object, **___: object) -> bool:
    return op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "whole": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keeps_products)
    ),
}


@pytest.mark.rotating
@pytest.mark.parametrize("options", [{}, {"target": "triton-interpret"}])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_regions(name: str, options: dict[str, str]) -> None:
    """Two regions one after the other, and work beside them."""

    def model(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        for w in (first, second):
            x = x + F.layer_norm(CHECKPOINTS[name](attend, x, w), (16,))
        return x.square().mean()

    torch.manual_seed(0)
    inputs = [torch.randn(s, device=DEVICE) for s in ((2, 9, 16), (16, 48), (16, 48))]

    def gradients(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        own = [t.detach().to(dtype).requires_grad_() for t in inputs]
        loss = function(*own)
        return [loss.detach(), *torch.autograd.grad(loss, own)]

    run = torch.compile(model, backend="onepass", options={"cache": False, **options})
    triples = zip(
        gradients(run, torch.float32), gradients(model, torch.float32), gradients(model, torch.float64), strict=True
    )
    for number, triple in enumerate(triples):
        compare_tensor(str(number), *triple, absolute=1e-4)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_results_that_nobody_differentiates(used: int) -> None:
    """Backward is given the tangent of one of three results, another one each time."""

    def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ w
        return y.tanh(), y.sum(-1), F.softmax(y, -1)

    torch.manual_seed(0)
    own, theirs = ([t.clone().requires_grad_() for t in (torch.ones(5, 7), torch.full((7, 3), 0.1))] for _ in range(2))
    torch._dynamo.reset()
    run = torch.compile(model, backend="onepass")
    for number in (used, (used + 1) % 3):
        found, expected = (f(*x)[number].square().sum() for f, x in ((run, own), (model, theirs)))
        torch.testing.assert_close(torch.autograd.grad(found, own), torch.autograd.grad(expected, theirs))
