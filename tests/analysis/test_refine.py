"""Axes of several stores are split where any of them walks a dimension in digits."""

from __future__ import annotations

from onepass.analysis.refine import refine
from onepass.ir.dtypes import DType
from onepass.ir.expr import Load
from onepass.ir.poly import Axis, Poly
from onepass.ir.program import Buffer, contiguous_strides


def axis(name: str, size: int) -> Axis:
    return Axis(name, Poly.of(size))


def buffer(*sizes: int) -> Buffer:
    shape = tuple(Poly.of(s) for s in sizes)
    return Buffer("x", DType.F32, shape, contiguous_strides(shape), "cpu")


def extents(stores: list[tuple[tuple[Axis, ...], tuple[Poly, ...], object]]) -> list[list[int | None]]:
    return [[a.extent.constant for a in axes] for axes, _, _ in stores]


def test_digits_of_one_store_split_the_axis_of_another() -> None:
    x, n, i, j = buffer(12), axis("n", 12), axis("i", 3), axis("j", 4)
    whole = ((n,), (n.poly(),), Load(x, (n.poly(),)))
    digits = ((i, j), (i.poly(), j.poly()), Load(x, (i * 4 + j,)))
    refined = refine([whole, digits])
    assert extents(refined) == [[3, 4], [3, 4]]
    (axes, index, value), _ = refined
    assert index == (axes[0] * 4 + axes[1],) and value.index == index


def test_both_dimensions() -> None:
    x, m, n = buffer(8, 6), axis("m", 8), axis("n", 6)
    m0, m1, n0, n1 = axis("a", 4), axis("b", 2), axis("c", 2), axis("d", 3)
    rows = ((m, n0, n1), (m.poly(), n0.poly(), n1.poly()), Load(x, (m.poly(), n0 * 3 + n1)))
    columns = ((m0, m1, n), (m0.poly(), m1.poly(), n.poly()), Load(x, (m0 * 2 + m1, n.poly())))
    assert extents(refine([rows, columns])) == [[4, 2, 2, 3], [4, 2, 2, 3]]


def test_what_does_not_count_the_dimension_splits_nothing() -> None:
    x, n, i, j = buffer(12), axis("n", 12), axis("i", 2), axis("j", 4)
    whole = ((n,), (n.poly(),), Load(x, (n.poly(),)))
    for partly in (i * 4 + j, i * 4 + j + 4, i * 8 + j):
        part = ((i, j), (i.poly(), j.poly()), Load(x, (partly,)))
        assert extents(refine([whole, part]))[0] == [12]
