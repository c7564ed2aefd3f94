"""Is a nest of products attention as the library has it: softmax(scale * q k^T, causal or not) v, and nothing else?

Asked of what is computed, not of how it was written. The result is evaluated in float64 for a row of made-up scores
and values, everything else in it unknown: it must be the softmax's average for some scale, also far from zero. Which
elements the matrices are is read off the loads, which must be affine.

    sum(exp2(c s - m) v) / sum(exp2(c s - m)),  m = max(c s),  s = sum(q k)   ->   q, k, v, scale = c log(2)
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TypeAlias

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Load, Part, Pointwise, Reduce, postorder
from ..ir.ops import CASTS
from ..ir.poly import Axis, Poly, product
from ..ir.program import Buffer, View
from .access import flat_offset
from .contraction import Contraction
from .factor import ARITHMETIC, calculate
from .formulas import Positive, formulas
from .inline import reductions
from .nest import Refusal, opened
from .operands import operands, sided
from .single_row import ROW

KEYS, SAMPLES = 5, 8
FAR = 1e6  # scores this far from zero: a finite number in the place of -inf shows
FINITE = 1e5  # beyond this a constant may stand for -inf
MOST_DEPTH, WHOLE = 128, 8  # of a head; elements that the library reads at once
Dimension: TypeAlias = tuple[Axis, ...]  # axes that are one, the innermost last; () has one position
OTHER_SCORES = "the scores are more than a product with a constant and a causal mask"


@dataclass(frozen=True, slots=True)
class Attention:
    """The library's call. Matrices have the dimensions batch, head, position, depth."""

    query: View
    key: View
    value: View
    scale: float
    causal: bool
    grouped: bool  # several heads of queries to one of keys and values
    place: tuple[int, ...]  # strides of the result's dimensions in the buffer that is stored

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batches, heads, positions of queries, depth."""
        return tuple(n.constant or 0 for n in self.query.shape)

    @property
    def keys(self) -> int:
        return self.key.shape[2].constant or 0

    @property
    def keeps_layout(self) -> bool:
        """Whether a dense result whose dimensions lie in memory as the queries' do is what is stored."""
        sizes, step, found = self.sizes, 1, [0] * 4
        queries = [s.constant or 0 for s in self.query.strides]
        for dim in sorted(range(4), key=lambda k: (queries[k], -k)):
            found[dim], step = step, step * sizes[dim]
        return all(n == 1 or a == b for n, a, b in zip(sizes, found, self.place, strict=True))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Elements of a buffer: where the first is, and the stride of each axis."""

    buffer: Buffer
    offset: int
    strides: dict[Axis, int]


def find_attention(c: Contraction) -> Attention | Refusal:
    """The library's call that computes a nest, or why there is none."""
    if len(c.nest.stores) != 1:
        return Refusal("something beside the result is stored")
    (store,), (value,) = c.nest.stores, opened(c.nest)
    if c.rows is ROW or any(a.extent.constant is None for a in c.nest.classes):
        return Refusal("one row of queries" if c.rows is ROW else "sizes are known at run time only")
    found = reductions([value])
    inside = [r for r in found if c.swept in r.axes]
    outside = [r for r in found if r not in inside and operands(r) is not None]
    if len(inside) != 1 or len(outside) != 1 or len(c.inner) != 1:
        return Refusal("it is not one product of queries and keys, and one with values")
    scores, sides = Part(inside[0], 0), operands(outside[0])
    assert sides is not None
    weights, values = sides if scores in set(postorder([sides[0]])) else sides[::-1]
    queries, keys = sided(operands(inside[0]) or sides, c.rows)
    loads = [_loaded(e) for e in (queries, keys, values)]
    types = {store.buffer.dtype, weights.dtype, *(e.dtype for e in loads if e is not None)}
    if None in loads:
        return Refusal("a matrix is computed, not read from memory")
    if len(types) != 1 or not store.buffer.dtype.is_half:
        return Refusal("matrices, weights and result are not all float16 or all bfloat16")
    masks = _Masks(c.rows, c.swept)
    if _evaluate(weights, {scores: [0.0] * KEYS}, masks, [True] * KEYS) is None:
        return Refusal(OTHER_SCORES)
    scale = _scale(value, scores, values, masks)
    if isinstance(scale, Refusal):
        return scale
    axes = ((c.rows, c.inner[0]), (c.swept, c.inner[0]), (c.swept, c.columns))
    return _placed(c, [e for e in loads if e is not None], axes, scale, masks.found)


