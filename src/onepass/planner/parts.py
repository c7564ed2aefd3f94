"""A part of a program as a program of its own: what a region computes, planned in two ways.

What it reads from outside are inputs of the same layout, what others want are outputs. Statements and buffers are
those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..analysis.inline import loaded
from ..ir.poly import Poly, Symbol
from ..ir.program import Buffer, Define, Extern, HostValue, Program, View
from .links import things
from .regions import Region, Regions


class Parts:
    """The parts of one program."""

    def __init__(self, program: Program) -> None:
        self._sizes = dict.fromkeys((*(i for i in program.inputs if isinstance(i, Symbol)), *program.symbol_sources))
        self._place: dict[Define, int] = {}
        self._library: dict[Define, Extern] = {}
        for number, s in enumerate(program.statements):
            match s:
                case Define():
                    self._place[s] = number
                case Extern(contraction=Define() as product):
                    self._place[product], self._library[product] = number, s

    def both_ways(
        self, together: Sequence[Region], apart: Sequence[Region], wanted: Sequence[Buffer], given: set[Define]
    ) -> tuple[Regions, Regions]:
        """The part that `together` computes: as these regions, and with the kernels of `apart` only.

        `wanted`: what others read of it. `given`: what it computes again and others store anyway, so that without
        these regions it is read.
        """
        inside = {d for r in together for d in (*r.members, *r.again)}
        read = given - {d for r in apart for d in (*r.members, *r.again)}
        return self._part(inside, together, wanted), self._part(inside - read, apart, wanted)

    def _part(self, inside: set[Define], regions: Sequence[Region], wanted: Sequence[Buffer]) -> Regions:
        """These definitions alone, products that are in no region by the library."""
        kernels = {d for r in regions for d in (*r.members, *r.again)}
        ordered = sorted(inside, key=self._place.__getitem__)
        statements = tuple(d if d in kernels else self._library.get(d, d) for d in ordered)
        made = {d.buffer for d in inside}
        read = dict.fromkeys(b for s in statements for b in _read(s) if b not in made)
        outputs = tuple(View(b, b.shape, b.strides, Poly.ZERO) for b in wanted)
        return Regions(Program((*self._sizes, *read), statements, outputs), tuple(regions), ())


def _read(statement: Define | Extern) -> Iterable[Buffer | HostValue]:
    return loaded(statement.value) if isinstance(statement, Define) else things((statement.args, statement.kwargs))
