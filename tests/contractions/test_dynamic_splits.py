"""Sweeps of a size known at run time that programs share out: compiled once, and chunks may be empty."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.backend import record_compilations
from onepass.planner import chooser, contractions
from onepass.schedule import product_kernels as split
from tests.checking import DEVICE
from tests.chips import CHIPS
from tests.contractions.judging import explained, interpreted, judge, products_left
from tests.contractions.spellings import scores

pytest.importorskip("triton")
LENGTHS = (1000, 7, 63, 64, 65, 2, 129, 1000)
INFINITY = float("inf")
CHUNKS = "in 4 chunks" if DEVICE == "cpu" else " chunks"  # on a GPU: as many as it has processors for


def marked(*tensors: tuple[Tensor, int]) -> list[Tensor]:
    """Tensors with a dimension that changes; a size of 1 is torch's own special case."""
    for x, dimension in tensors:
        if x.shape[dimension] > 1:
            torch._dynamo.mark_dynamic(x, dimension)
    return [x for x, _ in tensors]


def over_sizes(function: Callable[..., Any], arguments: Callable[[int], list[Tensor]], graphs: int = 1) -> list[Any]:
    """Judge a function at every length; the kernels of its first graph."""
    run = interpreted(function)
    with record_compilations() as records:
        for n in LENGTHS if graphs == 1 else (*LENGTHS, 1):
            torch.manual_seed(n)
            own = arguments(n)
            judge(lambda *_, own=own: run(*own), function, *own)
    assert len(records) == graphs and not records[0].externs
    return list(records[0].kernels)


# --- values ---


def behind(s: Tensor) -> Tensor:
    """Positions of a key behind those of the query, where the last query has the last key's."""
    rows, keys = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    return rows[:, None] + (s.shape[-1] - s.shape[-2]) - keys[None, :]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of fewer keys than queries the first queries see none."""
    s = scores(q, k)
    return s.masked_fill(behind(s) < 0, -INFINITY).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Most chunks are empty whatever the size."""
    s = scores(q, k)
    return s.masked_fill((behind(s) < 0) | (behind(s) >= 40), -INFINITY).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q[:, :, :1], *(t.repeat_interleave(2, 1)[:, : q.shape[1]] for t in (k, v)))


