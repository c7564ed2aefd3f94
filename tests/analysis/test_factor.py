"""The transport rule: what merges, what does not, and the float64 check that guards it."""

from __future__ import annotations

from onepass.analysis.factor import factor, holds
from onepass.ir.dtypes import DType
from onepass.ir.expr import Expr, Load, Part, Reduce, const, pointwise
from onepass.ir.poly import Axis, Poly
from onepass.ir.program import Buffer

K = Axis("k", Poly.of(64))
X = Buffer("x", DType.F32, (Poly.of(64),), (Poly.ONE,))
Y = Buffer("y", DType.F32, (Poly.of(64),), (Poly.ONE,))
x: Expr = Load(X, (K.poly(),))
y: Expr = Load(Y, (K.poly(),))
m: Expr = Part(Reduce("max", (Load(X, (Axis("r", Poly.of(64)).poly(),)),), (Axis("r", Poly.of(64)),)), 0)


def exp(e: Expr) -> Expr:
    return pointwise("exp", e)


def test_softmax_terms_factor() -> None:
    for term in (
        exp(pointwise("sub", x, m)),
        pointwise("mul", y, exp(pointwise("sub", x, m))),
        pointwise("div", exp(pointwise("sub", x, m)), y),
        exp(pointwise("mul", const(0.5, DType.F32), pointwise("sub", x, m))),
        pointwise("where", pointwise("lt", x, y), exp(pointwise("sub", x, m)), const(0.0, DType.F32)),
    ):
        h = factor(term, m, K)
        assert h is not None and holds(term, m, h)


def test_other_forms_do_not() -> None:
    for term in (
        pointwise("sub", x, m),
        pointwise("mul", pointwise("sub", x, m), pointwise("sub", x, m)),
        exp(pointwise("mul", x, m)),
        pointwise("where", pointwise("lt", x, m), exp(x), const(0.0, DType.F32)),
        pointwise("add", exp(pointwise("sub", x, m)), const(1.0, DType.F32)),
    ):
        assert factor(term, m, K) is None


def test_the_check_rejects_a_wrong_h() -> None:
    term = exp(pointwise("sub", x, m))
    assert not holds(term, m, m)
    assert not holds(term, m, const(0.0, DType.F32))
