"""A reduction that too few programs would run is split over more of them: a first kernel, and one that finishes.

Every program of the first kernel leaves the state of its chunk in a workspace. The finish merges the states with the
same monoid and computes the values that depend on the result. A scan is split alike: its finish merges, for each chunk,
the states of the chunks before it, and scans on from there. The linear maps of chunks are merged in order: a kernel
between the two scans them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..analysis.access import estimate, flat_offset, numel, power_above, tile_elements
from ..analysis.carried import CARRIED_ROWS
from ..analysis.legality import programs_of
from ..analysis.nest import Nest, NestStore, direct_reductions
from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, Part, Reduce, Scan, const, pointwise, rewrite, substitute_axes
from ..ir.kernel import Kernel, ScheduledGroup
from ..ir.poly import Axis, Poly
from ..ir.program import Origin
from ..ir.schedule import Schedule
from ..ir.states import identities, joined, share
from ..ir.target import Target
from .layout import AxisOrder
from .walk import nest_kernel
from .workspace import Workspace

ROW_CHUNK, COLUMN_CHUNK = 1024, 64  # the least a tile program gets of a split reduction
PROGRAM_ELEMENTS = 1 << 15  # work enough for a program of its own
CARRIED_ELEMENTS = 8192  # of the rows that the programs of one processor hold at once


def unfinished(nest: Nest, axis: Axis) -> list[Reduce]:
    """The reductions that a split over a class leaves unfinished."""
    return [r for r in nest.reductions if nest.sweeps(r, axis)]


def split(
    nest: Nest, axis: Axis, origins: tuple[Origin, ...], target: Target, name: str, schedule: Schedule
) -> ScheduledGroup:
    """The kernels of a split nest; the first of them runs by the schedule."""
    size, ends = max(1, schedule.factor(axis).chunk), unfinished(nest, axis)
    workspace = Workspace(name, nest.stores[0].buffer.device)
    head = first_part(nest, axis, size, workspace)
    kernel = nest_kernel(head, target, f"{name}_partial", origins, schedule)
    if nest.scans:
        chain = _chained(nest, head, workspace)
        between = [nest_kernel(chain, target, f"{name}_chain", origins)] if chain is not None else []
        tail = scanned_on(nest, head, workspace)
        last = nest_kernel(tail, target, f"{name}_finish", origins, schedule)
        return ScheduledGroup((kernel, *between, last), tuple(workspace.buffers))
    tail = workspace.finish(nest, (s for s in nest.stores if not {*ends}.isdisjoint(direct_reductions([s.value]))))
    return finished(kernel, [tail], workspace, target, name)


def finished(first: Kernel, tails: Iterable[Nest], workspace: Workspace, target: Target, name: str) -> ScheduledGroup:
    """A kernel that leaves states, and those that merge them, each with a nest of its own."""
    kernels = [first]
    for k, tail in enumerate(tails, 1):
        kernels.append(nest_kernel(tail, target, f"{name}_finish{k if k > 1 else ''}", first.origins))
    return ScheduledGroup(tuple(kernels), tuple(workspace.buffers))


def first_part(nest: Nest, axis: Axis, size: int, workspace: Workspace) -> Nest:
    """What the first kernel computes, each program `size` positions: their states are left in the workspace."""
    if nest.scans:
        return _chunk_totals(nest, axis, size, workspace)
    alone = size == 1  # a position is work enough for a program: what it adds to the result is stored as it is
    number = axis if alone else Axis("chunk", (axis.extent + size - 1) // size)
    first: list[NestStore] = [s for s in nest.stores if axis in s.domain]
    for r in unfinished(nest, axis):
        first += workspace.leave(
            r, (*nest.outer, number, *nest.carried(r)), {number: "chunk"}, _share(nest, r, axis) if alone else None
        )
    if alone:
        return Nest(tuple(first), nest.classes, nest.bound, (*nest.outer, axis))
    return Nest(tuple(first), (*nest.classes, number), nest.bound, (*nest.outer, number), axis)


def scheduled_part(nest: Nest, axis: Axis, size: int) -> Nest:
    """The nest that the schedule of a split is made for: the first kernel's. Both of a scan run by that of the last."""
    workspace = Workspace("k", "")
    head = first_part(nest, axis, size, workspace)
    if not nest.scans:
        return head
    _chained(nest, head, workspace)
    return scanned_on(nest, head, workspace)


