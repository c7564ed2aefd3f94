"""Pooling: reductions over windows, whose elements are masked loads.

Windows of a few elements are written out: max(x[2i - 1], x[2i], x[2i + 1]) where the position is inside. Gradients are
sums over the few windows that cover a position, so nothing is scattered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from ..ir.callables import operators
from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, Part, Reduce, literal, pointwise
from ..ir.monoids import highest, lowest
from ..ir.poly import Axis, Poly, nonnegative, product
from .context import Context
from .movement import at_least, both, less
from .registry import Unsupported, lowers
from .torch_private import POOL_OFFSETS
from .values import Ref, Shape, axis, linear_position, own_point

MOST_WRITTEN_OUT = 32  # elements of a window, windows that cover a position
Sizes = Sequence[int | Poly]
_COMBINE = {"sum": "add", "max": "maximum"}


@dataclass(frozen=True, slots=True)
class Windows:
    """Along one dimension of `length`: element k < size of window n < count is at step * n - before + spread * k."""

    length: Poly
    count: Poly
    size: Poly
    step: Poly
    before: Poly = Poly.ZERO
    spread: Poly = Poly.ONE

    def place(self, window: Poly, element: Poly) -> Poly:
        return window * self.step - self.before + element * self.spread

    @property
    def covering(self) -> Poly:
        """How many windows may have one position."""
        if self.size is self.step and self.spread is Poly.ONE:
            return Poly.ONE
        return ((self.size - 1) * self.spread + self.step) // self.step


def _windows(
    dims: int, x: Ref, given: Shape, size: Sizes, step: Sizes, before: Sizes, spread: Sizes = (1,)
) -> list[Windows]:
    """The windows of pooling from `x` to shape `given`; one number counts for every dimension.

    An operation gives these columns in this order; how its shape is rounded comes after them, and is FX's matter.
    """
    columns = [[*map(Poly.of, v)] * (dims if len(v) == 1 else 1) for v in (size, step or size, before, spread)]
    if any(v.constant is None for column in columns for v in column):
        raise Unsupported("windows whose geometry is not known")
    shapes = x.shape[-dims:], given[-dims:]
    return [Windows(*w) for w in zip(*shapes, *columns, strict=True)]


def _equal_windows(x: Ref, given: Shape, dims: int) -> list[Windows]:
    """The windows of adaptive pooling."""
    sizes = list(zip(x.shape[-dims:], given[-dims:], strict=True))
    if any(count is Poly.ZERO or (length % count).terms for length, count in sizes):
        raise Unsupported("adaptive pooling with windows of unequal sizes")
    return [Windows(length, count, length // count, length // count) for length, count in sizes]


def _points(sizes: Sequence[Poly]) -> tuple[list[Shape], tuple[Axis, ...]]:
    """Every point within `sizes`; one point over axes of a reduction where there are many."""
    number = product(sizes).constant
    if number is not None and number <= MOST_WRITTEN_OUT:
        return [tuple(map(Poly.of, p)) for p in itertools.product(*(range(n.constant or 0) for n in sizes))], ()
    point = tuple(axis(k, n, "r") for k, n in enumerate(sizes))
    return [point], tuple(p.axis for p in point if p.axis is not None)


def _combined(monoid: str, values: Sequence[Expr], over: tuple[Axis, ...]) -> Expr:
    """The reduction of the values at `_points`."""
    if over:
        return Part(Reduce(monoid, tuple(values), over), 0)
    return reduce(partial(pointwise, _COMBINE[monoid]), values)


def _within(at: Iterable[Poly], extents: Iterable[Poly]) -> Expr:
    """Whether each position is in its range, as far as it is not known."""
    found: list[Expr] = []
    for position, extent in zip(at, extents, strict=True):
        found += [] if nonnegative(position) else [at_least(position, Poly.ZERO)]
        found += [] if nonnegative(extent - 1 - position) else [less(position, extent)]
    return both(found)


def _elements(x: Ref, windows: list[Windows], at: Sequence[Poly]) -> tuple[list[tuple[Shape, Expr, Expr]], Any]:
    """Of the window at a point of the result: each element's place, whether it is inside and what it is; axes left."""
    outer, inner = at[: -len(windows)], at[-len(windows) :]
    points, over = _points([w.size for w in windows])
    places = [tuple(w.place(n, k) for w, n, k in zip(windows, inner, point, strict=True)) for point in points]
    lengths = [w.length for w in windows]
    return [(place, _within(place, lengths), x.at([*outer, *place])) for place in places], over


# --- maxima ---


