"""Welford states in float64 become sums of x - origin and of its square; the origin is the first element.

The distance of an element from the mean is at most sqrt(n) deviations, so the subtraction at the end loses at most
log2(n) of the 53 bits. That is half the work, and lanes merge by addition.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import kernel as ir
from ..ir.dtypes import DType

_SIMPLE = (ir.Let, ir.LoadElement, ir.StoreElement, ir.RandomWord, ir.ReadLocal, ir.WriteLocal, ir.Accumulate)


def shift_moments(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """The statements with every such state shifted that is entered in strips alone and whose lanes all merge."""
    shifted = _shifted(body)
    if not shifted:
        return body

    def change(s: ir.Statement) -> ir.Statement:
        if isinstance(s, ir.Start | ir.Accumulate | ir.Finish | ir.Rescale) and s.accumulator in shifted:
            return replace(s, accumulator=replace(s.accumulator, shifted=True))
        if isinstance(s, ir.Loop) and s.kind == "strip":
            entered = [x for x in s.body if isinstance(x, ir.Accumulate) and x.accumulator.shifted]
            return replace(s, origins=tuple(_first(s.body, x) for x in entered))
        return s

    return ir.rewritten(body, change)


def _shifted(body: tuple[ir.Statement, ...]) -> set[ir.Accumulator]:
    statements = ir.walk(body)
    started = (s.accumulator for s in statements if isinstance(s, ir.Start))
    found = {a for a in started if a.monoid == "welford" and a.dtypes[0] is DType.F64}
    by_lane = {
        id(x)
        for s in statements
        if isinstance(s, ir.Loop) and s.kind == "strip" and all(isinstance(x, _SIMPLE) for x in s.body)
        for x in s.body
        if isinstance(x, ir.Accumulate) and s.lane in x.lane.axes
    }
    entered_elsewhere = {s.accumulator for s in statements if isinstance(s, ir.Accumulate) and id(s) not in by_lane}
    finished_by_lane = {s.accumulator for s in statements if isinstance(s, ir.Finish) and s.lane is not None}
    return found - entered_elsewhere - finished_by_lane


def _first(body: tuple[ir.Statement, ...], s: ir.Accumulate) -> ir.FirstElement:
    """The origin of the state that `s` enters, with those statements of a strip's body that it needs."""
    needed, found = ir.names(s.inputs), list[ir.Statement]()
    for x in reversed(body):
        if isinstance(x, ir.Let | ir.LoadElement | ir.RandomWord | ir.ReadLocal) and x.var.name in needed:
            found.append(x)
            needed |= ir.names(ir.reads(x))
    return ir.FirstElement(s.accumulator, tuple(reversed(found)), s.inputs[0])
