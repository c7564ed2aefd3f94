"""Scores next to a matrix product: rules of `normalise.py` that leave less work to each step of a sweep.

exp(x - max x) = exp2(c x - max(c x)) with c = log2(e), because c is positive; where x is itself a product with a
constant, c joins that constant, and the difference is one multiply-add. Scores that may be the lowest number there is
(a mask of finfo.min) keep base e: c times that number is -inf. 16-bit scores are not rounded on their way from the
matrix unit, which gives them in float32, and divisions of a product by a number are multiplications. Values that
discontinuous operations read keep their roundings and divisions where programs own whole rows.
"""

from __future__ import annotations

import math
from functools import partial, reduce

from ..ir.dtypes import DType
from ..ir.expr import (
    Const,
    Expr,
    Index,
    Load,
    Part,
    Pointwise,
    Reduce,
    const,
    pointwise,
    postorder,
    rebuild,
    rewrite,
    substitute,
)
from ..ir.ops import DISCONTINUOUS
from .factor import same_number, uses
from .inline import reductions
from .nest import Nest, direct_reductions
from .operands import operands

LOG2E = math.log2(math.e)
EXACT = 1 << 24  # whole numbers below this are exact in float32
LARGEST_FACTOR = 2.0**100  # with a reciprocal that is an ordinary number, too
LARGEST = (2 - 2**-23) * 2.0**127  # finite float32


def unrounded(value: Expr, kept: frozenset[Expr] = frozenset()) -> Expr:
    """The value without 16-bit roundings that a conversion to float32 follows.

    `kept` conversions stay, and so do those of the matrices of a product.
    """
    matrices = [r.inputs[0] for r in reductions([value]) if operands(r) is not None]
    kept = kept.union(a for m in matrices for a in m.children)
    memo: dict[Expr, Expr] = {}
    for node in postorder([value]):
        new = rebuild(node, memo.__getitem__, lambda p: p)
        rounds = isinstance(new, Pointwise) and new.op == "cast" and new.dtype is DType.F32 and node not in kept
        if rounds and new.children[0].dtype.is_half:
            new = pointwise("widen", new.children[0], dtype=DType.F32)
        memo[node] = new
    return memo[value]


def jumping(value: Expr) -> frozenset[Expr]:
    """The values that discontinuous operations read, and the values that a maximum of them is taken of.

    Discontinuous operations read values rounded as eager has them.
    """
    roots: list[Expr] = []
    for e in postorder([value]):
        match e:
            case Reduce(monoid="argmax" | "argmin"):
                roots += e.inputs
            case Pointwise() if e.op in DISCONTINUOUS or (e.op == "cast" and not e.dtype.is_float):
                roots += e.args
    found: set[Expr] = set()
    while roots:
        read = [e for e in postorder(roots, into_reductions=False) if e not in found]
        found.update(read)
        roots = [x for e in read if isinstance(e, Reduce) and e.monoid in ("max", "min") for x in e.inputs]
    return frozenset(found)


def multiplied(value: Expr) -> Expr:
    """The value with multiplications in place of divisions of a product by a number, where no result jumps."""
    kept = jumping(value)

    def change(e: Expr) -> Expr | None:
        if not isinstance(e, Pointwise) or e.op != "div" or e.dtype is not DType.F32 or e in kept:
            return None
        x, by = e.args
        if not isinstance(by, Const) or not 1 / LARGEST_FACTOR < abs(float(by.value)) < LARGEST_FACTOR:
            return None
        if not any(operands(r) is not None for r in direct_reductions([x])):
            return None
        product = pointwise("mul", x, const(1 / float(by.value), DType.F32))
        return product if same_number(e, product) else None

    return rewrite(value, change)


def positions_apart(e: Expr) -> Expr | None:
    """Positions as floats, one axis at a time: rows and columns are converted once each, not every pair of them."""
    if not isinstance(e, Pointwise) or e.op != "cast" or e.dtype is not DType.F32 or not isinstance(e.args[0], Index):
        return None
    rest, parts, reach = e.args[0].poly, [], 0
    for a in sorted(rest.axes, key=lambda a: a.name):
        step = rest.coefficient(a)
        if step is None or step.constant is None or a.extent.constant is None:
            return None
        parts.append(step * a)
        reach += abs(step.constant * a.extent.constant)
        rest = rest - parts[-1]
    if len(parts) < 2 or rest.constant is None or reach + abs(rest.constant) >= EXACT:
        return None
    parts[0] = parts[0] + rest
    return reduce(partial(pointwise, "add"), (pointwise("cast", Index(p), dtype=DType.F32) for p in parts))


def in_shared_base(nest: Nest) -> Nest:
    """The nest with exponentials in base two, unless stores would then differ in base and need their sums twice."""
    changed = nest.with_values(in_base_two)
    return changed if len(changed.reductions) <= len(nest.reductions) else nest


def in_base_two(value: Expr) -> Expr:
    """The value with every maximum that is read to keep exponentials small taken of scaled scores."""
    tops = [r for r in reductions([value]) if r.monoid == "max" and r.inputs[0].dtype is DType.F32]
    for top in tops:
        value = _rebased(value, top)
    return value