def _values(ctx: Context, x: Ref, windows: list[Windows]) -> tuple[list[tuple[Shape, Expr, Expr]], tuple[Axis, ...]]:
    """Each element's place, whether it is inside the input, and its value, the least one where it is not."""
    elements, over = _elements(x, windows, own_point(ctx.out.shape))
    taken = [(place, inside, ctx.computing(value, x.dtype, exact=True)) for place, inside, value in elements]
    dtype = taken[0][2].dtype
    least = literal(lowest(dtype), dtype)
    return [(place, inside, pointwise("where", inside, value, least)) for place, inside, value in taken], over


def _largest(ctx: Context, x: Ref, windows: list[Windows]) -> tuple[Expr | Ref, Expr]:
    """The maximum of each window and the position of its first element that is as large, of the last NaN if any."""
    elements, over = _values(ctx, x, windows)
    lengths = [w.length for w in windows]
    if not over:
        pitches = [product((w.spread, *lengths[k + 1 :])) for k, w in enumerate(windows)]
        largest, first = _first_largest(ctx, windows, [value for _, _, value in elements], pitches)
        return largest, pointwise("add", _first_position(ctx, windows), ctx.convert(first, DType.I64))
    ((place, inside, value),) = elements
    whole = ctx.define(_combined("max", [value], over))
    known = ctx.computing(whole.aligned(ctx.out.shape), x.dtype, exact=True)
    position = Index(linear_position(place, lengths))
    none, nowhere = literal(-1, DType.I64), literal(highest(DType.I64), DType.I64)
    candidates = pointwise("where", inside & pointwise("eq", value, known), position, nowhere)
    first = _internal(ctx, Part(Reduce("min", (candidates,), over), 0))
    if not value.dtype.is_float:
        return whole, first
    not_numbers = pointwise("where", pointwise("isnan", value), position, none)
    last = _internal(ctx, Part(Reduce("max", (not_numbers,), over), 0))
    return whole, pointwise("where", pointwise("isnan", known), last, first)


def _first_position(ctx: Context, windows: list[Windows]) -> Expr:
    """The position in the input of the first element of a window, which may be outside."""
    inner = own_point(ctx.out.shape)[-len(windows) :]
    place = [w.place(n, Poly.ZERO) for w, n in zip(windows, inner, strict=True)]
    return Index(linear_position(place, [w.length for w in windows]))


def _internal(ctx: Context, value: Expr) -> Expr:
    return ctx.define_internal(value, ctx.out.shape, value.dtype).aligned(ctx.out.shape)


def _first_largest(
    ctx: Context, windows: list[Windows], values: list[Expr], pitches: Sequence[Poly]
) -> tuple[Expr, Expr]:
    """The maximum of the values of a window, written out, and its place in the window in steps of `pitches`."""
    points, _ = _points([w.size for w in windows])
    steps = [sum((k * pitch for k, pitch in zip(p, pitches, strict=True)), Poly.ZERO) for p in points]
    last = steps[-1].constant
    dtype = DType.I32 if last is not None and last < 1 << 31 else DType.I64
    found: Expr = literal(0, dtype)
    for w, n, pitch in zip(windows, own_point(ctx.out.shape)[-len(windows) :], pitches, strict=True):
        found = pointwise("add", found, _first_inside(ctx, w, n, pitch, dtype))
    largest, *others = values
    for value, step in zip(others, steps[1:], strict=True):
        larger = pointwise("gt", value, largest)
        larger = larger | pointwise("isnan", value) if value.dtype.is_float else larger
        found = pointwise("where", larger, ctx.size(step, dtype), found)
        largest = pointwise("maximum", largest, value)
    return largest, found


def _first_inside(ctx: Context, w: Windows, window: Poly, pitch: Poly, dtype: DType) -> Expr:
    """How far the first element of a window that is not before the input is from its first one."""
    found: Expr = literal(0, dtype)
    outside = [k for k in range(w.size.constant or 0) if not nonnegative(w.place(window, Poly.of(k)))]
    for k in reversed(outside):
        after = found if k + 1 in outside else ctx.size(pitch * (k + 1), dtype)
        inside = at_least(w.place(window, Poly.of(k)), Poly.ZERO)
        found = pointwise("where", inside, ctx.size(pitch * k, dtype), after)
    return found


def _max_pool(dims: int, ctx: Context, x: Ref, *geometry: Any) -> tuple[Expr | Ref, Expr]:
    *columns, _rounding = geometry
    return _largest(ctx, x, _windows(dims, x, ctx.out.shape, *columns))


def _max_pool_offsets(ctx: Context, x: Ref, *geometry: Any) -> tuple[Expr, Expr]:
    *columns, _rounding = geometry
    windows = _windows(len(columns[0]), x, ctx.out.shape, *columns)
    elements, _ = _values(ctx, x, windows)
    pitches = [product(w.size for w in windows[k + 1 :]) for k in range(len(windows))]
    return _first_largest(ctx, windows, [value for _, _, value in elements], pitches)