def _chunk_totals(nest: Nest, axis: Axis, size: int, workspace: Workspace) -> Nest:
    """The state of each scan after each chunk alone."""
    number = Axis("chunk", (axis.extent + size - 1) // size)
    stores: list[NestStore] = []
    bound = dict(nest.bound)
    for k, s in enumerate(nest.scans):
        if s.monoid == "linear":  # the state after the last position of a chunk; nobody reads that of the last chunk
            end = number * size + (0 if s.reverse else size - 1)
            left = workspace.leave(s, (*nest.outer, number), {}, [Part(s, 0), Part(s, 1)])
            stores += (replace(x, domain=x.domain | {axis}, region=((axis, end, end + 1),)) for x in left)
            continue
        over = Axis(f"{axis.name}.{k}", axis.extent)
        inputs = tuple(substitute_axes(v, {axis: over.poly()}) for v in s.inputs)
        for total in _merging(s.monoid, inputs, over):
            bound |= dict.fromkeys(total.over, axis)
            stores += workspace.leave(total, (*nest.outer, number), {number: f"chunk{k}"})
    return Nest(tuple(stores), (*nest.classes, number), bound, (*nest.outer, number), axis)


def _merging(monoid: str, values: tuple[Expr, ...], over: Axis) -> list[Reduce]:
    """The reductions that are the state of a scan after all of an axis. `values`: elements, or all parts of states."""
    if monoid != "logsumexp":
        return [Reduce(monoid, values, (over,))]
    top, other = Reduce("max", values[:1], (over,)), Axis(f"{over.name}s", over.extent)
    x, *terms = (substitute_axes(v, {over: other.poly()}) for v in values)
    total = share(x, Part(top, 0))
    return [top, Reduce("sum", (terms[0] * total if terms else total,), (other,))]


def _chain(scan: Scan, number: Axis, workspace: Workspace) -> Scan:
    """The linear maps of chunks after each other."""
    return Scan("linear", workspace.states[scan].read({}), number, number.poly(), scan.reverse)


def _chained(nest: Nest, head: Nest, workspace: Workspace) -> Nest | None:
    """What the linear maps of all chunks up to each make of zero."""
    number, stores = head.outer[-1], list[NestStore]()
    for s in nest.scans:
        if s.monoid == "linear":
            chain = _chain(s, number, workspace)
            stores += workspace.leave(chain, (*nest.outer, number), {}, [Part(chain, 1)])
    return Nest(tuple(stores), (*nest.outer, number), {}, nest.outer) if stores else None


def scanned_on(nest: Nest, head: Nest, workspace: Workspace) -> Nest:
    """The nest with chunks whose scans go on from the states of the chunks before them."""
    number, bound, known = head.outer[-1], dict(nest.bound), dict[Expr, Expr]()
    left = iter([x for key, x in workspace.states.items() if isinstance(key, Reduce)])
    for k, s in enumerate(nest.scans):
        if s.monoid == "linear":
            near = number + 1 if s.reverse else number - 1
            (start,) = workspace.states[_chain(s, number, workspace)].read({number: near})
            inside = (
                pointwise("lt", Index(near), Index(number.extent))
                if s.reverse
                else pointwise("gt", Index(number.poly()), const(0, DType.I64))
            )
            start = pointwise("where", inside, start, const(0, start.dtype))
            known[Part(s, 1)] = Part(s, 0) * start + Part(s, 1)
            continue
        states = [next(left) for _ in range(2 if s.monoid == "logsumexp" else 1)]
        other, cls = Axis(f"chunk{k}.r", number.extent), Axis(f"chunk{k}.c", number.extent)
        before = pointwise("gt" if s.reverse else "lt", Index(other.poly()), Index(number.poly()))
        neutral = identities(s.monoid, s.part_dtypes)
        read = zip((v for x in states for v in x.read({number: other.poly()})), neutral, strict=True)
        prefix = _merging(s.monoid, tuple(pointwise("where", before, v, n) for v, n in read), other)
        bound |= {a: cls for r in prefix for a in r.over}
        parts = [Part(r, j) for r in prefix for j in range(len(r.part_dtypes))]
        own = [Part(s, j) for j in range(len(s.part_dtypes))]
        known |= dict(zip(own, joined(s.monoid, parts, own), strict=True))
    stores = tuple(replace(s, value=rewrite(s.value, known.get)) for s in nest.stores)
    classes = (*nest.classes, number, *dict.fromkeys(bound[a] for a in bound if a not in nest.bound))
    return Nest(stores, classes, bound, head.outer, head.split)


def _share(nest: Nest, reduce: Reduce, axis: Axis) -> list[Expr]:
    """The state of a reduction at one position of a class it runs over."""
    here = {a: axis.poly() for a in reduce.over if nest.bound[a] is axis}
    inputs = tuple(substitute_axes(v, here) for v in reduce.inputs)
    if rest := tuple(a for a in reduce.over if a not in here):
        inner = Reduce(reduce.monoid, inputs, rest)
        return [Part(inner, k) for k in range(len(inner.part_dtypes))]
    match reduce.monoid:
        case "welford":
            return [inputs[0], const(0.0, inputs[0].dtype), const(1.0, inputs[0].dtype)]
        case "any" | "all":
            return [pointwise("ne", inputs[0], const(0, inputs[0].dtype))]
    return list(inputs)


def chunk_size(nest: Nest, axis: Axis, target: Target) -> int:
    """Positions of the split class that one program takes, as the rules say."""
    if any(map(nest.carried, unfinished(nest, axis))):
        inner = [c for c in nest.classes if c not in (*nest.outer, axis)]
        each = max(1, min(4, CARRIED_ELEMENTS // tile_elements(inner))) if target.warp else 2
        return max(CARRIED_ROWS, -(-estimate(axis.extent) // (each * target.processors)))
    taken = programs_of(nest, target)
    domains = [*(s.domain for s in nest.stores), *(nest.domain_of(r) for r in nest.reductions)]
    if not nest.scans and max(numel(d) for d in domains) >= PROGRAM_ELEMENTS * numel((*nest.outer, axis)):
        return 1
    if not nest.scans and target.warp and axis in _contiguous(nest) - {AxisOrder(nest).strip_axis()}:
        return 1  # what lies across is stored in tiles of several positions
    size = max(1, -(-estimate(axis.extent) // max(1, target.split_programs // max(1, taken))))
    if target.warp and AxisOrder(nest).strip_axis() is axis:  # whole strips
        size = max(ROW_CHUNK if taken == numel(nest.outer) else COLUMN_CHUNK, power_above(size))
    return size


def _contiguous(nest: Nest) -> set[Axis]:
    """The classes along which large results lie side by side."""
    most = max(numel(s.domain) for s in nest.stores)
    found = [(flat_offset(s.buffer, s.index), s.domain) for s in nest.stores if 4 * numel(s.domain) > most]
    return {a for offset, domain in found for a in domain if offset.coefficient(a) is Poly.ONE}
