"""Random words drawn a strip at a time: one Philox call gives four consecutive words.

Where a vector loop draws words whose index runs with the loop, the loop becomes a strip and its words
are made together before each tile. The words are the same either way.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.kernel import FillRandom, Let, Local, Loop, RandomWord, ReadLocal, Statement, Var, rewritten
from ..ir.poly import Axis, Poly, Symbol
from .builder import Builder

LANES = 64


def draw_in_strips(body: tuple[Statement, ...], builder: Builder) -> tuple[Statement, ...]:
    """The statements with every vector loop that draws consecutive words rewritten."""
    return rewritten(body, lambda s: _drawn(s, builder) if isinstance(s, Loop) and s.kind != "sweep" else s)


def _drawn(loop: Loop, builder: Builder) -> Loop:
    inside = {s.var.name for s in loop.body if isinstance(s, Let | RandomWord)}
    draws = [s for s in loop.body if isinstance(s, RandomWord) and _consecutive(s, loop.axis, inside)]
    if not draws or (loop.extent.constant is not None and loop.extent.constant < LANES):
        return loop
    lanes = loop.lanes if loop.kind == "strip" else LANES
    lane = loop.lane or Axis(builder.name("lane"), Poly.of(lanes))
    start = {loop.axis: Symbol(f"{loop.axis.name}_at").poly()}
    prologue: list[Statement] = []
    replaced: dict[RandomWord, Statement] = {}
    for draw in draws:
        local = Local(builder.name("words"), DType.U32, lanes)
        builder.locals.append(local)
        prologue.append(FillRandom(local, draw.seed, draw.stream, draw.index.substitute(start)))
        replaced[draw] = ReadLocal(draw.var, local, lane.poly())
    body = tuple(replaced.get(s, s) if isinstance(s, RandomWord) else s for s in loop.body)
    return replace(loop, kind="strip", lanes=lanes, lane=lane, body=body, prologue=tuple(prologue))


def _consecutive(draw: RandomWord, axis: Axis, inside: set[str]) -> bool:
    coefficient = draw.index.coefficient(axis)
    if coefficient is None or coefficient.constant != 1:
        return False
    varying = {a.name for a in draw.index.atoms() if isinstance(a, Symbol)}
    return not (varying & inside) and not (isinstance(draw.seed, Var) and draw.seed.name in inside)