def _offsets_to_indices(
    ctx: Context, offsets: Ref, size: Sizes, lengths: Sizes, step: Sizes, before: Sizes, spread: Sizes
) -> Ref:
    columns = [[*map(Poly.of, v)] for v in (lengths, ctx.out.shape[-len(size) :], size, step, before, spread)]
    rest = ctx.convert(offsets.aligned(ctx.out.shape), DType.I32)
    windows = [Windows(*w) for w in zip(*columns, strict=True)]
    position: Expr = _first_position(ctx, windows)
    for k, w in reversed(list(enumerate(windows))):
        extent = ctx.size(w.size, DType.I32)
        element = ctx.convert(pointwise("remainder", rest, extent), DType.I64) if k else ctx.convert(rest, DType.I64)
        rest = pointwise("truncdiv", rest, extent)
        pitch = ctx.size(product((w.spread, *(v.length for v in windows[k + 1 :]))), DType.I64)
        position = pointwise("add", position, pointwise("mul", element, pitch))
    indices = ctx.define(position)
    ctx.offsets[indices.buffer] = offsets
    return indices


def _adaptive_max(dims: int, ctx: Context, x: Ref, sizes: Sizes) -> tuple[Expr | Ref, Expr]:
    return _largest(ctx, x, _equal_windows(x, ctx.out.shape, dims))


# --- means ---


def _mean(ctx: Context, x: Ref, windows: list[Windows], include: bool = True, divisor: int | None = None) -> Expr:
    at = own_point(ctx.out.shape)
    elements, over = _elements(x, windows, at)
    compute = ctx.out.dtype.compute
    nothing = literal(0, compute)
    terms = [pointwise("where", inside, ctx.computing(value, ctx.out.dtype), nothing) for _, inside, value in elements]
    total = _combined("sum", terms, over)
    total = _internal(ctx, total) if over else total
    count = _divisor(ctx, windows, at[-len(windows) :], include, divisor, compute)
    return pointwise("div" if compute.is_float else "truncdiv", total, count)


def _divisor(
    ctx: Context, windows: list[Windows], at: Sequence[Poly], include: bool, divisor: int | None, dtype: DType
) -> Expr:
    """What the sum of a window is divided by: its elements inside the input, or inside its padding too."""
    if divisor is not None:
        return literal(divisor, dtype)
    count: Expr = literal(1, DType.I64)
    for w, n in zip(windows, at, strict=True):
        start, end = w.place(n, Poly.ZERO), w.length + (w.before if include else 0)
        stop = start + w.size
        high = Index(stop) if nonnegative(end - stop) else pointwise("where", less(stop, end), Index(stop), Index(end))
        low: Expr = Index(start)
        if not include and not nonnegative(start):
            low = pointwise("where", at_least(start, Poly.ZERO), low, Index(Poly.ZERO))
        count = pointwise("mul", count, pointwise("sub", high, low))
    if isinstance(count, Index):
        return ctx.size(count.poly, dtype)
    return ctx.convert(count, dtype)


def _avg_pool(dims: int, ctx: Context, x: Ref, *geometry: Any) -> Expr:
    *columns, _rounding, include, divisor = geometry
    return _mean(ctx, x, _windows(dims, x, ctx.out.shape, *columns), include, divisor)


# --- gradients: sums over the windows that have a position ---


