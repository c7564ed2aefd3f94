"""Rows of a product, reduced inside its kernel: right values whatever the numbers, sizes and masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass.planner.contractions as contractions
from onepass.backend import record_compilations
from tests.checking import DEVICE
from tests.contractions.judging import explained, interpreted, judge, products_left
from tests.contractions.row_spellings import HELD, OTHERS, PASSING, SWEPT, matrices

pytest.importorskip("triton")
INFINITY, NAN = float("inf"), float("nan")
KINDS = {"held": HELD, "swept": SWEPT, "passing": PASSING}
PROGRAMS = {f"{kind} {name}": program for kind, programs in KINDS.items() for name, program in programs.items()}


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """These sizes are for an interpreter: what can be one kernel is one. What pays is `test_row_planning.py`."""
    rows = replace(contractions.ROWS, without=lambda *_: (math.inf, 0.0))
    monkeypatch.setattr(contractions, "REDUCED", (rows,))


def together(function: Callable[..., object], *arguments: Tensor, absolute: float = 0.0) -> None:
    """The values are right, and no product is left to the library."""
    with record_compilations() as records:
        judge(interpreted(function), function, *arguments, absolute=absolute)
    assert any(d.kind == "rows" and d.accepted for r in records for d in r.decisions)
    assert not [e.op for r in records for e in r.externs]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_product_is_left_to_the_library(name: str) -> None:
    function, arguments = PROGRAMS[name]
    e = explained(function, *arguments())
    assert not products_left(e), [d.reason for d in e.rejected]
    assert any(d.kind == "rows" and d.accepted for g in e.graphs for d in g.decisions)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str) -> None:
    function, arguments = PROGRAMS[name]
    together(function, *arguments())


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    function, arguments = OTHERS[name]
    judge(interpreted(function), function, *arguments())


# --- sizes ---


def softmax(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).softmax(-1)


def statistics(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    s = x @ w.t()
    return torch.logsumexp(s, -1), s.argmax(-1), s.float().var(-1), s.sum(-1)


@pytest.mark.rotating
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 131])
@pytest.mark.parametrize("columns", [1, 2, 67, 512, 513, 1031])
@pytest.mark.parametrize("k", [0, 1, 2, 97, 259])
def test_odd_shapes(rows: int, columns: int, k: int) -> None:
    judge(interpreted(statistics), statistics, *matrices((rows, k), (columns, k), dtype=torch.float32)())


@pytest.mark.parametrize("columns", [1, 3, 17, 300, 512])
def test_odd_rows_stored(columns: int) -> None:
    judge(interpreted(softmax), softmax, *matrices((37, 50), (columns, 50))())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(40, 70).half().t(),
        lambda: torch.randn(140, 40).half()[::2],
        lambda: torch.randn(70, 80).half()[:, ::2],
        lambda: torch.randn(1, 40).half().expand(70, 40),
        lambda: torch.randn(70, 1).half().expand(70, 40),
    ],
    ids=["transposed", "every other row", "every other column", "one row expanded", "one column expanded"],
)
def test_any_strides(make: Callable[[], Tensor], side: str) -> None:
    a, b = make(), torch.randn(600, 40).half()
    if side == "right":
        a, b = torch.randn(37, 40).half(), torch.cat([make()] * 9)
        b = make() if 0 in make().stride() else b
    judge(interpreted(statistics), statistics, a, b)


def test_dynamic_sizes() -> None:
    """Rows and columns that are not known: swept, compiled once."""
    run = interpreted(statistics)
    with record_compilations() as records:
        for rows, columns in ((37, 700), (70, 900), (5, 600)):
            x, w = matrices((rows, 64), (columns, 64), dtype=torch.float32)()
            for t in (x, w):
                torch._dynamo.mark_dynamic(t, 0)
            judge(lambda *_, x=x, w=w: run(x, w), statistics, x, w)
    assert len(records) == 1 and not records[0].externs


def test_all_sizes_dynamic() -> None:
    run = interpreted(statistics, dynamic=True)
    for rows, columns, k in ((37, 700, 64), (70, 40, 33)):
        judge(run, statistics, *matrices((rows, k), (columns, k), dtype=torch.float32)())


# --- odd numbers ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [48, 700])
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_scores(dtype: torch.dtype, columns: int, scale: float) -> None:
    """On a GPU scaling and subtracting the maximum are one instruction: sums are off by the maximum's own rounding."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = (x @ w.t()).float() * scale
        return torch.logsumexp(s, -1), (s - s.amax(-1, keepdim=True)).exp().sum(-1)

    together(function, *matrices((37, 64), (columns, 64), dtype=dtype)(), absolute=2e-3 if DEVICE == "cuda" else 0.0)


