"""Operands of one byte on the matrix unit: int8 sums are exact, float8 ones are kept in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.backend import record_compilations
from onepass.ir.target import targets
from tests.chips import CHIPS
from tests.contractions.judging import FREE, explained, interpreted, make_library_slow, without_gpu

pytest.importorskip("triton")
Arguments = Callable[[], tuple[Tensor, ...]]
LIBRARY = ("aten._int_mm.default", "aten._scaled_mm.default")


def integers(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def eights(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def left_to_library(e: onepass.Explanation) -> list[str]:
    return [x.op for x in e.externs if x.op in LIBRARY]


# --- int8 ---


def dequantised(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return (torch._int_mm(a, b).float() * s * t).to(torch.float16)


def requantised(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return torch.round(torch._int_mm(a, b) * s).clamp(-128, 127).to(torch.int8)


def with_scales(rows: int, inside: int, columns: int) -> Arguments:
    return lambda: (
        integers(rows, inside),
        integers(inside, columns),
        torch.rand(rows, 1) / 4096,
        torch.rand(columns) + 0.5,
    )


INTEGERS: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "scales": (dequantised, with_scales(37, 64, 48)),
    "primes": (dequantised, with_scales(53, 97, 31)),
    "short": (dequantised, with_scales(19, 8, 16)),
    "long": (dequantised, with_scales(18, 3001, 24)),
    "one row": (dequantised, with_scales(1, 64, 48)),
    "weights as linear has them": (
        lambda a, b, s, t: dequantised(a, b.t(), s, t),
        lambda: (integers(37, 64), integers(48, 64), torch.rand(37, 1) / 4096, torch.rand(48)),
    ),
    "every other row": (lambda a, b, s, t: dequantised(a[::2], b[:, ::2], s[::2], t[::2]), with_scales(38, 64, 48)),
    "quantised again": (requantised, lambda: (integers(37, 64), integers(64, 48), torch.tensor(1e-3))),
    "bias and activation": (
        lambda a, b, c: torch.relu(torch._int_mm(a, b) + c),
        lambda: (integers(37, 64), integers(64, 48), torch.randint(-9999, 9999, (48,), dtype=torch.int32)),
    ),
    "zero point": (
        lambda a, b: (torch._int_mm(a, b) - 3 * a.sum(1, dtype=torch.int32, keepdim=True)).float() * 0.25,
        lambda: (integers(37, 64), integers(64, 48)),
    ),
    "side by side": (
        lambda a, b, c: (torch._int_mm(a, b), torch._int_mm(a, c)),
        lambda: (integers(37, 64), integers(64, 48), integers(64, 16)),
    ),
}


@without_gpu
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    """The largest sums are exact: all of them at -128."""
    function, arguments = INTEGERS[name]
    for extreme in (False, True):
        given = [torch.full_like(a, -128) if extreme and a.dtype is torch.int8 else a for a in arguments()]
        with record_compilations() as records:
            ours = interpreted(function)(*given)
        assert all(not r.externs for r in records)
        theirs = function(*given)
        for mine, other in zip(*((o if isinstance(o, tuple) else (o,)) for o in (ours, theirs)), strict=True):
            assert mine.dtype is other.dtype
            assert torch.equal(mine, other) if not mine.dtype.is_floating_point else torch.allclose(mine, other)


@without_gpu
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_one_kernel(name: str) -> None:
    function, arguments = INTEGERS[name]
    e = explained(function, *arguments())
    split = name in ("long", "zero point")  # over the sum; beside a kernel that sums rows
    assert len(e.kernels) <= 1 + split and not left_to_library(e), [d.reason for d in e.rejected]


@without_gpu
def test_a_bare_product_stays_with_the_library() -> None:
    e = explained(torch._int_mm, integers(37, 64), integers(64, 48))
    assert not e.kernels and left_to_library(e) == ["aten._int_mm.default"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [16, 4096])
@pytest.mark.parametrize("target", CHIPS)
def test_integers_build(target: str, rows: int, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if rows == 16:
        make_library_slow(monkeypatch)

    def function(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return dequantised(a, b.t() if transposed else b, s, t)

    with FakeTensorMode(), torch.no_grad():
        a, b = (torch.empty(n, 4096, dtype=torch.int8) for n in (rows, 4096))
        e = onepass.explain(function, a, b, torch.empty(rows, 1), torch.empty(4096), target=target, options=FREE)
    if target == "sm_100":
        assert left_to_library(e) and "no matrix unit takes int8 there" in [d.reason for d in e.rejected]
        return
    if rows == 4096 and not (target == "sm_90" and transposed):  # no matrix goes to the unit as it is
        assert left_to_library(e)
        return
    assert not left_to_library(e) and "out_dtype=tl.int32" in e.kernels[0].source
    assert all(k.registers > 0 and k.spilled_bytes == 0 for k in e.kernels)
    assert all(k.shared_bytes <= targets()[target].shared_bytes for k in e.kernels)


# --- float8 ---


def scaled(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return torch.relu(torch._scaled_mm(a, b.t(), scale_a=s, scale_b=t, out_dtype=torch.bfloat16))


def biased(a: Tensor, b: Tensor, s: Tensor, t: Tensor, c: Tensor, r: Tensor) -> Tensor:
    total = torch._scaled_mm(a, b.t(), scale_a=s, scale_b=t, bias=c, out_dtype=torch.bfloat16, use_fast_accum=True)
    return F.silu(total) + r


def exactly(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return torch.relu(a.double() @ b.double().t() * s.double() * t.double())


def biased_exactly(a: Tensor, b: Tensor, s: Tensor, t: Tensor, c: Tensor, r: Tensor) -> Tensor:
    return F.silu(a.double() @ b.double().t() * s.double() * t.double() + c.double()) + r.double()


one = torch.tensor(0.5)
FLOATS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Arguments]] = {
    "one scale": (scaled, exactly, lambda: (eights(48, 64), eights(32, 64), one, one / 2)),
    "of one element": (scaled, exactly, lambda: (eights(48, 64), eights(32, 64), one.view(1), one.view(1, 1))),
    "rows and columns": (
        scaled,
        exactly,
        lambda: (eights(48, 64), eights(32, 64), torch.rand(48, 1), torch.rand(1, 32)),
    ),
    "primes": (scaled, exactly, lambda: (eights(37, 80), eights(48, 80), one, one)),
    "long": (scaled, exactly, lambda: (eights(19, 2080), eights(16, 2080), one, one)),
    "one row": (scaled, exactly, lambda: (eights(1, 64), eights(32, 64), one, one)),
    "bias, activation, residual": (
        biased,
        biased_exactly,
        lambda: (eights(48, 64), eights(32, 64), one, one, torch.randn(32).bfloat16(), torch.randn(48, 32).bfloat16()),
    ),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_library_slow(monkeypatch)
    function, reference, arguments = FLOATS[name]
    given = arguments()
    with record_compilations() as records:
        ours = interpreted(function)(*given)
    assert [(len(r.externs)) for r in records] == [0]
    exact = reference(*given)
    assert ours.dtype is torch.bfloat16
    assert torch.allclose(ours.double(), exact, rtol=2**-7, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_one_kernel(name: str) -> None:
    function, _, arguments = FLOATS[name]
    e = explained(function, *arguments())
    assert len(e.kernels) <= 1 + (name == "long") and not left_to_library(e), [d.reason for d in e.rejected]
    assert "max_num_imprecise_acc" in e.kernels[0].source


@without_gpu
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_chips_without_such_a_unit(target: str) -> None:
    """The library has the product, also of one row, and the reason is told."""
    for name in ("one scale", "one row"):
        function, _, arguments = FLOATS[name]
        e = explained(function, *arguments(), target=target)
        assert left_to_library(e) == ["aten._scaled_mm.default"]
        assert "no matrix unit takes float8_e4m3fn there" in [d.reason for d in e.rejected]


@pytest.mark.parametrize("rows", [16, 2176])
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_floats_build(target: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_library_slow(monkeypatch)
    arguments = (
        torch.zeros(rows, 256).to(torch.float8_e4m3fn),
        torch.zeros(4096, 256).to(torch.float8_e4m3fn),
        one,
        one,
        torch.zeros(4096).bfloat16(),
        torch.zeros(rows, 4096).bfloat16(),
    )
    e = explained(biased, *arguments, target=target, built=True)
    (kernel,) = e.kernels
    assert not left_to_library(e) and kernel.registers > 0 and kernel.spilled_bytes == 0
    assert kernel.shared_bytes <= targets()[target].shared_bytes


def test_block_scales_stay_with_the_library() -> None:
    """Scales of another form than one, or one for each row and column, are none of a kernel's."""
    from onepass.ir.dtypes import DType
    from onepass.ir.poly import Poly
    from onepass.ir.program import Buffer, contiguous_strides
    from onepass.lowering.contractions import _scale
    from onepass.lowering.values import whole

    def ref(*shape: int) -> Any:
        sizes = tuple(map(Poly.of, shape))
        return whole(Buffer("s", DType.F32, sizes, contiguous_strides(sizes)))

    out = ref(48, 32).buffer
    assert _scale(ref(48, 1), out, 0) is not None and _scale(ref(1, 32), out, 1) is not None
    assert _scale(ref(1, 32), out, 0) is None and _scale(ref(48, 4), out, 0) is None
