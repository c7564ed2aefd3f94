"""`eager_random`: random numbers are eager's, bit by bit, and the generator ends where eager's does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.checking import DEVICE
from torch import Tensor

import onepass

OPTIONS = {"eager_random": True, "strict": True}
SHAPES = (
    (1,), (5,), (64,), (129,), (0, 4), (1, 1), (7, 16), (16, 7), (33, 129), (128, 64), (3, 4, 5), (1, 9, 1),
    (2, 31, 17), (8, 8, 8), (2, 3, 8, 8), (1, 4, 5, 5), (2, 1, 3, 1), (2, 3, 4, 5, 6), (1, 2, 1, 2, 1), (4, 0, 2),
)  # fmt: skip
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(torch.relu(F.dropout(x * 2, 0.3)), 0.5),
    "dropout of 16-bit values": lambda x: F.dropout(x.bfloat16() * 2, 0.2) + F.dropout(x.half(), 0.6).float(),
    "rand": lambda x: torch.rand(x.shape, device=x.device) + torch.rand_like(x),
    "randn": lambda x: torch.randn_like(x) - torch.randn(x.shape, device=x.device),
    "bernoulli": lambda x: torch.bernoulli(x.detach().sigmoid()) + (x * 1).bernoulli_(0.3),
    "randint": lambda x: torch.randint(0, 10, x.shape, device=x.device) + torch.randint_like(x, 5),
}


def drawn(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """The result, the gradient where there is one, and the state of the generator after both."""
    torch.manual_seed(5)
    leaf = x.detach().clone().requires_grad_()
    result = function(leaf)
    gradient = torch.autograd.grad(result.sum(), leaf)[0] if result.requires_grad else None
    return result.detach(), gradient, torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


@pytest.mark.rotating
@pytest.mark.parametrize("order", ["rows", "transposed"])
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_eager(name: str, order: str) -> None:
    for shape in SHAPES:
        x = torch.linspace(-2, 2, max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].reshape(shape)
        x = x if order == "rows" else x.transpose(0, -1)
        torch._dynamo.reset()
        expected, found = (drawn(f, x) for f in (DRAWS[name], onepass.jit(DRAWS[name], options=OPTIONS)))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True)), shape


def test_without_the_option_kernels_draw_numbers_of_their_own() -> None:
    x = torch.ones(64, 64)
    expected, found = (drawn(f, x) for f in (DRAWS["dropout"], onepass.jit(DRAWS["dropout"])))
    assert not torch.equal(expected[0], found[0])


def test_what_draws_is_said() -> None:
    found = onepass.explain(DRAWS["dropout"], torch.ones(8, 8), options=OPTIONS)
    assert [e.why for e in found.externs if "dropout" in e.op] == [
        "random numbers of this distribution come from eager"
    ] * 2


def test_a_network_trains_as_in_eager() -> None:
    """Masks of several layers, drawn in the program's order, over several steps."""

    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Dropout(0.2)]
        model = torch.nn.Sequential(*layers, *layers, torch.nn.Linear(32, 1))
        run = onepass.jit(model, options=OPTIONS) if compiled else model
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(5):
            loss = run(torch.randn(16, 32)).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            found.append(loss.item())
        return found

    assert losses(compiled=True) == pytest.approx(losses(compiled=False), rel=1e-5)