@pytest.mark.parametrize("columns", [48, 700])
@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_scores_far_from_zero(columns: int, shift: float) -> None:
    """The sum of nothing, before the first tile, meets a reference far away: 0 times infinity is not formed."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.logsumexp((x @ w.t()).float() + shift, -1)

    together(function, *matrices((37, 64), (columns, 64))())


@pytest.mark.parametrize("odd", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("columns", [48, 700])
@pytest.mark.parametrize("which", range(2))
def test_odd_numbers_in_inputs(odd: float, columns: int, which: int) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        s = x @ w.t()
        return torch.logsumexp(s, -1), s.amax(-1), s.argmax(-1), s.sum(-1)

    arguments = matrices((37, 64), (columns, 64), dtype=torch.float32)()
    arguments[which][33, 3] = odd
    together(function, *arguments)


@pytest.mark.parametrize("columns", [48, 700])
def test_masked_rows(columns: int) -> None:
    """Rows without any score: -inf, as eager; first tiles masked: what follows counts."""

    def function(x: Tensor, w: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        s = (x @ w.t()).masked_fill(~keep, -INFINITY)
        return torch.logsumexp(s, -1), s.amax(-1)

    keep = torch.rand(37, columns) < 0.5
    keep[3] = keep[30:] = False
    keep[20:, : columns - 5] = False
    keep[21] = False
    together(function, *matrices((37, 64), (columns, 64))(), keep)


def test_masked_rows_of_softmax() -> None:
    def function(x: Tensor, w: Tensor, keep: Tensor) -> Tensor:
        return (x @ w.t()).masked_fill(~keep, -INFINITY).softmax(-1)

    keep = torch.rand(37, 48) < 0.5
    keep[3] = keep[30:] = False
    together(function, *matrices((37, 64), (48, 64))(), keep)


@pytest.mark.parametrize("columns", [48, 700])
def test_ties_go_to_the_first(columns: int) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.t()).argmax(-1)

    x, w = torch.randn(37, 16).half(), torch.randn(8, 16).half()
    together(function, x, w.repeat(columns // 8 + 1, 1)[:columns])


def test_arg_max_sees_rounded_scores() -> None:
    """Scores that differ only beyond 16 bits are equal for eager, which takes the first of them."""
    x = torch.ones(37, 32).half()
    w = torch.full((700, 32), 8.0).half()
    w[300, 0] += 0.0625  # 256.0625, which rounds to 256
    function = lambda x, w: (x @ w.t()).argmax(-1)  # noqa: E731
    assert interpreted(function)(x, w).tolist() == function(x, w).tolist() == [0] * 37


def test_variance_far_from_zero() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x @ w.t() + 1000.0, (48,))

    together(function, *matrices((37, 64), (48, 64), dtype=torch.float32)())


def test_targets_out_of_range_are_not_read() -> None:
    """An ignored row has no target: the index that stands for it is 0."""

    def function(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.t(), t, reduction="none", ignore_index=-1)

    targets = torch.full((37,), -1)
    targets[5] = 699
    together(function, *matrices((37, 64), (700, 64))(), targets)


# --- many columns for few rows ---


@pytest.mark.parametrize("k", [32, 300])
def test_columns_are_shared_out(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs leave states of their columns, which a second kernel merges: also those of arg-max and variance."""
    import onepass.schedule.product_kernels as split

    monkeypatch.setattr(split, "_row_chunks", lambda *_: 3)

    def function(x: Tensor, w: Tensor, t: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        s = (x @ w.t()).masked_fill(~keep, -INFINITY)
        p = x @ w.t()
        loss = F.cross_entropy(p, t, reduction="none")
        return torch.logsumexp(s, -1), s.argmax(-1), s, p.float().var(-1), loss, p.amin(-1)

    keep = torch.rand(37, 2100) < 0.5
    keep[5] = keep[6:20, :1800] = False
    arguments = (*matrices((37, k), (2100, k))(), torch.randint(0, 2100, (37,)), keep)
    with record_compilations() as records:
        judge(interpreted(function), function, *arguments)
    assert any("3 chunks" in kernel.schedule for r in records for kernel in r.kernels)


# --- gradients ---


@pytest.mark.parametrize("columns", [48, 700])
def test_training(columns: int) -> None:
    """Backward wants the scores or computes them again: values and gradients are right."""

    def function(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), t)

    x, w = (t.requires_grad_() for t in matrices((37, 64), (columns, 64), dtype=torch.float32)())
    targets = torch.randint(0, columns, (37,))
    ours, theirs = (f(x, w, targets) for f in (interpreted(function), function))
    gradients = [torch.autograd.grad(out, (x, w)) for out in (ours, theirs)]
    for mine, other in zip((ours, *gradients[0]), (theirs, *gradients[1]), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)


SCALED: dict[str, Callable[[Tensor], Tensor]] = {
    "rounded and widened": lambda p: (p * 0.158).float(),
    "divided": lambda p: (p / 3).float(),
    "as it is": lambda p: p / 3,
    "masked": lambda p: (p / 3).masked_fill(torch.ones_like(p, dtype=torch.bool).triu(1), -torch.inf),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [40, 700])
@pytest.mark.parametrize("name", SCALED)
def test_the_largest_is_one_of_its_row(name: str, columns: int, dtype: torch.dtype) -> None:
    """A maximum is rounded, and divided, as what it is compared with."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        s = SCALED[name](x @ w.t())
        top = s.amax(-1, keepdim=True)
        return (s == top).sum(-1), (s >= top).sum(-1), (s <= s.amin(-1, keepdim=True)).sum(-1)

    x, w = torch.randn(37, 32).to(dtype), torch.randn(columns, 32).to(dtype)
    for found in interpreted(function)(x, w):
        assert (found > 0).all()


def test_the_gradient_of_a_maximum_beside_a_softmax() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = (x @ w.t() * 0.158).float()
        return torch.logsumexp(s, -1), s.amax(-1)

    gradients = []
    for run in (function, interpreted(function)):
        torch.manual_seed(0)
        x, w = torch.randn(37, 40).half().requires_grad_(), torch.randn(70, 40).half().requires_grad_()
        total, top = run(x, w)
        gradients.append(torch.autograd.grad((total.sum() + top.sum()), (x, w)))
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
