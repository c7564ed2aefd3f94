"""Loads go before random numbers are drawn: memory answers meanwhile.

A compiler moves loads by itself as far as a barrier, and exchanging random words between threads is one. So within a
stretch of plain statements that draws, each load moves up to what its place depends on; it passes no store, sweep or
reduction.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.kernel import Bind, Let, LoadElement, Loop, RandomWord, Statement, Tile, When, names, reads


def early_loads(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The statements, reordered."""
    result: list[Statement] = []
    defined: dict[str, int] = {}  # where in `result` a name of this stretch becomes known
    floor = 0  # nothing moves above
    for s in body:
        match s:
            case Loop() | When():
                s = replace(s, body=early_loads(s.body))
            case LoadElement():
                needs = names(reads(s))
                place = max([floor, *(defined[n] + 1 for n in needs if n in defined)])
                while place < len(result) and isinstance(result[place], LoadElement | Tile | Bind):
                    place += 1  # loads keep their order
                if not any(isinstance(x, RandomWord) for x in result[place:]):
                    place = len(result)
                result.insert(place, s)
                defined = {n: k + (k >= place) for n, k in defined.items()} | {s.var.name: place}
                continue
        if name := _defines(s):
            defined[name] = len(result)
        else:
            floor, defined = len(result) + 1, {}
        result.append(s)
    return tuple(result)


def _defines(s: Statement) -> str:
    match s:
        case Let() | RandomWord():
            return s.var.name
        case Tile() | Bind():
            return s.axis.name
    return ""