def _rebased(value: Expr, top: Reduce) -> Expr:
    old = Part(top, 0)
    nodes = list(postorder([value]))
    exponents = {e: d for e in nodes if (d := _difference(e, old)) is not None}
    differences = {e.children[0] for e in exponents}
    readers = [e for e in nodes if not differences.isdisjoint(e.children)]
    others = [e for e in nodes if old in e.children and e not in differences]
    if not exponents or any(e not in exponents for e in readers) or not all(_is_of_rows(e, old) for e in others):
        return value
    if not all(_stays_finite(x) for x in (top.inputs[0], *(x for x, _ in exponents.values()))):
        return value
    plain, step = _apart(scaled(top.inputs[0]))
    new = Part(Reduce("max", (plain,), top.over), 0)
    rows: dict[Expr, Expr] = {old: _times(new, step / LOG2E), _times(old, LOG2E): _times(new, step)}
    memo = dict(rows)
    for e, (x, reference) in exponents.items():
        if not same_number(e, pointwise("exp2", pointwise("sub", scaled(x), scaled(reference)))):
            return value
        inside, own = _apart(scaled(x))
        below = substitute(scaled(reference), rows)
        memo[e] = pointwise("exp2", pointwise("sub", _times(inside, own), below))
    return substitute(value, memo)


def _difference(e: Expr, top: Expr) -> tuple[Expr, Expr] | None:
    """x and r of exp(x - r), where r is the same for all of a row, and made of what is the largest in it."""
    if not isinstance(e, Pointwise) or e.op != "exp":
        return None
    match e.args[0]:
        case Pointwise(op="sub", args=(x, r)) if r.axes <= top.axes and uses(r, top):
            return None if x.axes <= top.axes or uses(x, top) else (x, r)
    return None


def _is_of_rows(e: Expr, top: Expr) -> bool:
    """Whether it is something of whole rows that a maximum may enter with a rounding more."""
    if not isinstance(e, Pointwise) or not e.axes <= top.axes:
        return False
    infinite = e.op == "eq" and any(isinstance(a, Const) and math.isinf(a.value) for a in e.args)
    return infinite or e.op in ("add", "sub", "neg", "abs", "maximum", "minimum", "where")


def _stays_finite(x: Expr, by: float = LOG2E) -> bool:
    """Whether a finite x times a number is finite, as far as constants and masks from memory tell."""
    stack = [(x, by)]
    while stack:
        e, factor = stack.pop()
        match e:
            case Const():
                if math.isfinite(float(e.value)) and abs(float(e.value) * factor) > LARGEST:
                    return False
            case Load() if e.dtype in (DType.BF16, DType.F32, DType.F64):
                return False
            case Pointwise(op="where" | "add" | "sub" | "neg" | "widen" | "cast" | "maximum" | "minimum"):
                stack += [(a, factor) for a in e.args]
            case Pointwise(op="mul"):
                for a, b in (e.args, e.args[::-1]):
                    if isinstance(b, Const):
                        stack += [(b, factor), (a, factor * float(b.value))]
    return True


def scaled(x: Expr, by: float = LOG2E) -> Expr:
    """x times a positive number, which joins what is constant in x."""
    if isinstance(x, Const):
        return const(float(x.value) * by, x.dtype)
    if isinstance(x, Pointwise):
        match x.op:
            case "mul":
                for a, b in (x.args, x.args[::-1]):
                    if isinstance(b, Const):
                        return scaled(a, by * float(b.value)) if float(b.value) > 0 else _times(a, by * float(b.value))
                few, many = sorted(x.args, key=lambda a: len(a.axes))
                return pointwise("mul", scaled(few, by), many)
            case "div" if isinstance(x.args[1], Const) and float(x.args[1].value) > 0:
                return scaled(x.args[0], by / float(x.args[1].value))
            case "where":
                return pointwise("where", x.args[0], scaled(x.args[1], by), scaled(x.args[2], by), dtype=x.dtype)
            case "add" | "sub" | "maximum" | "minimum":
                return pointwise(x.op, scaled(x.args[0], by), scaled(x.args[1], by))
    return _times(x, by)


def _times(x: Expr, by: float) -> Expr:
    return x if by == 1 else pointwise("mul", x, const(by, x.dtype))


def _apart(x: Expr) -> tuple[Expr, float]:
    """x as something times a positive number: the largest is found before multiplying."""
    if isinstance(x, Pointwise) and x.op == "mul":
        for a, b in (x.args, x.args[::-1]):
            if isinstance(b, Const) and 0 < float(b.value) < math.inf:
                return a, float(b.value)
    if isinstance(x, Pointwise) and x.op == "where":
        for k in (1, 2):
            inside, step = _apart(x.args[k])
            other = x.args[3 - k]
            if step != 1 and isinstance(other, Const) and math.isinf(float(other.value)):
                sides = (inside, other) if k == 1 else (other, inside)
                return pointwise("where", x.args[0], *sides, dtype=x.dtype), step
    return x, 1.0
