"""A part of a program as a program of its own: what a region computes, planned in two ways.

What it reads from outside are inputs of the same layout, what others want are outputs. Statements and buffers are
those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..analysis.inline import read_by
from ..ir.poly import Poly, Symbol
from ..ir.program import Buffer, Define, Program, View
from .regions import Region, Regions


def both_ways(
    program: Program,
    ordered: Callable[[Iterable[Define]], tuple[Define, ...]],
    ways: tuple[Sequence[Region], Sequence[Region]],
    wanted: Sequence[Buffer],
    given: set[Define],
) -> tuple[Regions, Regions]:
    """The part of a program that regions compute: as these regions, and with other kernels only (`ways`).

    `ordered`: definitions and products in order. `wanted`: what others read of the part. `given`: what it computes
    again and others store anyway, so that without these regions it is read.
    """
    inside, kernels = ({d for r in regions for d in (*r.members, *r.again)} for regions in ways)
    parts = inside, inside - (given - kernels)
    together, apart = (_part(program, ordered(p), w, wanted) for p, w in zip(parts, ways, strict=True))
    return together, apart


def _part(program: Program, inside: Sequence[Define], regions: Sequence[Region], wanted: Sequence[Buffer]) -> Regions:
    """These definitions alone, products that are in no region by the library."""
    kernels = {d for r in regions for d in (*r.members, *r.again)}
    library = {s.contraction: s for s in program.externs()}
    statements = tuple(d if d in kernels else library.get(d, d) for d in inside)
    made = {d.buffer for d in inside}
    read = dict.fromkeys(b for s in statements for b in read_by(s) if b not in made)
    sizes = dict.fromkeys((*(i for i in program.inputs if isinstance(i, Symbol)), *program.symbol_sources))
    outputs = tuple(View(b, b.shape, b.strides, Poly.ZERO) for b in wanted)
    kept = {b: origin for b, origin in program.kept.items() if b in made}
    return Regions(Program((*sizes, *read), statements, outputs, kept=kept), tuple(regions), ())
