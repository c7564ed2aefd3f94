"""The reference interpreter against torch itself."""

from __future__ import annotations

import torch

from onepass.ir.dtypes import DType
from onepass.ir.expr import Expr, Index, Load, Part, Reduce, Scan, const, indirect, pointwise
from onepass.ir.interpret import evaluate
from onepass.ir.poly import Axis, Poly
from onepass.ir.program import Buffer

N, M = Poly.of(4), Poly.of(6)
I, J, K = Axis("d0", N), Axis("d1", M), Axis("r0", M)
A = Buffer("a0", DType.F32, (N, M), (M, Poly.ONE))
X = torch.randn(4, 6)
AT_J = J.poly()


def run(value: Expr, *axes: Axis, double: bool = False) -> torch.Tensor:
    return evaluate(value, axes, {A: X}, {}, double=double)


def test_softmax_in_one_expression() -> None:
    at_k, at_j = Load(A, (I.poly(), K.poly())), Load(A, (I.poly(), J.poly()))
    top = Part(Reduce("max", (at_k,), (K,)), 0)
    total = Part(Reduce("sum", (pointwise("exp", pointwise("sub", at_k, top)),), (K,)), 0)
    value = pointwise("div", pointwise("exp", pointwise("sub", at_j, top)), total)
    torch.testing.assert_close(run(value, I, J), X.softmax(1))
    torch.testing.assert_close(run(value, I, J, double=True), X.double().softmax(1))


def test_welford_parts() -> None:
    state = Reduce("welford", (Load(A, (I.poly(), K.poly())),), (K,))
    torch.testing.assert_close(run(Part(state, 0), I), X.mean(1))
    torch.testing.assert_close(run(Part(state, 1), I), X.var(1, correction=0) * 6)
    assert run(Part(state, 2), I).eq(6).all()


def test_scans() -> None:
    at_k = Load(A, (I.poly(), K.poly()))

    def scan(monoid: str, *inputs: Expr, at: Poly = AT_J, reverse: bool = False) -> list[torch.Tensor]:
        state = Scan(monoid, (at_k, *inputs), K, at, reverse)
        return [run(Part(state, k), I, J) for k in range(len(state.part_dtypes))]

    assert torch.allclose(scan("sum")[0], X.cumsum(1)) and torch.allclose(scan("prod")[0], X.cumprod(1))
    torch.testing.assert_close(scan("sum", reverse=True)[0], X.flip(1).cumsum(1).flip(1))
    torch.testing.assert_close(scan("sum", at=M - 1 - J)[0], X.cumsum(1).flip(1))
    value, place = scan("argmax", Index(M - 1 - K))
    torch.testing.assert_close((value, 5 - place), tuple(X.cummax(1)))
    top, total = scan("logsumexp")
    torch.testing.assert_close(top + total.log(), X.logcumsumexp(1))
    h, state = [], torch.zeros(4)
    for k in range(6):
        state = X[:, k] * state + 2.0
        h.append(state)
    torch.testing.assert_close(scan("linear", const(2.0, DType.F32))[1], torch.stack(h, 1))


def test_reduction_of_what_does_not_vary() -> None:
    value = Part(Reduce("sum", (Load(A, (I.poly(), Poly.ZERO)),), (K,)), 0)
    torch.testing.assert_close(run(value, I), X[:, 0] * 6)


def test_out_of_range_loads_are_masked() -> None:
    shifted = Load(A, (I.poly(), J - 2))
    inside = pointwise("ge", Index(J.poly()), Index(Poly.of(2)))
    value = pointwise("where", inside, shifted, const(0.0, DType.F32))
    torch.testing.assert_close(run(value, I, J), torch.nn.functional.pad(X[:, :4], (2, 0)))


def test_data_as_an_index() -> None:
    order = Buffer("a1", DType.I64, (M,), (Poly.ONE,))
    values = torch.tensor([5, 0, -1, 2, 2, 1])
    at = indirect(pointwise("wrap_index", Load(order, (J.poly(),)), Index(M)))
    result = evaluate(Load(A, (I.poly(), at)), (I, J), {A: X, order: values}, {})
    torch.testing.assert_close(result, X[:, values])
