"""The table of rules: each has a name and a reason, and a rule that fails its check changes nothing."""

from __future__ import annotations

import pytest

from onepass.analysis import scores
from onepass.analysis.nest import Nest, NestStore
from onepass.analysis.normalise import RULES, normalise
from onepass.ir.dtypes import DType
from onepass.ir.expr import Expr, Load, Part, Pointwise, Reduce, pointwise, postorder
from onepass.ir.poly import Axis, Poly
from onepass.ir.program import Buffer

ROWS, COLUMNS, SWEPT = Axis("c0", Poly.of(64)), Axis("k", Poly.of(128)), Axis("c1", Poly.of(128))


def denominator() -> Nest:
    """softmax's sum of exponentials, for each row of a float16 matrix."""
    scores_of = Buffer("x", DType.F16, (ROWS.extent, COLUMNS.extent), (COLUMNS.extent, Poly.ONE))
    out = Buffer("out", DType.F32, (ROWS.extent,), (Poly.ONE,))
    x = pointwise("widen", Load(scores_of, (ROWS.poly(), COLUMNS.poly())), dtype=DType.F32)
    largest = Part(Reduce("max", (x,), (COLUMNS,)), 0)
    total = Part(Reduce("sum", (pointwise("exp", pointwise("sub", x, largest)),), (COLUMNS,)), 0)
    store = NestStore(out, (ROWS.poly(),), total, frozenset((ROWS,)))
    return Nest((store,), (ROWS, SWEPT), {COLUMNS: SWEPT})


def operations(values: list[Expr]) -> set[str]:
    return {e.op for e in postorder(values) if isinstance(e, Pointwise)}


def test_rules_are_told_apart() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.why and (rule.rows or rule.tiles) for rule in RULES)


@pytest.mark.parametrize("rows", [False, True])
def test_a_rule_that_fails_its_check_is_dropped(rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nest = denominator()
    assert "exp2" in operations(normalise(nest, rows).values)
    monkeypatch.setattr(scores, "same_number", lambda *_: False)
    assert "exp2" not in operations(normalise(nest, rows).values)


@pytest.mark.parametrize("rows", [False, True])
def test_what_is_normal_stays(rows: bool) -> None:
    once = normalise(denominator(), rows)
    assert normalise(once, rows) == once
