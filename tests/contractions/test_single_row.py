"""Products of one row: one query for each head, one token. The axis has disappeared, the kernel is the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.backend import record_compilations
from onepass.planner import chooser
from onepass.schedule import product_kernels as split
from tests.chips import CHIPS
from tests.contractions.judging import FREE, explained, interpreted, judge, make_library_slow, products_left
from tests.contractions.spellings import heads, scores

pytest.importorskip("triton")
Program = tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def rotated(q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    turned = torch.cat([-q[..., half:], q[..., :half]], -1)
    return scores(q * cosine + turned * sine, k).softmax(-1) @ v


def halves(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape).half() for shape in shapes)


one = heads(2, 3, 1, 16, keys=70)
# One kernel each, two where the keys are shared out.
ONE_ROW: dict[str, Program] = {
    "plain": (plain, one),
    "without batch": (plain, heads(1, 16, keys=37)),
    "one key": (plain, heads(2, 3, 1, 16, keys=2)),
    "size 80": (plain, heads(2, 1, 1, 80, keys=53)),
    "values of another size": (plain, heads(1, 2, 1, 32, keys=53, value=24)),
    "float32": (plain, heads(1, 2, 1, 16, keys=53, dtype=torch.float32)),
    "many keys": (plain, heads(1, 2, 1, 16, keys=1501)),
    "mask": (masked, lambda: (*one(), torch.rand(2, 1, 1, 70) < 0.6)),
    "bias": (lambda q, k, v, b: (scores(q, k) + b).softmax(-1) @ v, lambda: (*one(), torch.randn(3, 1, 70).half())),
    "causal": (
        lambda q, k, v: (
            scores(q, k)
            .masked_fill(torch.arange(70, device=q.device) > torch.full((1, 1), 41, device=q.device), float("-inf"))
            .softmax(-1)
            @ v
        ),
        one,
    ),
    "heads inside": (
        lambda q, k, v: plain(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2),
        halves((2, 1, 3, 16), (2, 53, 3, 16), (2, 53, 3, 16)),
    ),
    "by einsum": (
        lambda q, k, v: torch.einsum("bhn,bhnd->bhd", (torch.einsum("bhd,bhnd->bhn", q, k) * 0.2).softmax(-1), v),
        halves((2, 3, 16), (2, 3, 53, 16), (2, 3, 53, 16)),
    ),
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), halves((1, 64), (48, 64), (48,))),
    "gate and value": (lambda x, w, u: F.silu(x @ w) * (x @ u), halves((1, 64), (64, 31), (64, 31))),
    "matrix and column": (lambda a, b: torch.relu(a @ b), halves((37, 50), (50, 1))),
    "int8 weights": (
        lambda x, w, s: x @ (w.to(x.dtype) * s).t(),
        lambda: (
            torch.randn(1, 64).half(),
            torch.randint(-128, 128, (48, 64), dtype=torch.int8),
            torch.rand(48, 1).half(),
        ),
    ),
    "side by side": (lambda x, q, k: (F.linear(x, q), F.linear(x, k)), halves((1, 64), (48, 64), (21, 64))),
}
OTHERS: dict[str, Program] = {
    "one row, one column": (lambda a, b: torch.relu(a @ b), halves((1, 50), (50, 1))),
    "rotated query": (rotated, lambda: (*one(), torch.randn(16).half(), torch.randn(16).half())),
    "one row and several": (lambda a, b, c: torch.relu(a @ b) @ c, halves((1, 50), (50, 40), (40, 30))),
    "two queries": (plain, heads(2, 3, 2, 16, keys=70)),
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_one_kernel(name: str) -> None:
    function, arguments = ONE_ROW[name]
    e = explained(function, *arguments())
    assert len(e.kernels) == 1 + (name == "many keys") and not products_left(e), [d.reason for d in e.rejected]


@pytest.mark.parametrize("name", [*ONE_ROW, *OTHERS])
def test_values(name: str) -> None:
    function, arguments = (ONE_ROW | OTHERS)[name]
    with record_compilations() as records:
        judge(interpreted(function), function, *arguments())
    assert name in OTHERS or all(not r.externs for r in records)


def test_fully_masked() -> None:
    """-inf everywhere gives NaN, for that head only."""
    keep = torch.rand(2, 3, 1, 70) < 0.6
    keep[1, 2] = False
    judge(interpreted(masked), masked, *one(), keep)


def test_dynamic_keys() -> None:
    run = interpreted(plain)
    with record_compilations() as records:
        for n in (70, 129):
            q, k, v = heads(2, 3, 1, 16, keys=n)()
            for t in (k, v):
                torch._dynamo.mark_dynamic(t, 2)
            judge(lambda *_, own=(q, k, v): run(*own), plain, q, k, v)
    assert [len(r.externs) for r in records] == [0]


@pytest.mark.rotating
@pytest.mark.parametrize("size", [16, 128])
def test_many_chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """More states than the second kernel holds at once: it sweeps them, the maximum first."""
    make_library_slow(monkeypatch)
    monkeypatch.setattr(split, "LEAST_STEPS", 1)
    monkeypatch.setattr(split, "PROGRAMS", 1000)
    with record_compilations() as records:
        judge(interpreted(plain), plain, *heads(1, 2, 1, size, keys=64 * 300)())
    first, last = records[0].kernels
    assert "in 300 chunks" in first.schedule and "chunk.c[300]: swept" in last.schedule


def test_a_bare_row_stays_with_the_library() -> None:
    e = explained(torch.mm, *halves((1, 64), (64, 48))())
    assert not e.kernels and len(products_left(e)) == 1


def test_float32_without_a_matrix_unit_stays_with_the_library() -> None:
    """A tile of 16 rows is multiplied for one: too much where every product is an instruction."""
    with FakeTensorMode(), torch.no_grad():
        x, w, b = torch.empty(1, 8192), torch.empty(8192, 8192), torch.empty(8192)
        e = onepass.explain(lambda x, w, b: F.silu(F.linear(x, w, b)), x, w, b, target="sm_90", options=FREE)
    assert len(products_left(e)) == 1 and any("predicted" in d.reason for d in e.rejected)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("target", CHIPS)
def test_builds(monkeypatch: pytest.MonkeyPatch, target: str, batch: int) -> None:
    monkeypatch.setattr(chooser, "product_us", lambda *_: math.inf)  # the library is as fast here
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(batch, 32, n, 128, dtype=torch.bfloat16) for n in (1, 8192, 8192))
        e = onepass.explain(plain, q, k, v, target=target, options=FREE)
    assert not products_left(e)
    assert len(e.kernels) == (2 if batch == 1 else 1)
    assert all(kernel.registers > 0 and kernel.spilled_bytes == 0 for kernel in e.kernels)