def _gathered(
    ctx: Context, gradient: Ref, windows: list[Windows], share: Callable[[Shape, Shape, Expr, Expr], Expr]
) -> Expr:
    """The sum over the windows that may have a position of what `share` says: of the window's place, the position's
    place in it, whether there is such a window, and its gradient."""
    at = own_point(ctx.out.shape)
    outer, inner = at[: -len(windows)], at[-len(windows) :]
    points, over = _points([w.covering for w in windows])
    terms: list[Expr] = []
    for point in reversed(points):
        reached = [p + w.before for w, p in zip(windows, inner, strict=True)]
        place = tuple(r // w.step - k for w, r, k in zip(windows, reached, point, strict=True))
        element = tuple(r % w.step + w.step * k for w, r, k in zip(windows, reached, point, strict=True))
        exists = _within(place, [w.count for w in windows])
        value = ctx.computing(gradient.at((*outer, *place)), ctx.out.dtype)
        terms.append(share((*outer, *place), element, exists, value))
    return _combined("sum", terms, over)


def _has(windows: list[Windows], element: Shape) -> Expr:
    """Whether a window reaches a position as far as `element` from its start."""
    return _within(element, [w.size for w in windows])


def _max_pool_backward(dims: int, ctx: Context, gradient: Ref, x: Ref, *geometry: Any) -> Expr:
    *columns, _rounding, indices = geometry
    return _to_largest(ctx, gradient, _windows(dims, x, gradient.shape, *columns), indices)


def _to_largest(ctx: Context, gradient: Ref, windows: list[Windows], indices: Ref) -> Expr:
    inner = own_point(ctx.out.shape)[-len(windows) :]
    position = Index(linear_position(inner, [w.length for w in windows]))
    offsets = ctx.offsets.get(indices.buffer)

    def share(window: Shape, element: Shape, exists: Expr, value: Expr) -> Expr:
        if offsets is None or any(w.spread is not Poly.ONE for w in windows):
            chosen = exists & pointwise("eq", indices.at(window), position)
        else:
            own = Index(linear_position(element, [w.size for w in windows]))
            same = pointwise("eq", ctx.convert(offsets.at(window), DType.I32), ctx.convert(own, DType.I32))
            chosen = exists & _has(windows, element) & same
        return pointwise("where", chosen, value, literal(0, value.dtype))

    return _gathered(ctx, gradient, windows, share)


def _adaptive_avg(dims: int, ctx: Context, x: Ref, sizes: Sizes) -> Expr:
    return _mean(ctx, x, _equal_windows(x, ctx.out.shape, dims))


def _adaptive_max_backward(dims: int, ctx: Context, gradient: Ref, x: Ref, indices: Ref) -> Expr:
    return _to_largest(ctx, gradient, _equal_windows(x, gradient.shape, dims), indices)


def _avg_pool_backward(dims: int, ctx: Context, gradient: Ref, x: Ref, *geometry: Any) -> Expr:
    *columns, _rounding, include, divisor = geometry
    return _spread(ctx, gradient, _windows(dims, x, gradient.shape, *columns), include, divisor)


def _spread(
    ctx: Context, gradient: Ref, windows: list[Windows], include: bool = True, divisor: int | None = None
) -> Expr:
    def share(window: Shape, element: Shape, exists: Expr, value: Expr) -> Expr:
        count = _divisor(ctx, windows, window[-len(windows) :], include, divisor, value.dtype)
        return pointwise("where", exists & _has(windows, element), value / count, literal(0, value.dtype))

    return _gathered(ctx, gradient, windows, share)


def _adaptive_avg_backward(dims: int, ctx: Context, gradient: Ref, x: Ref) -> Expr:
    return _spread(ctx, gradient, _equal_windows(x, gradient.shape, dims))


for _dims in (2, 3):
    lowers(f"max_pool{_dims}d_with_indices")(partial(_max_pool, _dims))
    lowers(f"max_pool{_dims}d_with_indices_backward")(partial(_max_pool_backward, _dims))
    lowers(f"adaptive_max_pool{_dims}d")(partial(_adaptive_max, _dims))
    lowers(f"adaptive_max_pool{_dims}d_backward")(partial(_adaptive_max_backward, _dims))
    lowers(f"avg_pool{_dims}d")(partial(_avg_pool, _dims))
    lowers(f"avg_pool{_dims}d_backward")(partial(_avg_pool_backward, _dims))
    lowers(f"_adaptive_avg_pool{_dims}d")(partial(_adaptive_avg, _dims))
    lowers(f"_adaptive_avg_pool{_dims}d_backward")(partial(_adaptive_avg_backward, _dims))
lowers(POOL_OFFSETS[0])(_max_pool_offsets)
lowers(POOL_OFFSETS[1])(_offsets_to_indices)
_WITH_OFFSETS, _TO_INDICES = operators(" ".join(POOL_OFFSETS)) if POOL_OFFSETS[0] else (None, None)


def _max_pool_by_offsets(
    dims: int, x: torch.Tensor, size: Any, step: Any = (), before: Any = (0,), spread: Any = (1,), ceil: bool = False
) -> Any:
    """Positions in a window take a byte, positions in the input eight: backward saves the first."""
    size, step, before, spread = ([*v] * dims if len(v) == 1 else [*v] for v in (size, step or size, before, spread))
    if not _TO_INDICES or any(isinstance(n, torch.SymInt) for n in size) or math.prod(size) > MOST_WRITTEN_OUT:
        return NotImplemented
    values, offsets = _WITH_OFFSETS(x, size, step, before, spread, ceil)
    return values, _TO_INDICES(offsets, size, x.shape[-dims:], step, before, spread)


def pooling_decompositions() -> dict[Any, Callable[..., Any]]:
    two, three = operators("max_pool2d_with_indices max_pool3d_with_indices")
    return {two: partial(_max_pool_by_offsets, 2), three: partial(_max_pool_by_offsets, 3)}
