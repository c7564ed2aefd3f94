"""Scans in a nest: turned upright, and what keeps a program from sweeping them."""

from __future__ import annotations

import pytest
import torch

from onepass.analysis.inline import scans
from onepass.analysis.legality import bare
from onepass.analysis.scans import cannot_chunk, cannot_scan, state_classes, upright
from onepass.ir.dtypes import DType
from onepass.ir.expr import Expr, Index, Load, Part, Reduce, Scan, const, pointwise
from onepass.ir.interpret import evaluate
from onepass.ir.plan import Store
from onepass.ir.poly import Axis, Poly
from onepass.ir.program import Buffer

N, M = Poly.of(4), Poly.of(6)
I, J, K, L = Axis("d0", N), Axis("d1", M), Axis("r0", M), Axis("r1", M)
A = Buffer("a0", DType.F32, (N, M), (M, Poly.ONE))
OUT = Buffer("b0", DType.F32, (N, M), (M, Poly.ONE))


def at(column: Poly, row: Poly | Axis = I) -> Expr:
    return Load(A, (Poly.ZERO + row, column))


def total(at_: Poly, value: Expr | None = None, reverse: bool = False) -> Expr:
    return Part(Scan("sum", (at(K.poly()) if value is None else value,), K, at_, reverse), 0)


def obstacle(value: Expr) -> str | None:
    return cannot_scan(bare([Store(OUT, (I, J), value)]))


def test_what_is_read_from_the_end_is_scanned_from_the_end() -> None:
    """flip(cumsum(flip(x))) and cumsum(x) read from the end."""
    x = torch.randn(4, 6)
    for value in (total(M - 1 - J, at(M - 1 - K)), total(M - 1 - J)):
        turned = upright(value)
        (scan,) = scans([turned])
        assert scan.reverse and scan.at.axis is J
        torch.testing.assert_close(evaluate(turned, (I, J), {A: x}, {}), evaluate(value, (I, J), {A: x}, {}))
    (twice,) = scans([upright(total(M - 1 - J, reverse=True))])
    assert not twice.reverse
    plain = total(J.poly())
    assert upright(plain) is plain


def test_what_is_read_one_position_before_is_a_scan_of_that() -> None:
    """Also from the end; the first position has what the monoid begins with, and a reader may have another value."""
    x = torch.randn(4, 6)
    ends = ((J - 1, False, J.poly()), (J + 1, True, M - 1 - J), (M - 2 - J, False, M - 1 - J))
    for place, reverse, numbered in ends:
        inside = pointwise("lt", const(0, DType.I64), Index(numbered))
        value = pointwise("where", inside, total(place, reverse=reverse), const(7.0, DType.F32))
        near = upright(value)
        (scan,) = scans([near])
        assert scan.at.axis is J
        torch.testing.assert_close(evaluate(near, (I, J), {A: x}, {}), evaluate(value, (I, J), {A: x}, {}))


def state_of(decay: Axis) -> Scan:
    """A state for each position of `decay`."""
    value = Load(A, (I.poly(), K.poly())) * pointwise("cast", Index(decay.poly()), dtype=DType.F32)
    return Scan("sum", (value,), K, J.poly())


def test_states_inside_a_program() -> None:
    """A scan may have several states at each position: they are reduced there, once."""
    state = Part(state_of(L), 0)
    summed = Part(Reduce("sum", (state,), (L,)), 0)
    nest = bare([Store(OUT, (I, J), summed)])
    (scan,) = nest.scans
    assert cannot_scan(nest) is None and len(state_classes(nest)) == 1 and scan.over not in nest.outer
    assert cannot_chunk(nest, scan.over) is not None
    again = Part(Reduce("sum", (pointwise("div", state, summed),), (L,)), 0)
    assert "again" in (obstacle(again) or "")
    other = Axis("r2", Poly.of(1000))
    assert "too many states" in (obstacle(Part(Reduce("sum", (Part(state_of(other), 0),), (other,)), 0)) or "")


def test_open_in_a_nest() -> None:
    """The axis of a scan is the class that it is read along, and no program owns a part of it."""
    nest = bare([Store(OUT, (I, J), total(J.poly()) * at(J.poly()))])
    (scan,) = nest.scans
    assert scan.is_open and scan.over not in nest.outer and len(nest.outer) == 1
    assert cannot_scan(nest) is None and cannot_chunk(nest, scan.over) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (total(J - 2), "other positions"),
        (total(Poly.ZERO), "other positions"),
        (total(J.poly()) + total(J.poly(), reverse=True), "both ways"),
        (Part(Reduce("sum", (pointwise("mul", total(J.poly()), at(L.poly())),), (L,)), 0), "made of|inside|position"),
        (total(J.poly(), Part(Reduce("sum", (at(K.poly()) * at(L.poly()),), (L,)), 0)), "reductions of each"),
    ],
)
def test_obstacles(value: Expr, reason: str) -> None:
    found = obstacle(value)
    assert found is not None and any(r in found for r in reason.split("|"))


def test_chunks_hold_one_scan() -> None:
    inner = Part(Scan("sum", (at(L.poly()),), L, K.poly()), 0)
    beside = Part(Reduce("sum", (at(L.poly()),), (L,)), 0)
    for value in (total(J.poly(), inner), total(J.poly()) + beside):
        nest = bare([Store(OUT, (I, J), value)])
        assert cannot_scan(nest) is None and cannot_chunk(nest, nest.scans[-1].over) is not None
