"""Scans in a nest: which class one runs along, and whether a program may sweep it in order.

A scan is a value of a sweep with a state that goes from position to position. So one program has all positions of its
class, in order; everything that is read of it is read at the position that the sweep is at.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Expr, Scan, postorder, rewrite, substitute_axes
from ..ir.poly import Axis
from ..ir.states import JOINED
from .inline import scans
from .nest import Nest, direct_reductions


def upright(value: Expr) -> Expr:
    """The value with scans that are read from the end as scans from the end: flip(cumsum(flip(x))) copies nothing."""

    def turn(e: Expr) -> Expr | None:
        if not isinstance(e, Scan) or e.at.axis is not None:
            return None
        axis = (e.over.extent - 1 - e.at).axis
        if axis is None or axis.extent is not e.over.extent:
            return None
        mirrored = {e.over: e.over.extent - 1 - e.over}
        inputs = tuple(substitute_axes(i, mirrored) for i in e.inputs)
        return Scan(e.monoid, inputs, e.over, axis.poly(), not e.reverse)

    return rewrite(value, turn) if scans([value]) else value


def cannot_scan(nest: Nest) -> str | None:
    """Why a nest has no program that sweeps the class of its scans in order; None where it has, or has no scan."""
    found, outer = nest.scans, frozenset(nest.outer)
    for s in found:
        at = s.at.axis
        if at is None or nest.bound.get(at, at) is not s.over:
            return "a scan is read at other positions than its own"
        if {nest.bound.get(a, a) for a in s.axes} - {s.over} - outer:
            return "a scan is needed for each position of a sweep"
        if any(s.over in nest.free(r) for r in direct_reductions(s.inputs)):
            return "a scan is made of reductions of each of its positions"
    if len({(s.over, s.reverse) for s in found}) > 1:
        return "scans along two axes, or both ways along one"
    reading = [s.domain for s in nest.stores if _direct([s.value])]
    reading += [nest.domain_of(r) for r in nest.reductions if _direct(r.inputs)]
    if any(domain - outer != {found[0].over} for domain in reading):
        return "a scan is read inside a sweep over another axis"
    return None


def cannot_chunk(nest: Nest, axis: Axis) -> str | None:
    """Why programs cannot share a class out, each scanning a chunk and going on from what all before it have."""
    found = nest.scans
    if any(nest.sweeps(r, axis) for r in nest.reductions) or any(axis not in s.domain for s in nest.stores):
        return ": something beside the scan runs over its axis"
    if any(s.over is not axis or scans(s.inputs) or s.monoid not in JOINED for s in found):
        return ": not a scan of values along it"
    return None


def _direct(values: Iterable[Expr]) -> bool:
    """Whether values need a scan themselves, not a reduction of one."""
    return any(isinstance(e, Scan) for e in postorder(list(values), into_reductions=False))
