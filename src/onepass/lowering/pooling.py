"""Pooling: reductions over windows, whose elements are masked loads.

Windows of a few elements are written out: max(x[2i - 1], x[2i], x[2i + 1]) where the position is inside. Gradients are
sums over the few windows that cover a position, so nothing is scattered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, Part, Reduce, literal, pointwise
from ..ir.monoids import highest, lowest
from ..ir.poly import Axis, Poly, nonnegative, product
from .context import Context
from .movement import at_least, both, less
from .registry import Unsupported, lowers
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
    """The windows of pooling from `x` to shape `given`; one number counts for every dimension."""
    columns = [[*map(Poly.of, v * dims if len(v) == 1 else v)] for v in (size, step or size, before, spread)]
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


def _largest(ctx: Context, x: Ref, windows: list[Windows]) -> tuple[Expr | Ref, Expr]:
    """The maximum of each window and the position of its first element that is as large, of the last NaN if any."""
    at = own_point(ctx.out.shape)
    elements, over = _elements(x, windows, at)
    taken = [(place, inside, ctx.computing(value, x.dtype, exact=True)) for place, inside, value in elements]
    dtype = taken[0][2].dtype
    least = literal(lowest(dtype), dtype)
    values = [pointwise("where", inside, value, least) for _, inside, value in taken]
    if not over:
        best = list(itertools.accumulate(values, partial(pointwise, "maximum")))
        return best[-1], _first_largest(ctx, windows, at, values, best)
    largest = ctx.define(_combined("max", values, over))
    ((place, inside, value),) = taken
    position = Index(linear_position(place, [w.length for w in windows]))
    here, none = pointwise("eq", value, largest.aligned(ctx.out.shape)), literal(-1, DType.I64)
    candidates = pointwise("where", inside & here, position, literal(highest(DType.I64), DType.I64))
    first = _internal(ctx, Part(Reduce("min", (candidates,), over), 0))
    if not dtype.is_float:
        return largest, first
    not_numbers = pointwise("where", inside & pointwise("isnan", value), position, none)
    last = _internal(ctx, Part(Reduce("max", (not_numbers,), over), 0))
    return largest, pointwise("where", pointwise("ge", last, literal(0, DType.I64)), last, first)


def _internal(ctx: Context, value: Expr) -> Expr:
    return ctx.define_internal(value, ctx.out.shape, value.dtype).aligned(ctx.out.shape)


def _first_largest(
    ctx: Context, windows: list[Windows], at: Shape, values: Sequence[Expr], best: Sequence[Expr]
) -> Expr:
    """The position of the maximum of values that are written out, `best[k]` that of the first k + 1."""
    lengths = [w.length for w in windows]
    total = product(lengths).constant
    dtype = DType.I32 if total is not None and total < 1 << 31 else DType.I64
    start = linear_position([w.place(n, Poly.ZERO) for w, n in zip(windows, at[-len(windows) :], strict=True)], lengths)
    points, _ = _points([w.size for w in windows])
    steps = [linear_position([k * w.spread for w, k in zip(windows, p, strict=True)], lengths) for p in points]
    found: Expr = literal(0, dtype)
    for number, (w, n) in enumerate(zip(windows, at[-len(windows) :], strict=True)):
        pitch = product(lengths[number + 1 :]) * w.spread
        found = pointwise("add", found, _first_inside(ctx, w, n, pitch, dtype))
    for value, before, step in zip(values[1:], best, steps[1:], strict=False):
        larger = pointwise("gt", value, before)
        larger = larger | pointwise("isnan", value) if value.dtype.is_float else larger
        found = pointwise("where", larger, ctx.size(step, dtype), found)
    return pointwise("add", Index(start), ctx.convert(found, DType.I64))


def _first_inside(ctx: Context, w: Windows, window: Poly, pitch: Poly, dtype: DType) -> Expr:
    """How far the first element of a window that is not before the input is from its first one."""
    found: Expr = literal(0, dtype)
    outside = [k for k in range(w.size.constant or 0) if not nonnegative(w.place(window, Poly.of(k)))]
    for k in reversed(outside):
        after = found if k + 1 in outside else ctx.size(pitch * (k + 1), dtype)
        inside = at_least(w.place(window, Poly.of(k)), Poly.ZERO)
        found = pointwise("where", inside, ctx.size(pitch * k, dtype), after)
    return found


def _max_pool(
    dims: int, ctx: Context, x: Ref, size: Sizes, step: Sizes, before: Sizes, spread: Sizes, ceil_mode: bool
) -> tuple[Expr | Ref, Expr]:
    return _largest(ctx, x, _windows(dims, x, ctx.out.shape, size, step, before, spread))


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


def _avg_pool(
    dims: int,
    ctx: Context,
    x: Ref,
    size: Sizes,
    step: Sizes,
    before: Sizes,
    ceil_mode: bool,
    include: bool,
    divisor: int | None,
) -> Expr:
    return _mean(ctx, x, _windows(dims, x, ctx.out.shape, size, step, before), include, divisor)


# --- gradients: sums over the windows that have a position ---


def _covering(windows: list[Windows], at: Sequence[Poly]) -> tuple[list[tuple[Shape, Expr]], tuple[Axis, ...]]:
    """Each window that may have the position, and whether it exists and does, in order; axes left."""
    points, over = _points([w.covering for w in windows])
    found: list[tuple[Shape, Expr]] = []
    for point in reversed(points):
        places = [(p + w.before) // w.step - k for w, p, k in zip(windows, at, point, strict=True)]
        reached = [p - w.place(n, Poly.ZERO) for w, p, n in zip(windows, at, places, strict=True)]
        here = _within(
            (*places, *reached), [*(w.count for w in windows), *((w.size - 1) * w.spread + 1 for w in windows)]
        )
        found.append((tuple(places), here))
    return found, over


def _gathered(
    ctx: Context, gradient: Ref, windows: list[Windows], share: Callable[[Shape, Shape, Expr, Expr], Expr]
) -> Expr:
    """The sum of what `share` makes of each window's gradient, given its place and whether it has the position."""
    at = own_point(ctx.out.shape)
    outer, inner = at[: -len(windows)], at[-len(windows) :]
    covering, over = _covering(windows, inner)
    terms: list[Expr] = []
    for window, here in covering:
        place = (*outer, *window)
        terms.append(share(place, inner, here, ctx.computing(gradient.at(place), ctx.out.dtype)))
    return _combined("sum", terms, over)


