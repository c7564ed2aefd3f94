"""The transport rule: can a sum over an axis be carried along while a maximum over it still grows?

`factor(e, r, axis)` writes e = G(x) * exp(h(r)), with G free of the reduction result r and h of the axis, and gives h.
Then a stale sum moves to a new reference by the factor exp(h(r_new) - h(r_old)), formed in the log domain.
exp and log switch between the multiplicative and the additive view; `where(c, a, 0)` with c free of r
and casts pass; anything else: no merge. Every use is checked in float64 on a random sample.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Pointwise, Reduce, const, pointwise, postorder
from ..ir.poly import Axis

LN2 = math.log(2.0)
SAMPLES = 8
_CHOICES = frozenset(("where", "maximum", "minimum", "abs", "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "neg"))


def factor(e: Expr, r: Expr, axis: Axis) -> Expr | None:
    """h with e = G * exp(h(r)), in the multiplicative view; None if e is not of that form."""
    if not uses(e, r):
        return const(0.0, e.dtype)
    if not isinstance(e, Pointwise):
        return None
    match e.op:
        case "exp":
            return shift(e.args[0], r, axis)
        case "exp2":
            inner = shift(e.args[0], r, axis)
            return None if inner is None else pointwise("mul", inner, const(LN2, inner.dtype))
        case "mul":
            return _combined("add", factor(e.args[0], r, axis), factor(e.args[1], r, axis))
        case "div":
            return _combined("sub", factor(e.args[0], r, axis), factor(e.args[1], r, axis))
        case "where":
            condition, *sides = e.args
            chosen = next((b for a, b in (sides, sides[::-1]) if is_constant_zero(a)), None)
            return factor(chosen, r, axis) if chosen is not None and not uses(condition, r) else None
        case "cast" | "widen" | "narrow" if e.args[0].dtype.is_float:
            return factor(e.args[0], r, axis)
    return None


def shift(e: Expr, r: Expr, axis: Axis) -> Expr | None:
    """h with e = g(x) + h(r), in the additive view."""
    if e is r:
        return r
    if not uses(e, r):
        return const(0.0, e.dtype)
    if not isinstance(e, Pointwise):
        return None
    if axis not in e.axes and _is_choice(e, r):
        return e
    match e.op:
        case "add" | "sub":
            return _combined(e.op, shift(e.args[0], r, axis), shift(e.args[1], r, axis))
        case "neg":
            inner = shift(e.args[0], r, axis)
            return None if inner is None else pointwise("neg", inner)
        case "mul":
            for a, b in (e.args, e.args[::-1]):
                if isinstance(a, Const) and (inner := shift(b, r, axis)) is not None:
                    return pointwise("mul", a, inner)
        case "cast" | "widen" if e.args[0].dtype is e.dtype:
            return shift(e.args[0], r, axis)
    return None


def _is_choice(e: Expr, r: Expr) -> bool:
    """Whether it chooses between r and what is known before: 0 where r is infinite, or whichever is larger."""
    steps = [x for x in postorder([e], into_reductions=False) if x is not r and uses(x, r)]
    return e in steps and all(isinstance(x, Pointwise) and (x.op in _CHOICES or _is_multiple(x)) for x in steps)


def _is_multiple(e: Pointwise) -> bool:
    return e.op == "mul" and any(isinstance(a, Const) and 0 < abs(a.value) < math.inf for a in e.args)


def _combined(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return None
    if isinstance(b, Const) and b.value == 0:
        return a
    return pointwise("neg" if op == "sub" else "cast", b, dtype=b.dtype) if is_constant_zero(a) else pointwise(op, a, b)


def is_constant_zero(e: Expr) -> bool:
    """Whether it is the number zero itself."""
    return isinstance(e, Const) and e.value == 0


def uses(e: Expr, r: Expr) -> bool:
    """Whether an expression reads another one, outside of reductions."""
    return any(node is r for node in postorder([e], into_reductions=False))


def holds(e: Expr, r: Expr, h: Expr) -> bool:
    """The rewrite on random numbers in float64: e(x, new) == e(x, old) * exp(h(new) - h(old))."""
    draw = random.Random(0)
    for _ in range(SAMPLES):
        others: dict[Expr, float] = {}
        old, new = ({r: draw.uniform(low, low + 2.0)} for low in (2.0, 4.0))
        values = [_number(x, known, others, draw) for known in (old, new) for x in (e, h)]
        if any(uses(x, r) for x in others):
            return False
        before, at_old, after, at_new = values
        if not math.isclose(before * math.exp(at_new - at_old), after, rel_tol=1e-9, abs_tol=1e-12):
            return False
    return True


def drops_nothing(h: Expr, r: Expr) -> bool:
    """Whether h is infinite as long as r, a maximum, has met no term: what was summed up till then is dropped."""
    return _number(h, {r: -math.inf}, {}, random.Random(0)) == math.inf


def same_number(e: Expr, other: Expr) -> bool:
    """Whether two expressions agree on random numbers in float64."""
    draw = random.Random(1)
    for _ in range(SAMPLES):
        others: dict[Expr, float] = {}
        values = [_number(x, {}, others, draw) for x in (e, other)]
        if not math.isclose(*values, rel_tol=1e-9, abs_tol=1e-12):
            return False
    return True


def _number(e: Expr, known: dict[Expr, float], others: dict[Expr, float], draw: random.Random) -> float:
    """The value of an expression in float64. What is not arithmetic gets a number of its own, kept in `others`."""
    memo = dict(known)
    for node in postorder([e], into_reductions=False):
        if node in memo or isinstance(node, Reduce):
            continue
        if isinstance(node, Const):
            memo[node] = float(node.value)
        elif isinstance(node, Pointwise) and node.op in ARITHMETIC:
            memo[node] = calculate(node.op, [memo[a] for a in node.args])
        else:
            if node not in others:
                others[node] = float(draw.random() < 0.5) if node.dtype is DType.BOOL else draw.uniform(0.5, 2.0)
            memo[node] = others[node]
    return memo[e]


def calculate(op: str, args: Iterable[float]) -> float:
    """The result of an arithmetic operation in float64; NaN where it has none."""
    try:
        return ARITHMETIC[op](*args)
    except (OverflowError, ValueError, ZeroDivisionError):
        return math.nan


ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "abs": abs,
    "maximum": max,
    "minimum": min,
    "eq": lambda a, b: float(a == b),
    "ne": lambda a, b: float(a != b),
    "lt": lambda a, b: float(a < b),
    "le": lambda a, b: float(a <= b),
    "gt": lambda a, b: float(a > b),
    "ge": lambda a, b: float(a >= b),
    "exp": math.exp,
    "exp2": lambda a: 2.0**a,
    "log": math.log,
    "where": lambda c, a, b: a if c else b,
    "cast": lambda a: a,
    "narrow": lambda a: a,
    "widen": lambda a: a,
}
