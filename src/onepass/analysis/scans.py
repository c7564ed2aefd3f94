"""Scans in a nest: which class one runs along, and whether a program may sweep it in order.

A scan is a value of a sweep with a state that goes from position to position. So one program has all positions of its
class, in order; everything that is read of it is read at the position that the sweep is at. A scan may have a state for
each position of other classes inside the program: they are all open, or swept once, at each position of its class.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Expr, Index, Part, Scan, const, pointwise, postorder, rewrite, substitute_axes
from ..ir.poly import Axis
from ..ir.states import JOINED, identities
from .access import tile_elements
from .inline import reductions, scans
from .nest import Nest, direct_reductions

MOST_STATES = 256  # of a scan for each position of its class, in one program


def upright(value: Expr) -> Expr:
    """The value with all scans read at their own position.

    What is read from the end is scanned from the end: flip(cumsum(flip(x))) copies nothing. What is read one position
    before is a scan of what entered one position before, and of nothing at the first.
    """

    def turn(e: Expr) -> Expr | None:
        if not isinstance(e, Scan) or e.at.axis is not None:
            return None
        mirrored = {e.over: e.over.extent - 1 - e.over}
        inputs = tuple(substitute_axes(i, mirrored) for i in e.inputs)
        turned = Scan(e.monoid, inputs, e.over, e.over.extent - 1 - e.at, not e.reverse)
        for scan in (turned, e):
            axis = scan.at.axis
            found = scan if axis is not None and axis.extent is e.over.extent else _moved(scan)
            if found is not None:
                return found
        return None

    return rewrite(value, turn) if scans([value]) else value


def _moved(scan: Scan) -> Scan | None:
    """A scan that is read one position before as one that is read at its own."""
    before, over = (1 if scan.reverse else -1), scan.over
    axis = (scan.at - before).axis
    if axis is None or axis.extent is not over.extent:
        return None
    near = Index(over + before)
    edge = Index(over.extent) if scan.reverse else const(-1, near.dtype)
    inside = pointwise("lt", near, edge) if scan.reverse else pointwise("gt", near, edge)
    entering = (substitute_axes(i, {over: over + before}) for i in scan.inputs)
    nothing = identities(scan.monoid, scan.part_dtypes)
    inputs = tuple(pointwise("where", inside, i, n) for i, n in zip(entering, nothing, strict=False))
    return Scan(scan.monoid, inputs, over, axis.poly(), scan.reverse)


def state_classes(nest: Nest) -> frozenset[Axis]:
    """The classes inside a program that its scans have a state for each position of."""
    found = nest.scans
    along = {s.over for s in found}
    return frozenset(c for s in found for a in s.axes if (c := nest.bound.get(a, a)) not in along) - {*nest.outer}


def cannot_scan(nest: Nest) -> str | None:
    """Why a nest has no program that sweeps the class of its scans in order; None where it has, or has no scan."""
    found, outer, states = nest.scans, frozenset(nest.outer), state_classes(nest)
    for s in found:
        at = s.at.axis
        if at is None or nest.bound.get(at, at) is not s.over:
            return "a scan is read at other positions than its own"
        if any(s.over in nest.free(r) for r in direct_reductions(s.inputs)):
            return "a scan is made of reductions of each of its positions"
    if len({(s.over, s.reverse) for s in found}) > 1:
        return "scans along two axes, or both ways along one"
    reading = [(s.domain, [s.value]) for s in nest.stores if _direct([s.value])]
    reading += [(nest.domain_of(r), list(r.inputs)) for r in nest.reductions if _direct(r.inputs)]
    if any(domain - outer - states != {found[0].over} for domain, _ in reading):
        return "a scan is read inside a sweep over another axis"
    return _cannot_hold(nest, states, reading) if states else None


def _cannot_hold(nest: Nest, states: frozenset[Axis], reading: list[tuple[frozenset[Axis], list[Expr]]]) -> str | None:
    """Why a program cannot advance a state for each position of some classes once for each position of the scans."""
    outer, over = frozenset(nest.outer), nest.scans[0].over
    if tile_elements(states) > MOST_STATES or any(a.extent.constant is None for a in states):
        return "a scan has too many states for one program"
    if {*nest.classes} - outer - states - {over}:
        return "a scan of several states is needed beside a sweep over another axis"
    if any({nest.bound.get(a, a) for a in s.axes} - outer - {over} not in (frozenset(), states) for s in nest.scans):
        return "scans with states of different axes"
    if any(nest.sweeps(r, over) and any(nest.sweeps(r, a) for a in states) for r in nest.reductions):
        return "a scan of several states is reduced with them"
    at_each = {r for r in nest.reductions if over in nest.free(r)}
    for domain, values in reading:
        with_states = any(states & _classes(nest, s) for v in values for s in _directly([v]))
        if with_states and (domain - outer - {over} != states or not at_each.isdisjoint(reductions(values))):
            return "the states of a scan are needed again after they were reduced"
    return None


def _classes(nest: Nest, scan: Scan) -> frozenset[Axis]:
    return frozenset(nest.bound.get(a, a) for a in scan.axes)


def cannot_chunk(nest: Nest, axis: Axis) -> str | None:
    """Why programs cannot share a class out, each scanning a chunk and going on from what all before it have."""
    found = nest.scans
    if any(nest.sweeps(r, axis) for r in nest.reductions) or any(axis not in s.domain for s in nest.stores):
        return ": something beside the scan runs over its axis"
    if any(s.over is not axis or scans(s.inputs) or s.monoid not in (*JOINED, "linear") for s in found):
        return ": not a scan of values along it"
    products = [e for e in postorder(nest.values) if isinstance(e, Part) and isinstance(e.source, Scan) and not e.index]
    if state_classes(nest) or any(e.source.monoid == "linear" for e in products):
        return ": a scan of more than one state, or one whose products are read"
    return None


def _direct(values: Iterable[Expr]) -> bool:
    """Whether values need a scan themselves, not a reduction of one."""
    return bool(_directly(values))


def _directly(values: Iterable[Expr]) -> list[Scan]:
    return [e for e in postorder(list(values), into_reductions=False) if isinstance(e, Scan)]