def _loaded(e: Expr) -> Load | None:
    """What is loaded, through conversions that change nothing."""
    types = set()
    while isinstance(e, Pointwise) and e.op in CASTS:
        types.add(e.dtype)
        e = e.args[0]
    return e if isinstance(e, Load) and types <= {e.dtype, DType.F32} else None


# --- what is computed ---


class _Masks:
    """Conditions on positions that say whether a query sees a key; whether there were any."""

    def __init__(self, rows: Axis, swept: Axis) -> None:
        self.seen, self.unseen = rows.poly() - swept + 1, swept.poly() - rows
        self.square = rows.extent is swept.extent
        self.found = False

    def value(self, condition: Expr, seen: list[bool]) -> list[float] | None:
        """Where a condition holds; None if it is not the causal one."""
        said = formulas([condition])[condition]
        difference = said.difference if isinstance(said, Positive) else None
        if not self.square or difference not in (self.seen, self.unseen):
            return None
        self.found = True
        return [float(s == (difference is self.seen)) for s in seen]


def _evaluate(root: Expr, known: dict[Expr, list[float]], masks: _Masks, seen: list[bool]) -> list[float] | None:
    """The value for each of some keys in one row; None where it is made of anything that is not known."""
    memo: dict[Expr, list[float] | None] = dict(known)
    for e in postorder([root]):
        if e in memo:
            continue
        memo[e] = None
        args = [memo[a] for a in e.children]
        given = [a for a in args if a is not None]
        if isinstance(e, Const):
            memo[e] = _constant(e)
        elif isinstance(e, Pointwise) and e.dtype is DType.BOOL and e.op not in ("eq", "ne"):
            memo[e] = masks.value(e, seen)
        elif len(given) < len(args):
            continue
        elif isinstance(e, Pointwise) and _is_arithmetic(e):
            memo[e] = [calculate(e.op, numbers) for numbers in zip(*given, strict=True)]
        elif isinstance(e, Reduce) and e.monoid in ("sum", "max") and len(e.inputs) == 1:
            total = (sum if e.monoid == "sum" else max)(given[0])
            memo[e] = [total] * KEYS
        elif isinstance(e, Part) and isinstance(e.source, Reduce):
            memo[e] = given[0]
    return memo[root]


def _constant(e: Const) -> list[float] | None:
    number = float(e.value)
    return [number] * KEYS if abs(number) <= FINITE or math.isinf(number) else None


def _is_arithmetic(e: Pointwise) -> bool:
    """Whether random numbers show what it does: not for a comparison with a number that they never are."""
    if e.op in ("eq", "ne"):
        return any(isinstance(a, Const) and math.isinf(float(a.value)) for a in e.args)
    return e.op in ARITHMETIC and e.dtype.is_float


def _scale(value: Expr, scores: Expr, values: Expr, masks: _Masks) -> float | Refusal:
    """The number that scores are multiplied with, if the value is the average that softmax gives."""

    def result(s: list[float], v: list[float], seen: list[bool]) -> float:
        found = _evaluate(value, {scores: s, values: v}, masks, seen)
        return math.nan if found is None else found[0]

    everywhere, apart = [True] * KEYS, [0.75, 0.25, 0.5, 0.0, 0.125]
    first, second = (result(apart, [float(k == n) for k in range(KEYS)], everywhere) for n in range(2))
    if not (0 < first < math.inf and 0 < second < math.inf):
        return Refusal("it is no softmax of scores")
    scale = 2 * math.log(first / second)
    if not 1e-6 < scale < 1e6:
        return Refusal(f"scores are multiplied with {scale:.3g}")
    draw = random.Random(0)
    for sample in range(SAMPLES):
        far = (0.0, -FAR, FAR)[sample % 3] / scale
        s, v = ([draw.uniform(-2, 2) for _ in range(KEYS)] for _ in range(2))
        seen = [not masks.found or k == 0 or draw.random() < 0.5 for k in range(KEYS)]
        top = max(x for x, one in zip(s, seen, strict=True) if one)
        weights = [math.exp(scale * (x - top)) if one else 0.0 for x, one in zip(s, seen, strict=True)]
        expected = sum(w * x for w, x in zip(weights, v, strict=True)) / sum(weights)
        shifted = [x + far + (0.0 if one else FAR / scale) for x, one in zip(s, seen, strict=True)]  # what is not seen
        if not math.isclose(result(shifted, v, seen), expected, rel_tol=1e-6, abs_tol=1e-6):
            return Refusal("it is no softmax of scores")
    return scale


