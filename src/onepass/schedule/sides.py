"""Comparisons of positions in a tile program: rows on one side, columns on the other.

`i - j >= 0` would hold a tile of differences in registers through a loop; `i >= j` holds a row and a column.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import kernel as ir
from ..ir.poly import Poly

_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_NONE: frozenset[str] = frozenset()


def separate_sides(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """The statements with every comparison of two positions arranged."""
    return _Walk().block(body, {}, ())


class _Walk:
    """Goes through a body in order and knows the tile axes that every name varies over."""

    def __init__(self) -> None:
        self.along: dict[str, frozenset[str]] = {}

    def block(
        self, body: tuple[ir.Statement, ...], dims: dict[str, int], counters: tuple[str, ...]
    ) -> tuple[ir.Statement, ...]:
        """`dims`: the dimension of each open tile axis; `counters`: the axes of the open loops."""
        dims, result = dict(dims), list[ir.Statement]()
        for s in body:
            match s:
                case ir.Loop():
                    s = replace(s, body=self.block(s.body, dims, (*counters, s.axis.name)))
                case ir.When() | ir.Share():
                    s = replace(s, body=self.block(s.body, dims, counters))
                case ir.Tile():
                    others = len(dims.keys() - {s.axis.name})
                    dims[s.axis.name] = others if s.dim is None else s.dim
                    self.along[s.axis.name] = frozenset((s.axis.name,))
                case ir.Let() if s.op in _COMPARISONS:
                    s = replace(s, args=self.sides(s.args, dims, counters))
            self.define(s)
            result.append(s)
        return tuple(result)

    def define(self, s: ir.Statement) -> None:
        match s:
            case ir.Let() | ir.LoadElement() | ir.LoadTile() | ir.RandomWord():
                self.along[s.var.name] = self.axes(*ir.reads(s))
            case ir.ReadLocal():
                self.along[s.var.name] = frozenset(a.name for a in s.local.tiles)
            case ir.Advance():
                own = () if s.accumulator is None else s.accumulator.tiles
                along = self.axes(*s.inputs).union(a.name for a in (*own, s.along) if a is not None)
                self.along |= {v.name: along for v in s.parts}
            case ir.Fold():
                left = self.axes(*s.inputs) - {a.name for a in s.over}
                self.along |= {v.name: left for v in s.parts}
            case ir.Finish():
                left = frozenset(a.name for a in s.accumulator.tiles if a not in s.accumulator.folded)
                self.along |= {v.name: left for v in s.parts}

    def axes(self, *operands: ir.Operand) -> frozenset[str]:
        """The tile axes that operands together vary over."""
        return _NONE.union(*(self.along.get(name, _NONE) for name in ir.names(operands)))

    def sides(
        self, args: tuple[ir.Operand, ...], dims: dict[str, int], counters: tuple[str, ...]
    ) -> tuple[ir.Operand, ...]:
        """Where a side varies along several tile axes, the last of them and the loops' counters go to the right."""
        places = [place for a in args if (place := ir.place_of(a)) is not None]
        if len(places) != 2 or all(len(self.axes(p)) < 2 for p in places):
            return args
        moving = places[0] - places[1]
        last = max(self.axes(moving), key=lambda name: dims[name], default="")
        names = {last, *counters}
        right = Poly(tuple((m, c) for m, c in moving.terms if any(a.poly().names() & names for a in m)))
        apart = self.axes(right) == frozenset((last,)) and last not in self.axes(moving - right)
        return (moving - right, -right) if apart else args
