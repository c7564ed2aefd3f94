"""The verifier finds each kind of fault; programs print one statement per line."""

from __future__ import annotations

import pytest

from onepass.errors import VerifyError
from onepass.ir.dtypes import DType
from onepass.ir.expr import Expr, Load, Part, Reduce, Scan, const, pointwise
from onepass.ir.poly import Axis, Poly, Symbol
from onepass.ir.program import Buffer, Define, Origin, Program, Update, View
from onepass.ir.verify import verify_program

N, M = Poly.of(4), Poly.of(3)
I, J, R = Axis("d0", N), Axis("d1", M), Axis("r0", M)
ORIGIN = Origin("node", "aten.exp.default", "model.py:3: y = x.exp()")


def buffer(name: str, dtype: DType = DType.F32, shape: tuple[Poly, ...] = (N, M)) -> Buffer:
    return Buffer(name, dtype, shape, (M, Poly.ONE)[2 - len(shape) :])


def program(value: Expr, out: Buffer | None = None, axes: tuple[Axis, ...] = (I, J)) -> Program:
    out = out or buffer("b0")
    whole = View(out, out.shape, out.strides, Poly.ZERO)
    return Program((A,), (Define(out, axes, value, ORIGIN),), (whole,))


A = buffer("a0")
LOAD = Load(A, (I.poly(), J.poly()))


def test_well_formed() -> None:
    verify_program(program(pointwise("exp", LOAD)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Load(buffer("c"), (I.poly(), J.poly())), "read before it is defined"),
        (Load(A, (I.poly(),)), "number of dimensions"),
        (Load(A, (I.poly(), R.poly())), "free axes"),
        (pointwise("cast", LOAD, dtype=DType.F64), "type float64"),
        (pointwise("add", LOAD, pointwise("cast", const(1.0, DType.F64), dtype=DType.F64)), "add of"),
        (Load(A, (I.poly(), Symbol("s0").poly())), "has no source"),
        (pointwise("exp", Part(Scan("sum", (Load(A, (I.poly(), R.poly())),), R, J.poly()), 0)), "below the root"),
        (Part(Scan("sum", (Load(A, (I.poly(), J.poly())),), J, J.poly()), 0), "along its own axis"),
        (pointwise("exp", Part(Reduce("sum", (Load(A, (I.poly(), R.poly())),), (R,)), 0)), "below the root"),
    ],
)
def test_faults(value: Expr, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_program(program(value))


def test_axes_must_be_canonical() -> None:
    with pytest.raises(VerifyError, match="canonical axes"):
        verify_program(program(LOAD, axes=(J, I)))


def test_update_of_another_shape() -> None:
    small = buffer("b0", shape=(N,))
    define = Define(small, (I,), Load(A, (I.poly(), Poly.ZERO)), ORIGIN)
    with pytest.raises(VerifyError, match="another shape"):
        verify_program(Program((A,), (define, Update(A, small, ORIGIN)), ()))


def test_text() -> None:
    text = repr(program(pointwise("exp", LOAD)))
    assert text.splitlines()[1] == (
        "  b0: float32[d0:4, d1:3] = exp(a0[d0, d1])    # aten.exp.default  model.py:3: y = x.exp()"
    )


def test_text_of_scans() -> None:
    state = Scan("linear", (LOAD, Load(A, (I.poly(), R.poly()))), R, J.poly(), True)
    assert repr(Part(state, 1)) == "linear[r0:3, from d1](a0[d0, d1], a0[d0, r0]).1"


def test_shared_parts_are_printed_once() -> None:
    value: Expr = LOAD
    for _ in range(100):
        value = pointwise("add", value, value)
    assert len(repr(value)) < 5000


def test_deep_chains_print() -> None:
    value: Expr = LOAD
    for _ in range(5000):
        value = pointwise("exp", value)
    assert repr(value).count("exp") == 5000
