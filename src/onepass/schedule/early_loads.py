"""Loads go before random numbers are drawn, and before the steps of a scan: memory answers meanwhile.

A compiler moves loads by itself as far as a barrier, and exchanging random words between threads is one. So within a
stretch of plain statements that draws, each load moves up to what its place depends on; it passes no store, sweep or
reduction. Of several steps of a scan in a row, all loads go to the top, past stores to other buffers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.kernel import (
    Advance,
    Bind,
    Let,
    LoadElement,
    Loop,
    RandomWord,
    Statement,
    Tile,
    When,
    defined,
    names,
    reads,
    rewritten,
)
from ..ir.program import Buffer


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


def loads_before_steps(body: tuple[Statement, ...], written: Collection[Buffer]) -> tuple[Statement, ...]:
    """The statements; loops over single steps of scans load all that they can before their first step."""

    def reordered(s: Statement) -> Statement:
        alone = isinstance(s, Loop) and any(isinstance(x, Advance) and x.along is None for x in s.body)
        return replace(s, body=_loads_first(s.body, written)) if isinstance(s, Loop) and alone else s

    return rewritten(body, reordered)


def _loads_first(body: tuple[Statement, ...], written: Collection[Buffer]) -> tuple[Statement, ...]:
    """Loads of what nobody writes, with what their places and conditions are made of, in order; then the rest."""
    first: list[Statement] = []
    rest: list[Statement] = []
    late: set[str] = set()
    for s in body:
        condition = isinstance(s, Let) and s.var.dtype is DType.BOOL
        moves = condition or isinstance(s, Tile | Bind) or (isinstance(s, LoadElement) and s.buffer not in written)
        if moves and not names(reads(s)) & late:
            first.append(s)
            continue
        rest.append(s)
        late |= {v.name for v in defined(s)} | ({s.axis.name} if isinstance(s, Tile | Bind) else set())
    return (*first, *rest)


def _defines(s: Statement) -> str:
    match s:
        case Let() | RandomWord():
            return s.var.name
        case Tile() | Bind():
            return s.axis.name
    return ""