def with_log_sum(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    s = s.masked_fill(behind(s) < 0, -INFINITY)
    return s.softmax(-1) @ v, torch.logsumexp(s.float(), -1)


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("function", [plain, causal, window, grouped])
def test_few_queries(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    def arguments(n: int) -> list[Tensor]:
        q, k, v = (torch.randn(1, 2, m, 16).to(dtype) for m in (5, n, n))
        return [q, *marked((k, 2), (v, 2))]

    first, last = over_sizes(function, arguments, graphs=2 if function is plain else 1)
    assert "chunks" in first.schedule and last.name.endswith("_finish")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_query(dtype: torch.dtype) -> None:
    def arguments(n: int) -> list[Tensor]:
        q, k, v = (torch.randn(1, 2, m, 16).to(dtype) for m in (1, n, n))
        return [q, *marked((k, 2), (v, 2))]

    first, _ = over_sizes(plain, arguments, graphs=2)
    assert CHUNKS in first.schedule


def test_log_sum_beside() -> None:
    """-inf where nothing is seen: a maximum of nothing in every chunk."""

    def arguments(n: int) -> list[Tensor]:
        q, k, v = (torch.randn(1, 1, m, 16) for m in (5, n, n))
        return [q, *marked((k, 2), (v, 2))]

    first, _ = over_sizes(with_log_sum, arguments)
    assert "chunks" in first.schedule


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_masked_rows(dtype: torch.dtype) -> None:
    """A mask from memory that leaves one row nothing, and another one nothing but the last key."""

    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return scores(q, k).masked_fill(~keep, -INFINITY).softmax(-1) @ v

    def arguments(n: int) -> list[Tensor]:
        q, k, v = (torch.randn(1, 2, m, 16).to(dtype) for m in (5, n, n))
        keep = torch.rand(5, n) < 0.7
        keep[1] = keep[2] = False
        keep[2, -1] = True
        return [q, *marked((k, 2), (v, 2), (keep, 1))]

    first, _ = over_sizes(function, arguments)
    assert "chunks" in first.schedule


def test_dynamic_batch() -> None:
    """States for as many as there are."""
    run = interpreted(plain)
    with record_compilations() as records:
        for b, n in ((2, 700), (3, 65), (9, 7)):
            q, k, v = (torch.randn(b, 1, m, 16) for m in (1, n, n))
            marked((q, 0), (k, 0), (v, 0))
            marked((k, 2), (v, 2))
            judge(lambda *_, own=(q, k, v): run(*own), plain, q, k, v)
    assert len(records) == 1 and CHUNKS in records[0].kernels[0].schedule


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_long_sums(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split-K, whatever it costs on the chip."""
    monkeypatch.setattr(split, "PROGRAMS", 8)
    monkeypatch.setattr(chooser, "product_us", lambda *_: math.inf)

    def function(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(a @ b + bias)

    def arguments(n: int) -> list[Tensor]:
        a, b = torch.randn(rows, n).to(dtype), torch.randn(n, 40).to(dtype)
        return [*marked((a, 1), (b, 0)), torch.randn(40).to(dtype)]

    first, _ = over_sizes(function, arguments, graphs=1)
    assert "chunks" in first.schedule


def test_columns_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of arg-max and variance that nothing has entered; in one kernel, whatever it costs on the chip."""
    monkeypatch.setattr(split, "_row_chunks", lambda *_: 7)
    rows = replace(contractions.ROWS, without=lambda *_: (math.inf, 0.0))
    monkeypatch.setattr(contractions, "REDUCED", (rows,))

    def function(x: Tensor, w: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        p = x @ w.t()
        s = p.masked_fill(~keep, -INFINITY)
        return torch.logsumexp(s, -1), s.argmax(-1), p.var(-1), p.amin(-1)

    def arguments(n: int) -> list[Tensor]:
        keep = torch.rand(20, n) < 0.5
        keep[3] = False
        return [torch.randn(20, 32), *marked((torch.randn(n, 32), 0), (keep, 1))]

    kernels = over_sizes(function, arguments)
    assert any("in 7 chunks" in kernel.schedule for kernel in kernels)


# --- plans ---


def decoding(keys: int, *, rows: int = 1, batch: int = 1) -> list[Tensor]:
    q, k, v = (torch.empty(batch, 8, n, 128, dtype=torch.bfloat16) for n in (rows, keys, keys))
    return [q, *marked((k, 2), (v, 2))]


@pytest.mark.parametrize("keys", [100, 2048, 32768])
def test_as_many_programs_for_any_hint(keys: int) -> None:
    """Two for each of 132 processors: the size may grow."""
    e = explained(plain, *decoding(keys))
    assert not products_left(e)
    assert [kernel.name.split("_")[-1] for kernel in e.kernels] == ["partial", "finish"]
    assert "in 33 chunks" in e.kernels[0].schedule


def test_enough_programs_share_nothing() -> None:
    (kernel,) = explained(plain, *decoding(2048, batch=64, rows=4)).kernels
    assert "chunks" not in kernel.schedule


def test_rows_that_grow_beside_the_keys_are_not_multiplied() -> None:
    """The states of every row would be too many; where the sweep is long the prediction knows that processors wait."""
    q, k, v = decoding(512, rows=512)
    marked((q, 2))
    (kernel,) = explained(plain, q, k, v).kernels
    assert "chunks" not in kernel.schedule
    q, k, v = (t[:, :2] for t in decoding(16384, rows=20))
    marked((q, 2), (k, 2), (v, 2))
    e = explained(plain, q, k, v)
    assert products_left(e) and not any("chunks" in k.schedule for k in e.kernels)
    torch._dynamo.reset()  # which would take the sizes for dynamic ones from here on
    fixed = explained(plain, *(torch.empty(1, 2, n, 128, dtype=torch.bfloat16) for n in (20, 16384, 16384)))
    assert not products_left(fixed)


def test_split_sums() -> None:
    """Two programs for each of 132 processors, whichever tiles fit: the assembler that is there counts registers."""
    a, b = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(4096, 64, dtype=torch.bfloat16)
    e = explained(lambda a, b: torch.relu(a @ b), *marked((a, 1), (b, 0)))
    found = re.search(r"rows by (\d+); .*columns by (\d+); .*in (\d+) chunks", e.kernels[0].schedule)
    assert not products_left(e) and found is not None
    rows, columns, chunks = map(int, found.groups())
    assert (64 // rows) * (64 // columns) * chunks == 2 * 132


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("function", [plain, causal])
def test_builds(function: Callable[..., Tensor], target: str) -> None:
    e = explained(function, *decoding(16384, rows=4), target=target, built=True)
    assert not products_left(e)
    assert [kernel.name.split("_")[-1] for kernel in e.kernels] == ["partial", "finish"]
    assert all(kernel.registers > 0 and kernel.spilled_bytes == 0 for kernel in e.kernels)
