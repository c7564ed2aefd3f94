"""A part of a program as a program of its own: what a region computes, planned in two ways.

What it reads from outside are inputs of the same layout, what others want are outputs. Statements and buffers are
those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..analysis.inline import loaded
from ..ir.poly import Poly, Symbol
from ..ir.program import Buffer, Define, Extern, HostValue, Program, View
from .groups import things
from .regions import Region, Regions


def both_ways(
    program: Program, together: Region, apart: Sequence[Region], wanted: Sequence[Buffer], given: set[Define]
) -> tuple[Regions, Regions]:
    """The part that `together` computes: as this one region, and with the kernels of `apart` only.

    `wanted`: what others read of it. `given`: what it computes again and others store anyway, so that without this
    region it is read.
    """
    inside = {*together.members, *together.again}
    read = given - {d for r in apart for d in (*r.members, *r.again)}
    return _part(program, inside, [together], wanted), _part(program, inside - read, apart, wanted)


def _part(program: Program, inside: set[Define], regions: Sequence[Region], wanted: Sequence[Buffer]) -> Regions:
    """Those statements alone, products that are in no region by the library."""
    kernels = {d for r in regions for d in r.members}
    statements: list[Define | Extern] = []
    for s in program.statements:
        match s:
            case Define() if s in inside:
                statements.append(s)
            case Extern(contraction=Define() as product) if product in inside:
                statements.append(product if product in kernels else s)
    made = {s.buffer if isinstance(s, Define) else s.result for s in statements}
    read = dict.fromkeys(b for s in statements for b in _read(s) if b not in made)
    sizes = dict.fromkeys((*(i for i in program.inputs if isinstance(i, Symbol)), *program.symbol_sources))
    outputs = tuple(View(b, b.shape, b.strides, Poly.ZERO) for b in wanted)
    return Regions(Program((*sizes, *read), tuple(statements), outputs), tuple(regions), ())


def _read(statement: Define | Extern) -> Iterable[Buffer | HostValue]:
    return loaded(statement.value) if isinstance(statement, Define) else things((statement.args, statement.kwargs))
