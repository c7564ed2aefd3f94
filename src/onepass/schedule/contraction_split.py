"""Contractions with too few tiles: programs share out the swept class, and a second kernel merges what they found.

Each program leaves the states of its chunk. A maximum merges by itself; sums that grew beside it are carried to the
common maximum first, by the same rule that carries them along a sweep (decoding with one query, split-K). Of a class
whose size is known at run time there are as many chunks as fill the chip, each of a length that follows from the size:
where it is small, the last of them are empty and leave states of nothing.
"""

from __future__ import annotations

from ..analysis.access import estimate, numel
from ..analysis.contraction import Contraction
from ..analysis.nest import Nest, NestStore
from ..analysis.passes import passes, shares_out
from ..analysis.rows import RowContraction
from ..ir.choice import Choice
from ..ir.expr import Expr, Load, Part, Pointwise, Reduce, const, pointwise, postorder, rewrite
from ..ir.kernel import ScheduledGroup
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, Origin, contiguous_strides
from ..ir.target import Target
from .contraction_rows import RowScheduler
from .contractions import ContractionScheduler
from .online import carried
from .tiles import TileScheduler

LEAST_STEPS = 4  # of a chunk
PROGRAMS = 2  # for each processor


def schedule_contraction(
    c: Contraction, target: Target, name: str, origins: tuple[Origin, ...], choice: Choice
) -> ScheduledGroup:
    """The kernels of a group with matrix products."""
    scheduler = RowScheduler if isinstance(c, RowContraction) else ContractionScheduler
    whole = scheduler(c, target, choice)
    chunks = _chunks(c, whole, target) if shares_out(c) else 1
    if chunks < 2:
        return ScheduledGroup((whole.build(name, origins),))
    steps = (c.swept.extent + whole.tiles.step - 1) // whole.tiles.step
    each = (steps + chunks - 1) // chunks
    if steps.constant is not None and each.constant is not None:
        chunks = -(-steps.constant // each.constant)  # none is empty
    chunk = Axis("chunk", Poly.of(chunks))
    part = scheduler(c, target, choice, chunk, each)
    workspace = _states(part, chunk, name)
    first = part.build(f"{name}_partial", origins)
    tail = _merged(c, chunk, workspace)
    return ScheduledGroup(
        (first, TileScheduler(tail, target).build(f"{name}_finish", origins)),
        tuple(b for buffers in workspace.values() for b in buffers),
    )


def _chunks(c: Contraction, whole: ContractionScheduler, target: Target) -> int:
    """How many parts of the swept class have programs of their own; 1: it is not shared out.

    A size known at run time may grow: more than one step of what is assumed is shared out over the whole chip.
    """
    steps = -(-estimate(c.swept.extent) // whole.tiles.step)
    if isinstance(c, RowContraction):
        return _row_chunks(c, whole, steps, target)
    room = PROGRAMS * target.processors // max(1, whole.programs())
    if c.swept.extent.constant is None:
        return room if steps > 1 else 1
    return min(steps // LEAST_STEPS, room)


def _row_chunks(c: RowContraction, whole: ContractionScheduler, steps: int, target: Target) -> int:
    """Chunks of columns with which programs come closest to whole rounds of two on every processor; 1: as they are."""
    programs, places = max(1, whole.programs()), 2 * target.processors
    products = numel((*c.grid, c.rows, c.columns)) * sum(estimate(a.extent) for a in c.inner)
    if c.held or products / target.products_per_us * (places / programs - 1) < target.launch_us:
        return 1  # a second kernel takes longer than waiting for the last programs

    def rounds(chunks: int) -> float:
        return -(-programs * chunks // places) * (1 / chunks + 1 / steps)  # each starts its own pipeline

    return min(range(1, max(2, steps // LEAST_STEPS + 1)), key=rounds)


def _states(part: ContractionScheduler, chunk: Axis, name: str) -> dict[Reduce, list[Buffer]]:
    """Buffers for the states of every reduction, one for each chunk."""
    c = part.c
    found: dict[Reduce, list[Buffer]] = {}
    (one,) = passes(c)
    for r in (*one.level, *one.carried, *_beside(c)):
        axes = _axes(c, chunk, r)
        shape = tuple(a.extent for a in axes)
        device = c.nest.stores[0].buffer.device
        found[r] = []
        for k, dtype in enumerate(r.part_dtypes):
            buffer = Buffer(f"{name}_w{len(part.states)}", dtype, shape, contiguous_strides(shape), device)
            found[r].append(buffer)
            part.states.append((buffer, tuple(a.poly() for a in axes), Part(r, k)))
    return found


def _beside(c: Contraction) -> tuple[Reduce, ...]:
    """Reductions over another class than the swept one: every chunk has the same."""
    return c.beside if isinstance(c, RowContraction) else ()


def _axes(c: Contraction, chunk: Axis, reduce: Reduce) -> tuple[Axis, ...]:
    return (*c.grid, chunk, *(a for a in (c.rows, c.columns) if a in reduce.axes))


def _merged(c: Contraction, chunk: Axis, workspace: dict[Reduce, list[Buffer]]) -> Nest:
    """The stores of the group, reading merged states."""
    (one,) = passes(c)
    over, after, cls = (Axis(f"chunk.{kind}", chunk.extent) for kind in "rsc")  # a sum's own, with a maximum inside

    def states(r: Reduce, at: Poly) -> tuple[Expr, ...]:
        index = tuple(at if a is chunk else a.poly() for a in _axes(c, chunk, r))
        return tuple(Load(b, index) for b in workspace[r])

    def merge(r: Reduce) -> Reduce:
        return Reduce("welford_merge" if r.monoid == "welford" else r.monoid, states(r, over.poly()), (over,))

    whole: dict[Expr, Expr] = {Part(r, k): Part(merge(r), k) for r in one.level for k in range(len(workspace[r]))}
    results = postorder([s.value for s in c.nest.stores], into_reductions=False)
    chooses = any(isinstance(e, Pointwise) and e.op == "where" for e in results)
    for r, h in one.carried.items():
        top = one.level[0]
        (own,), (reference,) = states(r, after.poly()), states(top, after.poly())
        moved = carried(Part(top, 0), h, whole[Part(top, 0)], reference)
        if chooses:  # a number even of rows without any term: -inf meets no -inf
            still = pointwise("eq", whole[Part(top, 0)], reference)
            moved = pointwise("where", still, const(1.0, moved.dtype), moved)
        whole[Part(r, 0)] = Part(Reduce("sum", (pointwise("mul", own, moved),), (after,)), 0)
    for r in _beside(c):
        whole |= {Part(r, k): value for k, value in enumerate(states(r, Poly.ZERO))}
    stores = tuple(
        NestStore(s.buffer, s.index, rewrite(s.value, lambda e: None, None, dict(whole)), s.domain)
        for s in c.nest.stores
        if not isinstance(c, RowContraction) or s not in c.passing  # which the first kernel has stored
    )
    bound = {**c.nest.bound, over: cls, after: cls}
    classes = tuple(a for a in c.nest.classes if any(a in s.domain for s in stores))
    outer = tuple(a for a in classes if all(a in s.domain for s in stores))  # every program finds the maximum anew
    return Nest(stores, (*classes, cls), bound, outer)