def _max_pool_backward(
    dims: int,
    ctx: Context,
    gradient: Ref,
    x: Ref,
    size: Sizes,
    step: Sizes,
    before: Sizes,
    spread: Sizes,
    ceil_mode: bool,
    indices: Ref,
) -> Expr:
    return _to_largest(ctx, gradient, _windows(dims, x, gradient.shape, size, step, before, spread), indices)


def _to_largest(ctx: Context, gradient: Ref, windows: list[Windows], indices: Ref) -> Expr:
    def share(window: Shape, at: Shape, here: Expr, value: Expr) -> Expr:
        position = Index(linear_position(at, [w.length for w in windows]))
        chosen = here & pointwise("eq", indices.at(window), position)
        return pointwise("where", chosen, value, literal(0, value.dtype))

    return _gathered(ctx, gradient, windows, share)


def _adaptive_avg(dims: int, ctx: Context, x: Ref, sizes: Sizes) -> Expr:
    return _mean(ctx, x, _equal_windows(x, ctx.out.shape, dims))


def _adaptive_max_backward(dims: int, ctx: Context, gradient: Ref, x: Ref, indices: Ref) -> Expr:
    return _to_largest(ctx, gradient, _equal_windows(x, gradient.shape, dims), indices)


def _avg_pool_backward(
    dims: int,
    ctx: Context,
    gradient: Ref,
    x: Ref,
    size: Sizes,
    step: Sizes,
    before: Sizes,
    ceil_mode: bool,
    include: bool,
    divisor: int | None,
) -> Expr:
    return _spread(ctx, gradient, _windows(dims, x, gradient.shape, size, step, before), include, divisor)


def _spread(
    ctx: Context, gradient: Ref, windows: list[Windows], include: bool = True, divisor: int | None = None
) -> Expr:
    def share(window: Shape, at: Shape, here: Expr, value: Expr) -> Expr:
        count = _divisor(ctx, windows, window[-len(windows) :], include, divisor, value.dtype)
        return pointwise("where", here, value / count, literal(0, value.dtype))

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
