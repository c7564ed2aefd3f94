"""Tiles of a product leave states of its reductions: right values whatever the numbers, sizes and types."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import onepass.planner.contractions as planning
from onepass.backend import record_compilations
from tests.contractions.judging import interpreted, judge
from tests.contractions.row_spellings import matrices
from tests.contractions.state_spellings import STATES

pytest.importorskip("triton")
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """These sizes are for an interpreter: what can leave states does. What pays is `test_state_planning.py`."""
    tiles = replace(planning.TILES, without=lambda *_: (math.inf, 0.0), rival=None)
    monkeypatch.setattr(planning, "REDUCED", (tiles, planning.ROWS))


def together(function: Callable[..., object], *arguments: Tensor) -> None:
    """The values are right, no product is left to the library, and tiles leave states."""
    with record_compilations() as records:
        judge(interpreted(function), function, *arguments)
    assert any(d.kind == "tiles" and d.accepted for r in records for d in r.decisions)
    assert not [e.op for r in records for e in r.externs]
    assert any(kernel.name.endswith("_finish") for r in records for kernel in r.kernels)


@pytest.mark.parametrize("name", STATES)
def test_values(name: str) -> None:
    function, arguments = STATES[name]
    together(function, *arguments())


# --- sizes ---


def statistics(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w.t()
    return y, y.sum(-1), y.amax(0) if len(y) else y, y.var(-1, correction=0), torch.logsumexp(y, -1), y.square().sum()


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 131])
@pytest.mark.parametrize("columns", [1, 2, 67, 128, 257])
@pytest.mark.parametrize("k", [0, 1, 2, 97])
def test_odd_shapes(rows: int, columns: int, k: int) -> None:
    judge(interpreted(statistics), statistics, *matrices((rows, k), (columns, k), dtype=torch.float32)())


@pytest.mark.parametrize("rows", [128, 131])
@pytest.mark.parametrize("columns", [128, 257])
def test_whole_and_broken_tiles(rows: int, columns: int) -> None:
    together(statistics, *matrices((rows, 97), (columns, 97), dtype=torch.float32)())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(40, 70).half().t(),
        lambda: torch.randn(140, 40).half()[::2],
        lambda: torch.randn(70, 80).half()[:, ::2],
        lambda: torch.randn(1, 40).half().expand(70, 40),
    ],
    ids=["transposed", "every other row", "every other column", "one row expanded"],
)
def test_any_strides(make: Callable[[], Tensor]) -> None:
    judge(interpreted(statistics), statistics, make(), torch.randn(150, 40).half())


def test_transposed_result() -> None:
    together(lambda x, w: (lambda y: (y.contiguous(), y.amax(0)))((x @ w.t()).t()), *matrices((150, 40), (70, 40))())


def test_dynamic_sizes() -> None:
    """Rows and columns that are not known: compiled once."""
    run = interpreted(statistics)
    with record_compilations() as records:
        for rows, columns in ((37, 300), (170, 90), (5, 600)):
            x, w = matrices((rows, 64), (columns, 64), dtype=torch.float32)()
            for t in (x, w):
                torch._dynamo.mark_dynamic(t, 0)
            judge(lambda *_, x=x, w=w: run(x, w), statistics, x, w)
    assert len(records) == 1 and not records[0].externs


# --- odd numbers ---


@pytest.mark.parametrize("odd", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("which", range(2))
def test_odd_numbers_in_inputs(odd: float, which: int) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w.t()
        return y.amax(-1), y.amin(0), y.sum(-1), y.abs().max(), torch.logsumexp(y, -1)

    arguments = matrices((150, 40), (301, 40), dtype=torch.float32)()
    arguments[which][133, 3] = odd
    together(function, *arguments)


def test_masked_rows() -> None:
    """Rows, and tiles, without any score: as eager; what follows in another tile counts."""

    def function(x: Tensor, w: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        s = (x @ w.t()).masked_fill(~keep, -INFINITY).float()
        return torch.logsumexp(s, -1), s.amax(-1), (s - s.amax(-1, keepdim=True)).exp().sum(-1)

    keep = torch.rand(150, 301) < 0.5
    keep[3] = keep[30:60] = False
    keep[100:, :290] = False
    together(function, *matrices((150, 40), (301, 40))(), keep)


def test_variance_far_from_zero() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w.t() + 1000.0
        return y, y.var(-1), y.var(0)

    together(function, *matrices((150, 40), (301, 40), dtype=torch.float32)())


def test_statistics_see_what_is_stored() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w.t()
        return y, y.float().amax(-1), y.float().amin(0)

    y, largest, least = interpreted(function)(*matrices((150, 40), (301, 40))())
    assert torch.equal(largest, y.float().amax(-1)) and torch.equal(least, y.float().amin(0))


# --- gradients ---


def test_training() -> None:
    """Statistics that a loss is made of: values and gradients are right."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, w)
        return (y.square().mean(-1) + y.amax(-1)).sum() + y.var(0).sum()

    x, w = (t.requires_grad_() for t in matrices((150, 40), (301, 40), dtype=torch.float32)())
    ours, theirs = (f(x, w) for f in (interpreted(function), function))
    gradients = [torch.autograd.grad(out, (x, w)) for out in (ours, theirs)]
    for mine, other in zip((ours, *gradients[0]), (theirs, *gradients[1]), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)
