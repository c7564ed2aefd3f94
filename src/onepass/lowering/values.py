"""What an FX node is worth during lowering: a `Ref` to a buffer, a size, or something of the host.

A `Ref` is a buffer seen through an index map: one poly per buffer dimension over the canonical axes
`d0, d1, ...` of the ref's own shape. An axis of extent 1 never appears; its index is 0.

    x.t() of a (2, 3) buffer:  Ref(x, shape=(3, 2), index=(d1, d0))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TypeAlias

from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, const
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, HostValue, contiguous_strides

Shape: TypeAlias = tuple[Poly, ...]


def axis(number: int, extent: Poly, prefix: str = "d") -> Poly:
    """The canonical axis of a dimension as an index; 0 for a dimension of size 1."""
    return Poly.ZERO if extent is Poly.ONE else Axis(f"{prefix}{number}", extent).poly()


def own_point(shape: Sequence[Poly]) -> Shape:
    """The canonical axes of a shape, as indices."""
    return tuple(axis(k, extent) for k, extent in enumerate(shape))


def axes_of(shape: Sequence[Poly]) -> tuple[Axis, ...]:
    """The canonical axes of a shape, those of extent 1 left out."""
    return tuple(Axis(f"d{k}", extent) for k, extent in enumerate(shape) if extent is not Poly.ONE)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What FX says a tensor is."""

    shape: Shape
    strides: Shape
    dtype: DType
    device: str


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor during lowering: a buffer and an index map from `shape` into it."""

    buffer: Buffer
    shape: Shape
    index: Shape

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype

    @property
    def device(self) -> str:
        return self.buffer.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.buffer.shape and self.index == own_point(self.shape)

    @property
    def meta(self) -> TensorMeta:
        strides = self.buffer.strides if self.is_whole else contiguous_strides(self.shape)
        return TensorMeta(self.shape, strides, self.dtype, self.device)

    def view(self, shape: Sequence[Poly], point: Sequence[Poly]) -> Ref:
        """A view: element `axes of shape` is this ref's element `point` (polys over those axes)."""
        return Ref(self.buffer, tuple(shape), self.index_at(point))

    def index_at(self, point: Sequence[Poly]) -> Shape:
        """The buffer's index of this ref's element `point`; positions along dimensions of size 1 do not count."""
        own = zip(own_point(self.shape), point, strict=True)
        mapping = {place.axis: at for place, at in own if place is not Poly.ZERO}
        return tuple(p.substitute(mapping) for p in self.index)

    def at(self, point: Sequence[Poly]) -> Expr:
        """The value of element `point`; of a tensor without elements nobody asks, and nothing may be read."""
        if any(extent is Poly.ZERO for extent in self.buffer.shape):
            return const(0, self.dtype)
        return Load(self.buffer, self.index_at(point))

    def aligned(self, shape: Sequence[Poly]) -> Expr:
        """The value at the canonical axes of `shape`, after broadcasting to it."""
        missing = len(shape) - self.ndim
        point = own_point(shape)[missing:]
        return self.at([Poly.ZERO if mine is Poly.ONE else at for mine, at in zip(self.shape, point, strict=True)])


@dataclass(frozen=True, slots=True)
class HostNumber:
    """A float computed from sizes: `value` for kernels, `host` for calls that take a Python number."""

    value: Expr
    host: HostValue


def whole(buffer: Buffer) -> Ref:
    """The ref that is all of a buffer."""
    return Ref(buffer, buffer.shape, own_point(buffer.shape))


def split_linear(linear: Poly, shape: Sequence[Poly]) -> list[Poly]:
    """The row-major position `linear` as one index per dimension of `shape`."""
    point: list[Poly] = []
    for extent in reversed(shape[1:]):
        point.append(linear % extent)
        linear = linear // extent
    if shape:
        point.append(linear)
    return point[::-1]


def linear_position(point: Sequence[Poly], shape: Sequence[Poly]) -> Poly:
    """The row-major position of `point` in `shape`."""
    position = Poly.ZERO
    for at, extent in zip(point, shape, strict=True):
        position = position * extent + at
    return position


def reshape_point(old: Sequence[Poly], new: Sequence[Poly]) -> list[Poly]:
    """For a reshape old -> new: the old point of each new one, over the axes of `new`.

    Dimensions are matched in groups of equal size, so that only dimensions that really split or
    merge pay a division.
    """
    if any(e is Poly.ZERO for e in (*old, *new)):
        return [Poly.ZERO] * len(old)
    axes = own_point(new)
    point: list[Poly] = []
    i = j = 0
    while i < len(old) or j < len(new):
        i_end, j_end = _matching_group(old, new, i, j)
        position = linear_position(axes[j:j_end], new[j:j_end])
        point.extend(split_linear(position, old[i:i_end]))
        i, j = i_end, j_end
    return point


def _matching_group(old: Sequence[Poly], new: Sequence[Poly], i: int, j: int) -> tuple[int, int]:
    """The end of the smallest groups old[i:..] and new[j:..] of equal size; all that is left otherwise."""
    products: dict[Poly, int] = {}
    for j_end, size in enumerate(accumulate(new[j:], mul, initial=Poly.ONE), j):
        products.setdefault(size, j_end)
    for i_end, size in enumerate(accumulate(old[i:], mul), i + 1):
        if size in products:
            return i_end, products[size] if i_end < len(old) else len(new)
    return len(old), len(new)
