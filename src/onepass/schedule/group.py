"""`schedule_group`: a group becomes one kernel, or two where a reduction is split over programs.

A split's first kernel leaves one partial state per program in a workspace; the second merges them with
the same monoid and computes what depends on the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..analysis.access import estimate, flat_offset, numel, power_above, tile_elements
from ..analysis.beside import contract_each
from ..analysis.carried import CARRIED_ROWS
from ..analysis.inline import reductions
from ..analysis.legality import outer_axes, programs_of, ways
from ..analysis.nest import Nest, NestStore, Refusal, direct_reductions
from ..analysis.price import price
from ..analysis.rows import arrange
from ..analysis.tile_states import contract_tiles
from ..errors import VerifyError
from ..ir.choice import AS_RULED, FIRST, Adjustment, Choice
from ..ir.expr import Expr, Load, Part, Reduce, const, pointwise, rewrite, substitute_axes
from ..ir.kernel import ScheduledGroup
from ..ir.plan import Group, Store
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, Origin, contiguous_strides
from ..ir.schedule import Schedule
from ..ir.target import Target
from ..ir.time import Time, total_us
from .adjust import adjusted_chunk
from .beside import schedule_beside
from .complete import completed
from .contraction_split import schedule_contraction
from .contraction_states import schedule_tile_states
from .layout import access_scores
from .pieces import PieceScheduler
from .sweeps import NestScheduler
from .tile_layout import pieces_of, strip_axis
from .tiles import TileScheduler

ROW_CHUNK, COLUMN_CHUNK = 1024, 64  # the least a tile program gets of a split reduction
PROGRAM_ELEMENTS = 1 << 15  # work enough for a program of its own
NEAR = 1.1  # times its bound, where no other way is looked for
CARRIED_ELEMENTS = 8192  # of the rows that the programs of one processor hold at once


def schedule_group(group: Group, target: Target, name: str, choice: Choice = FIRST) -> ScheduledGroup:
    """The kernels of a group, in launch order, with everything decided that an emitter prints."""
    scheduled = _scheduled(group, target, name, choice)
    return replace(scheduled, kernels=tuple(map(completed, scheduled.kernels)))


def _scheduled(group: Group, target: Target, name: str, choice: Choice) -> ScheduledGroup:
    """The kernels as their scheduler leaves them.

    Later candidates keep fewer values per thread: for a group whose first kernel spilled registers. What finishes
    a split is never adjusted.
    """
    if group.beside:
        parts = contract_each(group.stores)
        if isinstance(parts, Refusal):
            raise VerifyError(f"group {name} cannot be scheduled: {parts.reason}")
        return schedule_beside(parts, target, name, group.origins, choice)
    if group.tiled:
        tiled = contract_tiles(group.stores)
        if isinstance(tiled, Refusal):
            raise VerifyError(f"group {name} cannot be scheduled: {tiled.reason}")
        return schedule_tile_states(tiled, target, name, group.origins, choice)
    if group.products:
        contraction = arrange(group.stores)
        if isinstance(contraction, Refusal):
            raise VerifyError(f"group {name} cannot be scheduled: {contraction.reason}")
        return schedule_contraction(contraction, target, name, group.origins, choice)
    found = ways(group.stores, target)
    if isinstance(found, Refusal):
        raise VerifyError(f"group {name} cannot be scheduled: {found.reason}")
    schedule = group.schedule if choice == FIRST else None
    if choice.candidate:
        held = target.held_elements >> (2 * choice.candidate - 2)
        each = target.thread_elements >> (choice.candidate + 1)
        registers = target.registers >> choice.candidate
        target = replace(target, held_elements=held, thread_elements=each, registers=registers)
    nest = found[group.schedule.way if group.schedule is not None else 0]
    return build(nest, target, name, group.origins, choice.adjustment, schedule)


@dataclass(frozen=True, slots=True)
class Chosen:
    """How the fastest kernel of stores runs, and the times of its launches."""

    schedule: Schedule
    times: tuple[Time, ...]


def choose(stores: Iterable[Store], target: Target, bound_us: float) -> Chosen | Refusal:
    """How stores run best as one kernel: every way is built and priced, unless one comes near `bound_us`."""
    found = ways(stores, target)
    if isinstance(found, Refusal):
        return found
    best: Chosen | None = None
    for way, nest, each in _candidates(found, target):
        built = build(nest, target, "k", (), each=each)
        schedule = replace(built.kernels[0].schedule, way=way)
        chosen = Chosen(schedule, tuple(price(k, target) for k in built.kernels))
        if best is None or total_us(chosen.times) < total_us(best.times):
            best = chosen
        if total_us(best.times) <= NEAR * bound_us:
            break
    assert best is not None
    return best


def _candidates(found: list[Nest], target: Target) -> Iterator[tuple[int, Nest, bool]]:
    """Ways to number programs; of a split over rows, too, a program for each row."""
    for way, nest in enumerate(found):
        yield way, nest, False
        inner = [c for c in nest.classes if c not in nest.outer and c is not nest.split]
        if nest.split is not None and inner and target.warp and not any(map(nest.carried, _ends(nest, nest.split))):
            yield way, nest, True


def _ends(nest: Nest, axis: Axis) -> list[Reduce]:
    """The reductions that a split over a class leaves unfinished."""
    return [r for r in reductions(s.value for s in nest.stores) if nest.sweeps(r, axis)]


def price_group(group: Group, target: Target) -> float:
    """What the kernels of a group take, in microseconds; without end where there are none."""
    if group.products:
        return total_us(price(k, target) for k in schedule_group(group, target, "k").kernels)
    chosen = choose(group.stores, target, 0.0)
    return math.inf if isinstance(chosen, Refusal) else total_us(chosen.times)


def build(
    nest: Nest,
    target: Target,
    name: str,
    origins: tuple[Origin, ...],
    adjustment: Adjustment = AS_RULED,
    schedule: Schedule | None = None,
    each: bool = False,
) -> ScheduledGroup:
    """The kernels of a nest. `schedule`: of the first of them; else the rules of the target say, adjusted.

    `each`: every position of a split has a program.
    """
    if nest.split is None:
        scheduler = _scheduler(nest, target)(nest, target, None, adjustment, schedule)
        return ScheduledGroup((scheduler.build(name, origins),))
    return _split(nest, nest.split, origins, target, name, adjustment, schedule, each)


def _scheduler(nest: Nest, target: Target) -> type[NestScheduler]:
    if not target.warp:
        return NestScheduler
    return TileScheduler if pieces_of(nest, target) is None else PieceScheduler


def _split(
    nest: Nest,
    axis: Axis,
    origins: tuple[Origin, ...],
    target: Target,
    name: str,
    adjustment: Adjustment,
    schedule: Schedule | None,
    each: bool,
) -> ScheduledGroup:
    ends = _ends(nest, axis)
    outer, device = nest.outer, nest.stores[0].buffer.device
    if schedule is not None:
        size = max(1, schedule.factor(axis).chunk)
    elif each:
        size = 1
    else:
        size = adjusted_chunk(_chunk_size(nest, axis, ends, target), axis, adjustment)
    alone = size == 1  # a position is work enough for a program: what it adds to the result is stored as it is
    number = axis if alone else Axis("chunk", (axis.extent + size - 1) // size)
    first: list[NestStore] = [s for s in nest.stores if axis in s.domain]
    workspace: list[Buffer] = []
    partial: dict[Reduce, list[Buffer]] = {}
    for r in ends:
        partial[r] = []
        axes = (*outer, number, *nest.carried(r))
        shape = tuple(a.extent for a in axes)
        values = _share(nest, r, axis) if alone else [Part(r, k) for k in range(len(r.part_dtypes))]
        for value in values:
            buffer = Buffer(f"{name}_w{len(workspace)}", value.dtype, shape, contiguous_strides(shape), device)
            workspace.append(buffer)
            partial[r].append(buffer)
            first.append(NestStore(buffer, tuple(a.poly() for a in axes), value, frozenset(axes)))
    if alone:
        head, chunks = Nest(tuple(first), nest.classes, nest.bound, (*outer, axis)), None
    else:
        head = Nest(tuple(first), (*nest.classes, number), nest.bound, (*outer, number), axis)
        chunks = {axis: (number, size)}
    kernel = _scheduler(head, target)(head, target, chunks, adjustment, schedule).build(f"{name}_partial", origins)
    tail = _finish(nest, number, partial)
    finish = _scheduler(tail, target)(tail, target).build(f"{name}_finish", origins)
    return ScheduledGroup((kernel, finish), tuple(workspace))


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


def _chunk_size(nest: Nest, axis: Axis, ends: list[Reduce], target: Target) -> int:
    """Positions of the split class that one program takes."""
    if any(nest.carried(r) for r in ends):
        inner = [c for c in nest.classes if c not in (*nest.outer, axis)]
        each = max(1, min(4, CARRIED_ELEMENTS // tile_elements(inner))) if target.warp else 2
        return max(CARRIED_ROWS, -(-estimate(axis.extent) // (each * target.processors)))
    taken = programs_of(nest, target)
    domains = [*(s.domain for s in nest.stores), *(nest.domain_of(r) for r in reductions(s.value for s in nest.stores))]
    if max(numel(d) for d in domains) >= PROGRAM_ELEMENTS * numel((*nest.outer, axis)):
        return 1
    if target.warp and axis in _contiguous(nest) - {strip_axis(nest, access_scores(nest)[0])}:
        return 1  # what lies across is stored in tiles of several positions
    size = max(1, -(-estimate(axis.extent) // max(1, target.split_programs // max(1, taken))))
    if target.warp and strip_axis(nest, access_scores(nest)[0]) is axis:  # whole strips
        size = max(ROW_CHUNK if taken == numel(nest.outer) else COLUMN_CHUNK, power_above(size))
    return size


def _contiguous(nest: Nest) -> set[Axis]:
    """The classes along which large results lie side by side."""
    most = max(numel(s.domain) for s in nest.stores)
    found = [(flat_offset(s.buffer, s.index), s.domain) for s in nest.stores if 4 * numel(s.domain) > most]
    return {a for offset, domain in found for a in domain if offset.coefficient(a) is Poly.ONE}


def _finish(nest: Nest, chunk: Axis, partial: dict[Reduce, list[Buffer]]) -> Nest:
    """The stores that need the split reductions, reading merged partials instead."""
    merged: dict[Reduce, Reduce] = {}
    bound = dict(nest.bound)
    over = Axis("chunk.r", chunk.extent)
    bound[over] = Axis("chunk.c", chunk.extent)
    for r, buffers in partial.items():
        at = tuple(a.poly() for a in (*nest.outer, over, *nest.carried(r)))
        loads = tuple(Load(b, at) for b in buffers)
        monoid = "welford_merge" if r.monoid == "welford" else r.monoid
        merged[r] = Reduce(monoid, loads, (over,))

    def swap(e: Expr) -> Expr | None:
        if isinstance(e, Part) and e.source in merged:
            return Part(merged[e.source], e.index)  # type: ignore[index]
        return None

    stores = tuple(
        NestStore(s.buffer, s.index, rewrite(s.value, swap), s.domain, s.region)
        for s in nest.stores
        if any(r in partial for r in direct_reductions([s.value]))
    )
    classes = (*(c for c in nest.classes if any(c in s.domain for s in stores)), bound[over])
    tail = Nest(stores, classes, bound)
    return Nest(stores, classes, bound, outer_axes(tail))
