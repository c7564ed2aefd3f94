"""Tiles with rows and columns: the classes that are open as one or both, and blocks of matrices that hardware copies.

All tiles of a kernel with matrix products have two dimensions. A class that is a column of one matrix and a row of
another is opened once for each.
"""

from __future__ import annotations

from ..analysis.access import estimate, flat_offset
from ..ir.kernel import Descriptor
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer
from .builder import Builder, divides

ROW, COLUMN = 0, 1
MOST_DESCRIBED = 256  # of a side of a block
MOST_MATRICES = 16  # of one kernel, as its launcher takes them


class MatrixTiles:
    """The open tiles of one kernel."""

    def __init__(self, company: MatrixTiles | None = None) -> None:
        """`company`: a kernel that shares the launch."""
        self.builder: Builder = Builder(company.builder if company is not None else None)
        self.opened: dict[tuple[Axis, int], Axis] = {}  # class and dimension -> the axis that expressions use
        self.lanes: dict[Axis, Axis] = {}  # that axis -> its tile
        self.starts: dict[Axis, Poly] = {}  # that axis -> the first position of its tile
        self.whole: set[Axis] = set()  # those whose tiles never cross the end
        self.descriptors: dict[tuple[Buffer, int, tuple[int, int]], Descriptor]
        self.descriptors = company.descriptors if company is not None else {}
        self.wide = False  # offsets have 64 bits

    def axis(self, cls: Axis, dim: int) -> Axis:
        """The class as rows or columns of a tile."""
        return self.opened.setdefault((cls, dim), Axis(f"{cls.name}{'rc'[dim]}", cls.extent))

    def lane(self, cls: Axis, dim: int) -> Axis:
        """The tile of a class that is open as rows or columns."""
        return self.lanes[self.axis(cls, dim)]

    def open(self, cls: Axis, dim: int, lanes: int, start: Poly) -> None:
        """A class as a dimension of tiles from here on: positions [start, start + lanes)."""
        own = self.axis(cls, dim)
        tile = self.lanes.setdefault(own, Axis(f"t{cls.name}{'rc'[dim]}", Poly.of(lanes)))
        whole = divides(lanes, cls)
        self.builder.open_tile(own, tile, start, () if whole else (cls.extent - start,), dim)
        self.starts[own] = start
        if whole:
            self.whole.add(own)

    def block(self, buffer: Buffer, index: tuple[Poly, ...]) -> tuple[Descriptor, Poly, Poly, bool, Poly] | None:
        """Elements as a block of their buffer seen as a matrix, if tiles are whole and rows start on 16 bytes."""
        offset = flat_offset(buffer, index)
        axes = [a for a in offset.axes if a in self.lanes]
        inner = next((a for a in axes if offset.coefficient(a) is Poly.ONE), None)
        if self.wide or inner is None or len(axes) != 2 or not self.whole >= set(axes) or offset.indirects():
            return None
        (outer,) = (a for a in axes if a is not inner)
        step = offset.coefficient(outer)
        pitch = step.constant if step is not None else None
        sizes = [p.constant for p in (*buffer.shape, *buffer.strides)]
        if pitch is None or pitch <= 0 or pitch * buffer.dtype.bytes % 16 or None in sizes:
            return None
        rest = offset - inner - pitch * outer
        row = Poly(tuple((m, k // pitch) for m, k in rest.terms if k % pitch == 0))
        column = rest - row * pitch
        reach = _largest(column)
        block = (self.lanes[outer].extent.constant or 1, self.lanes[inner].extent.constant or 1)
        if reach is None or reach + estimate(inner.extent) > pitch:
            return None
        if max(block) > MOST_DESCRIBED or block[1] * buffer.dtype.bytes < 16:
            return None
        key = (buffer, pitch, block)
        if key not in self.descriptors and len(self.descriptors) == MOST_MATRICES:
            return None
        if key not in self.descriptors:
            pairs = zip(buffer.shape, buffer.strides, strict=True)
            last = sum(((size.constant or 0) - 1) * (stride.constant or 0) for size, stride in pairs)
            name = f"matrix{len(self.descriptors)}"
            self.descriptors[key] = Descriptor(name, buffer, last // pitch + 1, pitch, block)
        resolve = self.builder.resolve
        return (
            self.descriptors[key],
            resolve(row) + self.starts[outer],
            resolve(column) + self.starts[inner],
            next(dim for (_, dim), a in self.opened.items() if a is outer) == COLUMN,
            resolve(offset),
        )


def _largest(poly: Poly) -> int | None:
    """The largest value of a poly in axes with constant extents and positive steps."""
    total = 0
    for monomial, step in poly.terms:
        sizes = [a.extent.constant if isinstance(a, Axis) else None for a in monomial]
        if len(sizes) > 1 or step < 0 or None in sizes:
            return None
        total += step * (sizes[0] - 1 if sizes and sizes[0] is not None else 1)
    return total
