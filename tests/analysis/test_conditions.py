"""Where conditions on an axis turn, and what loads of one buffer touch together."""

from __future__ import annotations

import pytest

from onepass.analysis.access import loads_bytes
from onepass.analysis.conditions import breakpoints
from onepass.ir.dtypes import DType
from onepass.ir.expr import Index, Load, literal, pointwise
from onepass.ir.poly import Axis, Poly
from onepass.ir.program import Buffer

X = Axis("x", Poly.of(20))


@pytest.mark.parametrize(
    "position",
    [X * 3 - 7, X * -2 + 9, (X + 1) // 2 - 3, (X * 2 + 1) // 3 - 4, ((X + 1) // 2 * -3) + 11, (X + 5) // 4 // 2 - 1],
)
@pytest.mark.parametrize("op", ["lt", "ge", "gt", "le"])
def test_a_condition_turns_where_its_breakpoint_is(position: Poly, op: str) -> None:
    holds = {"lt": int.__lt__, "ge": int.__ge__, "gt": int.__gt__, "le": int.__le__}[op]
    outcomes = [holds(position.evaluate({X: k}), 0) for k in range(20)]
    (turn,) = (k for k in range(1, 20) if outcomes[k] != outcomes[k - 1])
    condition = pointwise(op, Index(position), Index(Poly.ZERO))
    assert breakpoints([condition], X) == {Poly.of(turn)}


def test_a_remainder_turns_more_than_once() -> None:
    assert breakpoints([pointwise("lt", Index((X + 1) % 3), Index(Poly.ONE))], X) == set()


def test_shifted_loads_touch_the_same_elements_and_those_between_steps_others() -> None:
    buffer = Buffer("a", DType.F32, (Poly.of(64),), (Poly.ONE,), "cpu")
    loads = [Load(buffer, (X * 3 + k,)) for k in range(6)]
    assert loads_bytes(loads[:1]) == 80
    assert loads_bytes(loads[::3]) == 80
    assert loads_bytes(loads[:2]) == 160
    assert loads_bytes(loads) == 240
    assert loads_bytes([Load(buffer, (X + k,)) for k in range(3)]) == 80


def test_loads_at_fixed_places_touch_elements_of_their_own() -> None:
    buffer = Buffer("a", DType.F32, (Poly.of(3), Poly.of(20)), (Poly.of(20), Poly.ONE), "cpu")
    loads = [Load(buffer, (Poly.of(k), X.poly())) for k in (0, 1, 2, 0)]
    assert [loads_bytes(loads[:count]) for count in (1, 2, 3, 4)] == [80, 160, 240, 240]


def test_shared_operands_leave_a_chain_of_maxima() -> None:
    buffer = Buffer("a", DType.F32, (Poly.of(64),), (Poly.ONE,), "cpu")
    a, b = (Load(buffer, (X + k,)) for k in range(2))
    zero, least = literal(0, DType.F32), literal(float("-inf"), DType.F32)
    both = pointwise("maximum", pointwise("maximum", a, zero), pointwise("maximum", b, zero))
    assert both is pointwise("maximum", pointwise("maximum", a, b), zero)
    assert pointwise("maximum", a, least) is a
    assert pointwise("minimum", a, least) is not a
