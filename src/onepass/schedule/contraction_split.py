"""Contractions with too few tiles: programs share out the swept class, and a second kernel merges what they found.

Each program leaves the states of its chunk. A maximum merges by itself; sums that grew beside it are carried to the
common maximum first, by the same rule that carries them along a sweep (decoding with one query, split-K).
"""

from __future__ import annotations

from ..analysis.access import estimate
from ..analysis.contraction import Contraction
from ..analysis.legality import outer_axes
from ..analysis.nest import Nest, NestStore
from ..analysis.passes import passes
from ..ir.expr import Expr, Load, Part, Reduce, pointwise, rewrite
from ..ir.kernel import ScheduledGroup
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, Origin, contiguous_strides
from ..ir.target import Target
from .contractions import ContractionScheduler
from .online import carried
from .tiles import TileScheduler

LEAST_STEPS = 4  # of a chunk
PROGRAMS = 3  # for each processor


def schedule_contraction(
    c: Contraction, target: Target, name: str, origins: tuple[Origin, ...], candidate: int
) -> ScheduledGroup:
    """The kernels of a group with matrix products."""
    whole = ContractionScheduler(c, target, candidate)
    steps = -(-estimate(c.swept.extent) // whole.tiles.step)
    chunks = min(steps // LEAST_STEPS, PROGRAMS * target.processors // max(1, whole.programs()))
    if chunks < 2 or c.swept.extent.constant is None or len(passes(c)) != 1:
        return ScheduledGroup((whole.build(name, origins),))
    each = -(-steps // chunks)
    chunk = Axis("chunk", Poly.of(-(-steps // each)))
    part = ContractionScheduler(c, target, candidate, chunk, each)
    workspace = _states(part, chunk, name)
    first = part.build(f"{name}_partial", origins)
    tail = _merged(c, chunk, workspace)
    return ScheduledGroup(
        (first, TileScheduler(tail, target).build(f"{name}_finish", origins)), tuple(workspace.values())
    )


def _states(part: ContractionScheduler, chunk: Axis, name: str) -> dict[Reduce, Buffer]:
    """A buffer for the states of every reduction, one for each chunk."""
    c = part.c
    found: dict[Reduce, Buffer] = {}
    (one,) = passes(c)
    for r in (*one.level, *one.carried):
        axes = _axes(c, chunk, r)
        shape = tuple(a.extent for a in axes)
        device = c.nest.stores[0].buffer.device
        buffer = Buffer(f"{name}_w{len(found)}", r.part_dtypes[0], shape, contiguous_strides(shape), device)
        found[r] = buffer
        part.states.append((buffer, tuple(a.poly() for a in axes), Part(r, 0)))
    return found


def _axes(c: Contraction, chunk: Axis, reduce: Reduce) -> tuple[Axis, ...]:
    return (*c.grid, chunk, *(a for a in (c.rows, c.columns) if a in reduce.axes))


def _merged(c: Contraction, chunk: Axis, workspace: dict[Reduce, Buffer]) -> Nest:
    """The stores of the group, reading merged states."""
    (one,) = passes(c)
    over, cls = Axis("chunk.r", chunk.extent), Axis("chunk.c", chunk.extent)

    def state(r: Reduce) -> Expr:
        return Load(workspace[r], tuple(over.poly() if a is chunk else a.poly() for a in _axes(c, chunk, r)))

    whole: dict[Reduce, Expr] = {r: Part(Reduce(r.monoid, (state(r),), (over,)), 0) for r in one.level}
    for r, h in one.carried.items():
        top = one.level[0]
        moved = carried(Part(top, 0), h, whole[top], state(top))
        whole[r] = Part(Reduce("sum", (pointwise("mul", state(r), moved),), (over,)), 0)
    memo: dict[Expr, Expr] = {Part(r, 0): merged for r, merged in whole.items()}
    stores = tuple(
        NestStore(s.buffer, s.index, rewrite(s.value, lambda e: None, None, dict(memo)), s.domain)
        for s in c.nest.stores
    )
    bound = {**c.nest.bound, over: cls}
    nest = Nest(stores, (*(a for a in c.nest.classes if a in stores[0].domain), cls), bound)
    return Nest(stores, nest.classes, bound, outer_axes(nest))
