"""The kernels of a group with matrix products.

Most groups are one kernel. Two kinds leave states in a workspace, which further kernels merge: tiles whose results are
reduced, and contractions with too few tiles, whose swept class is shared out over programs (decoding with one query,
split-K). Of a class whose size is known at run time there are as many chunks as fill the chip, each of a length that
follows from the size: where it is small, the last chunks are empty and leave states of nothing. Contractions that
have nothing in common share a launch: a program's number says to which kernel it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..analysis.access import estimate, numel
from ..analysis.contraction import Carried, Contraction
from ..analysis.nest import NestStore
from ..analysis.passes import passes, shares_out
from ..analysis.price import price
from ..ir.expr import Pointwise, postorder
from ..ir.kernel import Loop, ScheduledGroup, walk
from ..ir.poly import Axis, Poly
from ..ir.program import Origin
from ..ir.schedule import Schedule
from ..ir.target import Target
from ..ir.time import total_us
from .product_schedules import Tiles, tiles_of
from .products import ProductScheduler
from .shared_launch import joined
from .split import finished
from .workspace import Workspace

LEAST_STEPS = 4  # of a chunk
MOST_ASKED = 0.03  # of a kernel's time: for the answer to what data leaves of it, where nothing is expected
PROGRAMS = 2  # for each processor


def schedule_products(
    contractions: Sequence[Contraction],
    target: Target,
    name: str,
    origins: tuple[Origin, ...],
    schedules: Sequence[Schedule],
) -> ScheduledGroup:
    """The kernels of contractions that share a launch, each with its schedule."""
    tiles = [tiles_of(s, c) for s, c in zip(schedules, contractions, strict=True)]
    if len(contractions) > 1:
        return _after_questions(lambda asks: _side_by_side(contractions, target, tiles, asks), target, name, origins)
    ((c,), (own,)) = contractions, tiles
    whole = ProductScheduler(c, target, own)
    chunk, steps = (None, Poly.ZERO) if c.entering else _chunk(c, whole, target)
    if chunk is None and not c.entering:
        return _after_questions(lambda asks: [ProductScheduler(c, target, own, asks_tiles=asks)], target, name, origins)
    waiting = list(c.waiting) or whole.stores
    workspace = Workspace(name, waiting[0].buffer.device)
    stores = _tile_states(whole, workspace) if chunk is None else _chunk_states(c, chunk, workspace)

    def part(asks: bool) -> list[ProductScheduler]:
        return [ProductScheduler(c, target, own, chunk, steps, asks_tiles=asks, stores=stores)]

    scheduled = _after_questions(part, target, name, origins)
    results = postorder([s.value for s in waiting], into_reductions=False)
    chooses = chunk is not None and any(isinstance(e, Pointwise) and e.op == "where" for e in results)
    domains = dict.fromkeys(s.domain if c.entering else None for s in waiting)  # results of one shape are one kernel
    ends = ([s for s in waiting if domain in (s.domain, None)] for domain in domains)
    tails = [workspace.finish(c.nest, stores, empty_sums=chooses) for stores in ends]
    if chunk is not None:  # every program merges the maxima anew
        shared = frozenset.intersection(*(s.domain for s in waiting))
        tails = [replace(tail, outer=tuple(a for a in tail.classes if a in shared)) for tail in tails]
    first = replace(scheduled.main, name=f"{name}_partial")
    following = finished(first, tails, workspace, target, name)
    kernels = (*scheduled.kernels[:-1], *following.kernels)
    return replace(scheduled, kernels=kernels, workspace=(*scheduled.workspace, *following.workspace))


def _after_questions(
    make: Callable[[bool], list[ProductScheduler]], target: Target, name: str, origins: tuple[Origin, ...]
) -> ScheduledGroup:
    """One kernel, after those that find out what data leaves of its sweeps.

    Conditions are computed for all rows and columns where that takes a small part of the kernel's time, or where less
    of the sweep is expected and the sum is predicted to be lower.
    """

    def built(asks: bool) -> tuple[ScheduledGroup, float]:
        """The kernels, and the time of conditions for all rows and columns."""
        schedulers = make(asks)
        own = [s.build(name, origins) for s in schedulers]
        before = [(k, s.questions.tiled) for s in schedulers for k in s.questions.kernels(target, name, origins)]
        answers = tuple(b for s in schedulers for b in s.questions.buffers)
        kernels = (*(k for k, _ in before), own[0] if len(own) == 1 else joined(own))
        tiled_us = total_us(price(k, target) for k, tiled in before if tiled)
        return ScheduledGroup(kernels, answers, len(before)), tiled_us

    scheduled, asked_us = built(True)
    if asked_us <= MOST_ASKED * price(scheduled.main, target).total_us:
        return scheduled
    plain, _ = built(False)
    less = any(isinstance(s, Loop) and s.part < 1 for s in walk(scheduled.main.body))
    both_us = [total_us(price(k, target) for k in found.kernels) for found in (scheduled, plain)]
    return scheduled if less and both_us[0] < both_us[1] else plain


def _tile_states(part: ProductScheduler, workspace: Workspace) -> list[NestStore]:
    """The stores of a kernel whose tiles leave states.

    The numbers of tiles come first in a buffer of states, so that neighbours along the kept classes are stored and read
    together.
    """
    c = part.c
    stores, classes = [*c.leaving], (*c.grid, c.rows, c.columns)
    for r in c.entering:
        numbers = {part.numbers.get(a, a): a.name for a in classes if a in c.sweeps(r)}
        axes = (*numbers, *(a for a in classes if a not in c.sweeps(r)))
        stores += workspace.leave(r, axes, numbers, follows=c.carried.get(r))
    return stores


# --- a shared-out sweep ---


def _chunk_states(c: Contraction, chunk: Axis, workspace: Workspace) -> list[NestStore]:
    """The states of a chunk of the swept class; of reductions over other classes all chunks have the same."""
    (one,), stores = passes(c), []
    for r in (*one.level, *one.carried, *c.beside):
        axes = (*c.grid, chunk, *(a for a in (c.rows, c.columns) if a in r.axes))
        follows = Carried(one.level[0], one.carried[r]) if r in one.carried else None
        stores += workspace.leave(r, axes, {chunk: chunk.name}, alike=r in c.beside, follows=follows)
    return stores


def _chunk(c: Contraction, whole: ProductScheduler, target: Target) -> tuple[Axis | None, Poly]:
    """The number of a chunk of the swept class and its steps; None: the class is not shared out."""
    chunks = _chunks(c, whole, target) if shares_out(c) else 1
    if chunks < 2:
        return None, Poly.ZERO
    steps = (c.swept.extent + whole.tiles.step - 1) // whole.tiles.step
    each = (steps + chunks - 1) // chunks
    if steps.constant is not None and each.constant is not None:
        chunks = -(-steps.constant // each.constant)  # none is empty
    return Axis("chunk", Poly.of(chunks)), each


def _chunks(c: Contraction, whole: ProductScheduler, target: Target) -> int:
    """How many parts of the swept class have programs of their own; 1: it is not shared out.

    A size known at run time may grow: more than one step of the assumed size is shared out over the whole chip.
    """
    steps = -(-estimate(c.swept.extent) // whole.tiles.step)
    if c.reduces_columns:
        return _row_chunks(c, whole, steps, target)
    room = PROGRAMS * target.processors // max(1, whole.programs())
    if c.swept.extent.constant is None:
        return room if steps > 1 else 1
    return min(steps // LEAST_STEPS, room)


def _row_chunks(c: Contraction, whole: ProductScheduler, steps: int, target: Target) -> int:
    """Chunks of columns with which programs come closest to whole rounds of two on every processor; 1: as they are."""
    programs, places = max(1, whole.programs()), 2 * target.processors
    products = numel((*c.grid, c.rows, c.columns)) * sum(estimate(a.extent) for a in c.inner)
    if c.held or products / target.products_per_us * (places / programs - 1) < target.launch_us:
        return 1  # a second kernel takes longer than waiting for the last programs

    def rounds(chunks: int) -> float:
        return -(-programs * chunks // places) * (1 / chunks + 1 / steps)  # each starts its own pipeline

    return min(range(1, max(2, steps // LEAST_STEPS + 1)), key=rounds)


# --- a shared launch ---


def _side_by_side(
    contractions: Sequence[Contraction], target: Target, tiles: Sequence[Tiles], asks: bool
) -> list[ProductScheduler]:
    """One kernel of several. They agree on warps, stages, whether programs stay, and the width of offsets."""
    schedulers: list[ProductScheduler] = []
    for c, own in zip(contractions, tiles, strict=True):
        company = schedulers[0] if schedulers else None
        schedulers.append(ProductScheduler(c, target, own, company=company, asks_tiles=asks))
    warps, stages = max(t.warps for t in tiles), min(t.stages for t in tiles)
    resident, wide = all(t.resident for t in tiles), any(s.wide for s in schedulers)
    for s in schedulers:
        s.tiles = replace(s.tiles, warps=warps, stages=stages, resident=resident)
        s.wide = wide
    return schedulers
