"""Vector loops that become strips: a sweep over tiles of lanes, with work that is done once for each tile.

Random words: one Philox call gives four consecutive words, so those of a tile are made together before it. The words
are the same either way. Large results: a tile is gathered in a small local and leaves past the caches. A line is then
not read before it is overwritten, which saves a third of the traffic of a copy. Scans: what lanes do before and after
one state goes through them, they do at once.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.access import storage_bytes
from ..ir import kernel as ir
from ..ir.dtypes import DType
from ..ir.poly import Axis, Poly, Symbol
from ..ir.target import Target
from .builder import Builder

LANES = 64


def in_strips(body: tuple[ir.Statement, ...], builder: Builder, target: Target) -> tuple[ir.Statement, ...]:
    """The statements with every vector loop as a strip that draws consecutive words or stores large results."""
    body = ir.rewritten(body, lambda s: _drawn(s, builder) if isinstance(s, ir.Loop) and s.kind != "sweep" else s)
    body = ir.rewritten(
        body, lambda s: _staged(s, builder, target) if isinstance(s, ir.Loop) and s.kind != "sweep" else s
    )
    return ir.rewritten(body, lambda s: _in_turn(s, builder) if isinstance(s, ir.Loop) and s.kind != "sweep" else s)


def _drawn(loop: ir.Loop, builder: Builder) -> ir.Loop:
    """The loop with the random words of each tile made together."""
    inside = {s.var.name for s in loop.body if isinstance(s, ir.Let | ir.RandomWord)}
    draws = [s for s in loop.body if isinstance(s, ir.RandomWord) and _consecutive(s, loop.axis, inside)]
    if not draws or (loop.extent.constant is not None and loop.extent.constant < LANES):
        return loop
    strip, lane = _strip(loop, builder)
    start = {loop.axis: Symbol(f"{loop.axis.name}_at").poly()}
    prologue: list[ir.Statement] = []
    replaced: dict[str, ir.Statement] = {}
    for draw in draws:
        local = ir.Local(builder.name("words"), DType.U32, strip.lanes)
        builder.locals.append(local)
        prologue.append(ir.FillRandom(local, draw.seed, draw.stream, draw.index.substitute(start)))
        replaced[draw.var.name] = ir.ReadLocal(draw.var, local, lane.poly())
    body = tuple(replaced.get(s.var.name, s) if isinstance(s, ir.RandomWord) else s for s in loop.body)
    return replace(strip, body=body, prologue=tuple(prologue))


def _staged(loop: ir.Loop, builder: Builder, target: Target) -> ir.Loop:
    """The loop with its large contiguous results leaving tile by tile."""
    stores = [s for s in loop.body if isinstance(s, ir.StoreElement) and _streams(s, loop.axis, target)]
    short = loop.extent.constant is None or loop.extent.constant < LANES
    if not stores or short or (loop.kind == "strip" and loop.lanes < LANES // 2):
        return loop
    strip, _ = _strip(loop, builder)
    replaced: dict[ir.StoreElement, ir.Statement] = {}
    for s in stores:
        stored = DType.U8 if s.buffer.dtype is DType.BOOL else s.buffer.dtype  # as in memory
        local = ir.Local(builder.name("leaving"), stored, strip.lanes)
        builder.locals.append(local)
        replaced[s] = replace(s, staged=local)
    return replace(strip, body=tuple(replaced.get(s, s) if isinstance(s, ir.StoreElement) else s for s in loop.body))


def _in_turn(loop: ir.Loop, builder: Builder) -> ir.Loop:
    """The loop in stages, where one state goes through its lanes: odd stages advance it, lane by lane.

    Values that a later stage needs wait in locals. Stores come last: no lane may read what another has overwritten.
    """
    turns = {id(s) for s in loop.body if isinstance(s, ir.Advance) and not s.lane.axes & {loop.axis, loop.lane}}
    if not turns:
        return loop
    strip, lane = _strip(loop, builder)
    stages: dict[str, int] = {}
    placed: list[tuple[int, ir.Statement]] = []
    for s in strip.body:
        stage = max([0, *(stages.get(name, 0) for name in ir.names(ir.reads(s)))])
        stage += stage % 2 == 0 if id(s) in turns else stage % 2
        stages |= {v.name: stage for v in ir.defined(s)}
        placed.append((stage, s))
    last = max(stage + stage % 2 for stage, _ in placed)
    placed = [(last if isinstance(s, ir.StoreElement) else stage, s) for stage, s in placed]
    bodies: list[list[ir.Statement]] = [[] for _ in range(last + 1)]
    rows: dict[str, ir.Local] = {}
    for stage, s in placed:
        for k in range(stage + 1, last + 1):
            later = [x for n, x in placed if n == k]
            for v in ir.defined(s):
                if v.name in ir.names(o for x in later for o in ir.reads(x)):
                    rows.setdefault(v.name, ir.Local(builder.name("turn"), v.dtype, strip.lanes))
                    bodies[k].append(ir.ReadLocal(v, rows[v.name], lane.poly()))
    for stage, s in placed:
        bodies[stage].append(s)
        bodies[stage] += [ir.WriteLocal(rows[v.name], lane.poly(), v) for v in ir.defined(s) if v.name in rows]
    builder.locals.extend(rows.values())
    return replace(strip, body=tuple(ir.Stage(tuple(b), bool(k % 2)) for k, b in enumerate(bodies) if b))


def _strip(loop: ir.Loop, builder: Builder) -> tuple[ir.Loop, Axis]:
    """A vector loop as a strip, and the position in its tile."""
    lanes = loop.lanes if loop.kind == "strip" else LANES
    lane = loop.lane or Axis(builder.name("lane"), Poly.of(lanes))
    return replace(loop, kind="strip", lanes=lanes, lane=lane), lane


def _consecutive(draw: ir.RandomWord, axis: Axis, inside: set[str]) -> bool:
    """Whether a draw's index counts up by one along the loop, from a place that is known before it."""
    varying = {a.name for a in draw.index.atoms() if isinstance(a, Symbol)}
    known = not (varying & inside) and not (isinstance(draw.seed, ir.Var) and draw.seed.name in inside)
    return known and draw.index.coefficient(axis) is Poly.ONE


def _streams(store: ir.StoreElement, axis: Axis, target: Target) -> bool:
    """Whether a store is contiguous along the loop and its buffer so large that it would only fill the caches."""
    constant = all(size.constant is not None for size in store.buffer.shape)
    contiguous = store.offset.coefficient(axis) is Poly.ONE
    return store.guard is None and constant and contiguous and storage_bytes(store.buffer) >= target.streamed_bytes
