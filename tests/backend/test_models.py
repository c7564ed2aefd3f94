"""Training and inference of small models: losses, gradients, buffers and updated weights as in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.backend.models import MODELS
from tests.checking import DEVICE, compare_tensor, compiled


def train(model: nn.Module, run: nn.Module, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """Losses of a few SGD steps; the model's parameters and buffers change."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return losses


def same(what: str, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    compare_tensor(what, ours, eager, exact, absolute=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    torch.manual_seed(1)
    model, x = MODELS[name].make(), MODELS[name].example()
    ours, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    keys = list(model.state_dict())
    expected = train(model, model, x)
    exact = train(wide, wide, x.double() if x.is_floating_point() else x)
    got = train(ours, compiled(ours), x)
    for step, triple in enumerate(zip(got, expected, exact, strict=True)):
        same(f"loss {step}", *triple)
    assert list(ours.state_dict()) == keys
    for key in keys:
        same(key, ours.state_dict()[key], model.state_dict()[key], wide.state_dict()[key])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, mode: type[torch.no_grad]) -> None:
    torch.manual_seed(1)
    model, x = MODELS[name].make().eval(), MODELS[name].example()
    wide = copy.deepcopy(model).double()
    with mode():
        got = compiled(model, fullgraph=True)(x)
        same("output", got, model(x), wide(x.double() if x.is_floating_point() else x))
        assert not got.requires_grad


@pytest.mark.parametrize("name", ["mlp", "block", "conv", "language"])
def test_autocast(name: str) -> None:
    torch.manual_seed(1)
    model, x = MODELS[name].make(), MODELS[name].example()
    ours = copy.deepcopy(model)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = model(x).float().square().mean()
        got = compiled(ours)(x).float().square().mean()
    expected.backward()
    got.backward()
    torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03)
    # A bias before a norm has no gradient but noise: errors are judged beside the largest gradient of all.
    mine = [p.grad for p in ours.parameters()]
    theirs = [p.grad for p in model.parameters()]
    scale = max(g.abs().max().item() for g in theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max().item() <= 0.05 * scale


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(1)
    model, x = MODELS["block"].make(), MODELS["block"].example()
    ours = copy.deepcopy(model)

    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(module, x, use_reentrant=False)
        return out.square().mean()

    expected = run(model, x)
    expected.backward()
    got = compiled(lambda x: run(ours, x))(x)
    got.backward()
    torch.testing.assert_close(got, expected)
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_batch_norm_statistics() -> None:
    torch.manual_seed(1)
    model, x = MODELS["conv"].make(), MODELS["conv"].example()
    ours = copy.deepcopy(model)
    run = compiled(ours)
    for _ in range(4):
        model(x)
        run(x)
    for (name, mine), (_, theirs) in zip(ours.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
    model.eval()
    ours.eval()
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_compiled_optimiser_step(kind: str) -> None:
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    }
    torch.manual_seed(1)
    theirs = [nn.Parameter(torch.randn(s)) for s in ((7, 5), (5,), (3, 2, 4))]
    mine = [nn.Parameter(p.detach().clone()) for p in theirs]
    optimisers = makers[kind](theirs), makers[kind](mine)
    step = compiled(lambda: optimisers[1].step())
    for number in range(4):
        for a, b in zip(theirs, mine, strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator(DEVICE).manual_seed(number))
            b.grad = a.grad.clone()
        optimisers[0].step()
        step()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_state_dict_and_reload() -> None:
    torch.manual_seed(1)
    model, x = MODELS["mlp"].make(), MODELS["mlp"].example()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    run = compiled(model)
    run(x)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    other = MODELS["mlp"].make()
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(x), other(x))
