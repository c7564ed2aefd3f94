"""Products of one matrix side by side in one launch: Q, K and V of unequal widths, each with its own epilogue."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.backend import record_compilations
from onepass.ir.target import targets
from onepass.planner.chooser import Chooser
from onepass.runtime.triton_private import Interpreter
from tests.chips import CHIPS
from tests.contractions.judging import FREE, explained, interpreted, judge, products_left, without_gpu
from tests.unbuilt import unbuilt

pytest.importorskip("triton")
Program = tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]


def half(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape).half() / 4 for shape in shapes)


def projections(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w) for w in weights)


def with_epilogues(x: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return F.gelu(F.linear(x, q, b)), F.linear(x, k, c), torch.relu(F.linear(x, v)) * 2


x, q, k, v = (37, 48), (64, 48), (21, 48), (16, 48)
BESIDE: dict[str, Program] = {
    "unequal": (projections, half(x, q, k, v)),
    "equal": (projections, half(x, q, q, q)),
    "two": (projections, half(x, q, k)),
    "primes": (projections, half((31, 47), (53, 47), (2, 47), (19, 47))),
    "in batches": (projections, half((2, 19, 48), q, k, v)),
    "with epilogues": (with_epilogues, half(x, q, k, v, (64,), (21,))),
    "heads apart": (
        lambda x, q, k: (F.linear(x, q).view(37, 4, 16).transpose(0, 1).contiguous(), F.linear(x, k) + 1),
        half(x, q, k),
    ),
    "weights as stored": (lambda x, q, k: (x @ q, x @ k), half(x, (48, 64), (48, 21))),
    "every other row": (lambda x, q, k: (x[::2] @ q, x[::2] @ k), half(x, (48, 64), (48, 21))),
    "norm in front": (lambda x, q, k, v: projections(F.rms_norm(x, (48,)), q, k, v), half(x, q, k, v)),
}

# Programs that only look like it: what one product makes, another one waits for.
WAITING: dict[str, Program] = {
    "for a sum": (lambda x, q, k: (lambda a: (a, x @ (k * a.sum())))(x @ q), half(x, (48, 64), (48, 21))),
    "for a library call": (
        lambda x, q, k: (lambda a: (a, F.linear(x, k, torch.sort(a[0])[0][:21])))(x @ q),
        half(x, (48, 64), k),
    ),
    "for an epilogue": (lambda x, q, k: (lambda a: (a, (x @ k) * a[:, 1:]))(x @ q), half(x, (48, 22), (48, 21))),
    "in a row": (lambda x, q, k: (lambda a: (a, x @ a))(x @ q), half((48, 48), (48, 48), (48, 48))),
}


@pytest.mark.parametrize("name", BESIDE)
def test_one_launch(name: str) -> None:
    function, arguments = BESIDE[name]
    e = explained(function, *arguments())
    norm = name == "norm in front"
    assert len(e.kernels) == 1 + norm and not products_left(e), [d.reason for d in e.rejected]


@pytest.mark.parametrize("name", BESIDE)
def test_values(name: str) -> None:
    function, arguments = BESIDE[name]
    with record_compilations() as records:
        judge(interpreted(function), function, *arguments())
    assert [(len(r.kernels), len(r.externs)) for r in records] == [(1 + (name == "norm in front"), 0)]


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_another_launch(name: str) -> None:
    function, arguments = WAITING[name]
    judge(interpreted(function), function, *arguments())
    e = explained(function, *arguments())
    assert len(e.kernels) + len(products_left(e)) > 1


def test_a_row_and_a_column_stay_with_others() -> None:
    """A product without rows or columns of its own is none of a kernel's: the others still share a launch."""
    arguments = half(x, q, (1, 48), k)()
    judge(interpreted(projections), projections, *arguments)


def test_an_empty_one() -> None:
    arguments = half(x, q, (0, 48), k)()
    judge(interpreted(projections), projections, *arguments)


def test_inside_a_layer() -> None:
    """One launch for all projections, one kernel for attention with what lies between; the last product is bare."""

    def layer(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, turn: Tensor) -> Tensor:
        def heads(w: Tensor) -> Tensor:
            return F.linear(x, w).view(2, 37, -1, 16).transpose(1, 2)

        def turned(t: Tensor) -> Tensor:
            return t * turn + torch.cat((-t[..., 8:], t[..., :8]), -1) * (1 - turn)

        queries, keys, values = turned(heads(q)), turned(heads(k)), heads(v)
        keys, values = (t.repeat_interleave(2, 1) for t in (keys, values))
        mixed = torch.softmax(queries @ keys.mT / 4, -1) @ values
        return F.linear(mixed.transpose(1, 2).reshape(2, 37, -1), out)

    arguments = half((2, 37, 48), (64, 48), (32, 48), (32, 48), (48, 64), (37, 16))()
    e = explained(layer, *arguments)
    assert [d.accepted for g in e.graphs for d in g.decisions if d.kind == "beside"] == [True]
    assert len(products_left(e)) <= 1, [d.reason for d in e.rejected]
    judge(interpreted(layer), layer, *arguments)


