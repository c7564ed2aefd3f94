"""`onepass::recurrence` gives the values of its steps, both ways, forward and backward, whole rows or in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.checking import Run, compare, execute, fresh, tensors_of, to_float64
from torch import Tensor

import onepass
from onepass.lowering.recurrences import recurrence

TARGETS = ("cpu", pytest.param("triton-interpret", marks=pytest.mark.rotating))


def compiled(function: Callable[..., object], target: str, **settings: object) -> Callable[..., object]:
    if target != "cpu":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    return onepass.jit(function, options={"target": target, "strict": True}, **settings)


def steps(a: Tensor, b: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """The same, step by step."""
    state, found = torch.zeros_like(b[0]) if first is None else first, []
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        state = a[t] * state + b[t]
        found.append(state)
    return torch.stack(found[::-1] if reverse else found) if found else b


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    made = torch.rand(shape, dtype=torch.float64), *(torch.randn(s, dtype=torch.float64) for s in (shape, shape[1:]))
    return [t.to(dtype).requires_grad_() for t in made]


def ours(a: Tensor, b: Tensor, first: Tensor) -> list[Tensor]:
    return [recurrence(a, b, f, r) * 2 for f in (first, None) for r in (False, True)]


def theirs(a: Tensor, b: Tensor, first: Tensor) -> list[Tensor]:
    return [steps(a, b, f, r) * 2 for f in (first, None) for r in (False, True)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "shape", [(37, 3, 5), *(pytest.param(s, marks=pytest.mark.rotating) for s in ((1, 4), (2, 1), (13,), (70, 1, 33)))]
)
def test_values_and_gradients(shape: tuple[int, ...], target: str) -> None:
    given = inputs(shape)
    exact = execute(theirs, [to_float64(t) for t in given], True)
    eager = execute(theirs, fresh(given), True)
    compare(execute(compiled(ours, target), fresh(given), True), eager, exact)
    compare(execute(ours, fresh(given), True), eager, exact)  # the operation as a call


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_nothing(shape: tuple[int, ...], target: str) -> None:
    a, b, first = (t.detach() for t in inputs(shape))
    assert [o.shape for o in compiled(ours, target)(a, b, first)] == [shape] * 4


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.rotating) for d in (torch.float64, torch.float16))]
)
def test_types(dtype: torch.dtype, target: str) -> None:
    given = [t.detach() for t in inputs((60, 5), dtype)]
    exact = Run(theirs(*map(to_float64, given)), [])
    compare(Run(compiled(ours, target)(*given), []), Run(theirs(*given), []), exact)


@pytest.mark.parametrize(
    ("target", "shape"), [("cpu", (33_001,)), ("cpu", (12_001, 3)), ("triton-interpret", (9001, 4))]
)
def test_few_long_rows(target: str, shape: tuple[int, ...]) -> None:
    """Programs take chunks, the last of which is shorter; a kernel between them goes from chunk to chunk."""

    def both(a: Tensor, b: Tensor, first: Tensor) -> list[Tensor]:
        return [recurrence(a, b, first, False) * 2, recurrence(a, b, None, True)]

    given = [t.detach() for t in inputs(shape)]
    exact = both(*map(to_float64, given))
    compare(Run(compiled(both, target)(*given), []), Run([e.float() for e in exact], []), Run(exact, []))
    names = [k.name for k in onepass.explain(both, *given, target=target, options={"cache": False}).kernels]
    assert len(names) == 3 and any("finish" in n for n in names), names


@pytest.mark.parametrize("target", TARGETS)
def test_dynamic_sizes(target: str) -> None:
    found = compiled(lambda a, b: recurrence(a.sigmoid(), b, None, False) + 1, target, dynamic=True)
    for shape in ((5, 7), (33, 4), (2, 130)):
        a, b, _ = (t.detach() for t in inputs(shape))
        torch.testing.assert_close(found(a, b), steps(a.sigmoid(), b, None, False) + 1)


def of_each_channel(decay: Tensor, x: Tensor, b: Tensor, c: Tensor, reverse: bool = False) -> list[Tensor]:
    """Several states for each channel, which are reduced at each step. `decay`: [t, c, n], x: [t, c], b, c: [t, n]."""
    states = recurrence(decay, x[:, :, None] * b[:, None], None, reverse)
    y = (states * c[:, None]).sum(-1)
    return [y * torch.sigmoid(x), states.amax(-1)]


def reduced(decay: Tensor, x: Tensor, b: Tensor, c: Tensor, reverse: bool = False) -> list[Tensor]:
    states = steps(decay, x[:, :, None] * b[:, None], None, reverse)
    return [(states * c[:, None]).sum(-1) * torch.sigmoid(x), states.amax(-1)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sizes", [(23, 5, 16), (8, 40, 3), (9, 1, 7)])
def test_states_that_are_reduced_at_each_step(sizes: tuple[int, int, int], reverse: bool, target: str) -> None:
    """Also more steps than run together, with a rest of them, and fewer."""
    torch.manual_seed(0)
    t, c, n = sizes
    given = [torch.rand(t, c, n), torch.randn(t, c), torch.randn(t, n), torch.randn(t, n)]
    found = compiled(lambda *args: of_each_channel(*args, reverse), target)(*given)
    exact = Run(reduced(*map(to_float64, given), reverse), [])
    compare(Run(found, []), Run(reduced(*given, reverse), []), exact)


def states(a: Tensor, b: Tensor, reverse: bool = False) -> Tensor:
    found: Tensor = recurrence(a, b, None, reverse)
    return found


NEEDED_AGAIN: dict[str, Callable[[Tensor, Tensor], object]] = {
    "softmax of states": lambda a, b: states(a, b).softmax(-1),
    "states and their sum": lambda a, b: (s := states(a, b), s.sum(-1), s / (1 + s.abs().sum(-1, True))),
    "sum of all": lambda a, b: (states(a, b).sum(), states(a, b).sum(0)),
    "one state beside many": lambda a, b: (states(a, b) * states(a[..., 0], b[..., 1])[..., None]).sum(-1),
    "of sums": lambda a, b: states(a.mean(-1), states(a, b).sum(-1)),
    "both ways": lambda a, b: (states(a, b) * states(a, b, True)).sum(-1),
    "of states": lambda a, b: states(a, states(a, b).tanh()).sum(-1),
    "shifted": lambda a, b: (states(a, b)[1:] * b[:-1]).sum(-1),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NEEDED_AGAIN)
def test_states_that_are_needed_again(name: str, target: str) -> None:
    """Whatever does not share a sweep with the states is right all the same."""
    a, b, _ = (t.detach() for t in inputs((11, 4, 6)))
    function = NEEDED_AGAIN[name]
    found, eager, exact = (
        f(*args)
        for f, args in ((compiled(function, target), (a, b)), (function, (a, b)), (function, (a.double(), b.double())))
    )
    compare(*(Run(tensors_of(x), []) for x in (found, eager, exact)))