# --- where matrices are ---


def _placed(
    c: Contraction, loads: list[Load], axes: tuple[tuple[Axis, Axis], ...], scale: float, causal: bool
) -> Attention | Refusal:
    """The call, with matrices as views of memory."""
    store = c.nest.stores[0]
    depth, width = c.inner[0].extent.constant or 0, c.columns.extent.constant or 0
    if depth != width or depth > MOST_DEPTH or depth % WHOLE:
        return Refusal(f"heads of {depth} and values of {width}: the library wants the same multiple of 8, at most 128")
    query, key, value = (_matrix(e.buffer, e.index) for e in loads)
    result = _matrix(store.buffer, store.index)
    if query is None or key is None or value is None or result is None:
        return Refusal("a matrix has no strides")
    for m, (position, last) in zip((query, key, value), axes, strict=True):
        own = {*c.grid, position, last}
        steps = [step for a, step in m.strides.items() if a is not last]
        if not m.strides.keys() <= own or m.strides.get(last) != 1 or m.offset % WHOLE:
            return Refusal("a matrix is not contiguous along its heads")
        if any(step < 0 or step % WHOLE for step in steps):
            return Refusal(f"a matrix has rows that do not start at multiples of {WHOLE} elements")
    heads = _heads(c.grid, query, key, value, result)
    if heads is None:
        return Refusal("heads are no two dimensions that all matrices have")
    batch, own_heads, shared_heads = heads
    found = Attention(
        _view(query, (batch, own_heads, (c.rows,), (c.inner[0],))),
        _view(key, (batch, shared_heads, (c.swept,), (c.inner[0],))),
        _view(value, (batch, shared_heads, (c.swept,), (c.columns,))),
        scale,
        causal,
        own_heads != shared_heads,
        tuple(result.strides.get(dim[-1], 0) if dim else 0 for dim in (batch, own_heads, (c.rows,), (c.columns,))),
    )
    if product(found.query.shape) is not product(store.buffer.shape):
        return Refusal("the result is a part of what is stored")
    return found


def _matrix(buffer: Buffer, index: tuple[Poly, ...]) -> _Matrix | None:
    """The elements of an index that is affine, with strides that are numbers."""
    offset = flat_offset(buffer, index)
    strides: dict[Axis, int] = {}
    for a in offset.axes:
        step = offset.coefficient(a)
        if step is None or step.constant is None:
            return None
        strides[a] = step.constant
    rest = offset - sum((a.poly() * step for a, step in strides.items()), Poly.ZERO)
    return None if rest.constant is None else _Matrix(buffer, rest.constant, strides)


def _heads(
    grid: tuple[Axis, ...], query: _Matrix, key: _Matrix, value: _Matrix, result: _Matrix
) -> tuple[Dimension, Dimension, Dimension] | None:
    """Batches, heads of queries and heads of keys; one head of keys may serve a group of queries."""
    both = [a for a in grid if a in key.strides and a in value.strides]
    groups = [a for a in grid if a not in key.strides and a not in value.strides]
    if len(both) + len(groups) < len(grid) or any(a not in m.strides for a in grid for m in (query, result)):
        return None
    both.sort(key=lambda a: -query.strides[a])
    if not groups and len(both) <= 2:
        heads = tuple(both[-1:])
        return tuple(both[:-1]), heads, heads
    if len(groups) != 1 or len(both) > 2:
        return None
    (group,) = groups
    if len(both) < 2:
        return tuple(both), (group,), ()
    for batch, head in (both, both[::-1]):  # heads count on through their groups
        if all(m.strides[head] == m.strides[group] * (group.extent.constant or 0) for m in (query, result)):
            return (batch,), (head, group), (head,)
    return None


def _view(matrix: _Matrix, dimensions: tuple[Dimension, ...]) -> View:
    """The elements of a matrix with these dimensions; those of one position get a stride beyond all others."""
    sizes = [product(a.extent for a in dim) for dim in dimensions]
    steps = [matrix.strides[dim[-1]] if dim else 0 for dim in dimensions]
    beyond = max(step * (n.constant or 0) for step, n in zip(steps, sizes, strict=True))
    strides = tuple(Poly.of(step or beyond) for step in steps)
    return View(matrix.buffer, tuple(sizes), strides, Poly.of(matrix.offset))
