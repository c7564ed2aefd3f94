"""The transport rule: can a sum over an axis be carried along while a maximum over it still grows?

`factor(e, r)` writes e = G(x) * exp(h(r)), with G free of the reduction result r, and gives h. Then a
stale sum moves to a new reference by the factor exp(h(r_new) - h(r_old)), formed in the log domain.
exp and log switch between the multiplicative and the additive view; `where(c, a, 0)` with c free of r
and casts pass; anything else: no merge. Every use is checked in float64 on a random sample.
"""

from __future__ import annotations

import math
import random

from ..ir.expr import Const, Expr, Index, Load, Part, Pointwise, Random, Reduce, const, pointwise, postorder, rebuild
from ..ir.interpret import evaluate

LN2 = math.log(2.0)


def factor(e: Expr, r: Expr) -> Expr | None:
    """h with e = G * exp(h(r)), in the multiplicative view; None if e is not of that form."""
    if not _uses(e, r):
        return const(0.0, e.dtype)
    if not isinstance(e, Pointwise):
        return None
    match e.op:
        case "exp":
            return shift(e.args[0], r)
        case "exp2":
            inner = shift(e.args[0], r)
            return None if inner is None else pointwise("mul", inner, const(LN2, inner.dtype))
        case "mul":
            return _combined("add", factor(e.args[0], r), factor(e.args[1], r))
        case "div":
            return _combined("sub", factor(e.args[0], r), factor(e.args[1], r))
        case "where":
            condition, a, b = e.args
            zero = isinstance(b, Const) and b.value == 0
            return factor(a, r) if zero and not _uses(condition, r) else None
        case "cast" | "widen" if e.args[0].dtype.is_float:
            return factor(e.args[0], r)
    return None


def shift(e: Expr, r: Expr) -> Expr | None:
    """h with e = g(x) + h(r), in the additive view."""
    if e is r:
        return r
    if not _uses(e, r):
        return const(0.0, e.dtype)
    if not isinstance(e, Pointwise):
        return None
    match e.op:
        case "add" | "sub":
            return _combined(e.op, shift(e.args[0], r), shift(e.args[1], r))
        case "neg":
            inner = shift(e.args[0], r)
            return None if inner is None else pointwise("neg", inner)
        case "mul":
            for a, b in (e.args, e.args[::-1]):
                if isinstance(a, Const) and (inner := shift(b, r)) is not None:
                    return pointwise("mul", a, inner)
        case "cast" | "widen" if e.args[0].dtype is e.dtype:
            return shift(e.args[0], r)
    return None


def _combined(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return None
    if isinstance(b, Const) and b.value == 0:
        return a
    return pointwise("neg" if op == "sub" else "cast", b, dtype=b.dtype) if _is_zero(a) else pointwise(op, a, b)


def _is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0


def _uses(e: Expr, r: Expr) -> bool:
    return any(node is r for node in postorder([e], into_reductions=False))


def holds(e: Expr, r: Expr, h: Expr) -> bool:
    """The rewrite on random numbers in float64: e(x, new) == e(x, old) * exp(h(new) - h(old))."""
    draw = random.Random(0)
    leaves = [n for n in postorder([e, h], into_reductions=False) if isinstance(n, Load | Part | Index | Random)]
    for _ in range(8):
        sample: dict[Expr, float] = {n: draw.uniform(-2.0, 2.0) for n in leaves}
        old, new = {**sample, r: draw.uniform(2.0, 4.0)}, {**sample, r: draw.uniform(4.0, 6.0)}
        carried = _number(e, old) * math.exp(_number(h, new) - _number(h, old))
        if not math.isclose(carried, _number(e, new), rel_tol=1e-9, abs_tol=1e-12):
            return False
    return True


def same_number(e: Expr, other: Expr) -> bool:
    """Whether two expressions agree on random numbers in float64."""
    draw = random.Random(1)
    leaves = [n for n in postorder([e, other], into_reductions=False) if isinstance(n, Load | Part | Index | Random)]
    for _ in range(8):
        sample: dict[Expr, float] = {n: draw.uniform(0.5, 2.0) for n in leaves}
        if not math.isclose(_number(e, sample), _number(other, sample), rel_tol=1e-9, abs_tol=1e-12):
            return False
    return True


def _number(e: Expr, sample: dict[Expr, float]) -> float:
    """The value of an expression in float64, its leaves given."""
    memo: dict[Expr, Expr] = {}
    for node in postorder([e], into_reductions=False):
        if node in sample:
            memo[node] = const(sample[node], node.dtype)
        elif not isinstance(node, Reduce):
            memo[node] = rebuild(node, memo.__getitem__, lambda p: p)
    return float(evaluate(memo[e], (), {}, {}, double=True))