def test_through_another_region() -> None:
    """Attention waits for the first and the third product, and the second product waits for attention."""

    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        a, c = x @ q, x @ v
        mixed = torch.softmax(a @ c.t(), -1) @ c
        return a, F.linear(x, k, mixed[0, :21]), c

    judge(interpreted(function), function, *half(x, (48, 64), k, (48, 64))())


def test_dynamic_rows() -> None:
    run = interpreted(projections, dynamic=True)
    for rows in (37, 130):
        judge(run, projections, *half((rows, 48), q, k, v)())


def test_gradients() -> None:
    arguments = [t.float().requires_grad_() for t in half(x, q, k, v)()]
    ours, theirs = (f(*arguments) for f in (interpreted(projections), projections))
    gradients = [torch.autograd.grad([o.sum() for o in out], arguments) for out in (ours, theirs)]
    for mine, other in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-4)


# --- programs that stay ---


class _Matrix:
    """A matrix in memory that is copied block by block, as the kernel's text asks for it."""

    def __init__(self, interpreter: Interpreter, data: Tensor, block: tuple[int, int]) -> None:
        self.interpreter, self.data, self.block = interpreter, data.numpy(), block

    def _at(self, at: list[Any]) -> tuple[slice, slice]:
        first, second = (
            int(np.asarray(getattr(p, "handle", p).data).item()) if hasattr(p, "handle") else p for p in at
        )
        return slice(first, first + self.block[0]), slice(second, second + self.block[1])

    def load(self, at: list[Any]) -> Any:
        return self.interpreter.tensor(self.data[self._at(at)].copy(), self.interpreter.language.float16)

    def store(self, at: list[Any], value: Any) -> None:
        self.data[self._at(at)] = self.interpreter.data(value)


@without_gpu
@pytest.mark.parametrize("processors", [2, 3, 5])
def test_programs_that_stay_take_every_tile_once(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text for a chip with few processors, run with matrices in the place of its descriptors."""
    monkeypatch.setitem(targets(), "sm_90", replace(targets()["sm_90"], processors=processors))
    monkeypatch.setattr(Chooser, "apart", lambda *_: math.inf)  # whatever the library takes
    arguments = half((512, 512), (512, 512), (256, 512), (256, 512))()
    (kernel,) = explained(projections, *arguments).kernels
    assert "tl.num_programs(0)" in kernel.source and kernel.source.count("flatten=True") == 3
    interpreter = Interpreter()
    namespace: dict[str, Any] = {"tl": interpreter.language, "op_wait_for_last_kernel": lambda: None}
    exec(compile(kernel.source[kernel.source.index("def ") :], "<kernel>", "exec"), namespace)
    results = [torch.full((512, w.shape[0]), torch.nan).half() for w in arguments[1:]]
    step, columns = (int(n) for n in re.findall(r"tl.arange\(0, (\d+)\)", kernel.source)[2:0:-1])
    tensors = [arguments[0]] + [t for pair in zip(arguments[1:], results, strict=True) for t in pair]
    blocks = [(128, step)] + [(columns, step), (128, columns)] * 3
    matrices = [_Matrix(interpreter, t, b) for t, b in zip(tensors, blocks, strict=True)]
    interpreter.run(namespace["onepass_dot"], [None] * 7 + matrices, processors, lambda *a: None, lambda *a: None)
    for mine, theirs in zip(results, projections(*arguments), strict=True):
        assert torch.allclose(mine.float(), theirs.float(), rtol=2e-3, atol=2e-3)


# --- other chips, other sizes ---


def fake(rows: int, inside: int, *widths: int) -> list[Tensor]:
    return [torch.empty(n, inside, dtype=torch.bfloat16) for n in (rows, *widths)]


@pytest.mark.parametrize("rows", [16, 4096])
@pytest.mark.parametrize("target", CHIPS)
def test_builds(target: str, rows: int) -> None:
    with FakeTensorMode(), torch.no_grad():
        e = onepass.explain(projections, *fake(rows, 2048, 2048, 512, 512), target=target, options=FREE)
    if rows == 4096 and target in ("sm_80", "gfx942"):  # where nothing copies blocks the library is faster
        assert not e.kernels and len(products_left(e)) == 3
        return
    (built,) = e.kernels
    assert not products_left(e) and built.registers > 0 and built.spilled_bytes == 0
    assert built.shared_bytes <= targets()[target].shared_bytes


@pytest.mark.parametrize(("target", "kernels"), [("sm_90", 1), ("gfx942", 0)])
def test_large_products(target: str, kernels: int) -> None:
    """Where nothing copies blocks they stay with the library."""
    with FakeTensorMode(), torch.no_grad(), unbuilt():
        e = onepass.explain(projections, *fake(65536, 2048, 2048, 512, 512), target=target, options=FREE)
    assert len(e.kernels) == kernels and len(products_left(e)) == (0 if kernels else 3)
    assert kernels or any("side by side in one launch" in d.reason for d in e.rejected)


def test_the_reason_is_told() -> None:
    function, arguments = BESIDE["unequal"]
    e = explained(function, *arguments())
    told = [d for g in e.graphs for d in g.decisions if d.kind == "beside"]
    assert len(told) == 1 and told[0].accepted and told[0].saved_us > 0
    assert "side by side in one launch" in told[0].reason
