"""Equal steps of a graph: runs of operations that repeat, each reading the next positions of the same tensors.

In: dynamo's graph, in which a Python loop over time is written out. Out: candidates, and of each a `Loop` if its steps
are one step: every operand is the same tensor in all steps, or a result of the own step, or one of the step before, or
a position of a tensor that moves by the same distance from step to step. Anything else ends the loop.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

FEWEST_STEPS = 4
REPEATS = 4  # of one operation in a step, for its distance to say how long a step is

Entry: TypeAlias = int | slice | None
Index: TypeAlias = tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Positions of a tensor. `form`: what is read, without the positions, which are numbers in `form`'s places."""

    base: Node
    form: tuple[object, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Same:
    """A result of the own step."""

    number: int


@dataclass(frozen=True, slots=True)
class Before:
    """A result of the step before; `first`: what the first step has in its place."""

    number: int
    first: Node


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value from outside that all steps have."""

    node: Node


@dataclass(frozen=True, slots=True)
class Series:
    """A position of a tensor: in step k that of the first step, moved by k * `stride` in the place `moving`."""

    reading: Reading
    moving: int
    stride: int


Operand: TypeAlias = Same | Before | Fixed | Series


@dataclass(frozen=True, slots=True)
class Loop:
    """Equal steps: their nodes, and where the operands of each node come from."""

    steps: list[list[Node]]
    operands: list[list[Operand]]

    @property
    def count(self) -> int:
        return len(self.steps)

    @property
    def carries(self) -> dict[int, Node]:
        """The results that the next step reads, with what the first step has in their place."""
        return {o.number: o.first for sources in self.operands for o in sources if isinstance(o, Before)}


def value_of(node: Node) -> Any:
    """The fake value that dynamo traced a node with."""
    return node.meta.get("example_value")


# --- reads of one position ---


def reading(node: Node) -> Reading | None:
    """The node as a read of single positions of a tensor, else None."""
    found = _index(node)
    if found is None:
        return None
    base, index = found
    form, positions = list[object](), list[int]()
    value = value_of(base)
    if not isinstance(value, Tensor):
        return None
    dims = iter(range(value.ndim))
    for entry in index:
        if entry is None:
            form.append("new")
            continue
        size = value.shape[next(dims)]
        if not isinstance(size, int):
            return None
        match entry:
            case int():
                form.append("one")
                positions.append(entry % size if size else 0)
            case slice(start=int(low), stop=int(high), step=None | 1) if high - low == 1 and low >= 0:
                form.append("kept")
                positions.append(low)
            case slice():
                form.append((entry.start, entry.stop, entry.step))
    return Reading(base, tuple(form), tuple(positions)) if positions else None


def _index(node: Node) -> tuple[Node, Index] | None:
    """The tensor that a node reads, and at which index, with an entry for every dimension."""
    args = node.args
    if node.kwargs or not args or not isinstance(base := args[0], Node):
        return None
    value = value_of(base)
    match node.target, args[1:]:
        case operator.getitem, (int(k),) if isinstance(value, tuple | list):
            return _part(base, k)
        case operator.getitem, (given,) if isinstance(value, Tensor):
            entries = given if isinstance(given, tuple) else (given,)
        case (("select" | torch.select), (int(dim), int(k))) if isinstance(value, Tensor):
            entries = (*_all(dim % value.ndim), k)
        case (("narrow" | torch.narrow), (int(dim), int(k), 1)) if isinstance(value, Tensor):
            entries = (*_all(dim % value.ndim), slice(k, k + 1))
        case _:
            return None
    if not all(e is None or e is Ellipsis or type(e) is int or _is_plain(e) for e in entries):
        return None
    rest = _all(value.ndim - sum(e is not None and e is not Ellipsis for e in entries))
    if (at := next((k for k, e in enumerate(entries) if e is Ellipsis), None)) is None:
        return base, (*entries, *rest)
    return base, (*entries[:at], *rest, *entries[at + 1 :])


def _part(base: Node, k: int) -> tuple[Node, Index] | None:
    """The index of one of the tensors that `unbind` gives."""
    unbinds = base.target in ("unbind", torch.unbind) and not base.kwargs
    if not unbinds or not base.args or not isinstance(source := base.args[0], Node):
        return None
    whole, dim = value_of(source), (*base.args, 0)[1]
    if not isinstance(whole, Tensor) or not isinstance(dim, int):
        return None
    dim %= whole.ndim
    return source, (*_all(dim), k, *_all(whole.ndim - dim - 1))


def _all(count: int) -> Index:
    return (slice(None),) * count


def _is_plain(entry: object) -> bool:
    return isinstance(entry, slice) and all(
        part is None or type(part) is int for part in (entry.start, entry.stop, entry.step)
    )


# --- candidates ---


def loops(graph: Graph) -> Iterator[Loop]:
    """Loops that pass a value on from step to step, those of the shortest steps first.

    What a loop reads is looked up when it is asked for: the loops before it may have been rewritten.
    """
    readings = {n: r for n in graph.nodes if n.op.startswith("call") and (r := reading(n)) is not None}
    positions = defaultdict[object, set[tuple[int, ...]]](set)
    for r in readings.values():
        positions[r.base, r.form].add(r.positions)
    series = {n for n, r in readings.items() if len(positions[r.base, r.form]) >= FEWEST_STEPS}
    nodes = [n for n in graph.nodes if n.op.startswith("call") and n not in series]
    numbers = dict[object, int]()
    kinds = [numbers.setdefault(_kind(n), len(numbers)) for n in nodes]
    taken = [False] * len(nodes)
    for period in _periods(kinds):
        for start, length in _stretches(kinds, period):
            if any(taken[start : start + length]):
                continue
            stretch = nodes[start : start + length]
            while (loop := _loop_of(stretch, period)) is not None:  # another may follow at once
                taken[start : start + length] = [True] * length
                stretch = stretch[stretch.index(loop.steps[-1][-1]) + 1 :]
                yield loop


def _stretches(kinds: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """Where operations repeat after so many: the first, and how many."""
    start = 0
    while start + period < len(kinds):
        end = start
        while end + period < len(kinds) and kinds[end] == kinds[end + period]:
            end += 1
        if (length := end - start + period) >= FEWEST_STEPS * period:
            yield start, length
        start = end + 1


def _kind(node: Node) -> object:
    """What steps have in common: equal for operations that differ in the tensors they read."""
    form = map_arg((node.args, node.kwargs), lambda n: None)
    value = value_of(node)
    shape = (value.dtype, str(value.shape)) if isinstance(value, Tensor) else type(value)
    return node.op, node.target, repr(form), shape


def _periods(kinds: Sequence[int]) -> list[int]:
    """Distances at which operations recur often, shortest first."""
    places = defaultdict[int, list[int]](list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    found = Counter[int]()
    for at in places.values():
        for apart in range(1, REPEATS + 1):
            if len(at) >= FEWEST_STEPS * apart:
                found.update(b - a for a, b in zip(at, at[apart:], strict=False))
    return sorted(period for period, count in found.items() if count >= FEWEST_STEPS - 1)


# --- steps that are one step ---


def _loop_of(nodes: list[Node], period: int) -> Loop | None:
    """The longest loop that begins in the first step of a stretch, at whichever of its nodes."""
    best: Loop | None = None
    for start in range(min(period, len(nodes) - FEWEST_STEPS * period + 1)):
        count = (len(nodes) - start) // period
        steps = [nodes[start + k * period : start + (k + 1) * period] for k in range(count)]
        found = _matched(steps)
        if found is not None and found.carries and (best is None or found.count > best.count):
            best = found
        if best is not None and best.count >= count - 1:
            break
    return best


def _matched(steps: list[list[Node]]) -> Loop | None:
    """The loop of as many of the first steps as are one step."""
    places = {n: (k, j) for k, step in enumerate(steps) for j, n in enumerate(step)}
    columns = [[_leaves(step[j]) for step in steps] for j in range(len(steps[0]))]
    count = len(steps)
    for column in columns:
        for slot in range(len(column[0])):
            operands = [leaves[slot] for leaves in column[:count]]
            count = min(count, _agreeing(operands, places))
            if count < FEWEST_STEPS:
                return None
    operands = []
    for column in columns:
        found = [_source([leaves[slot] for leaves in column[:count]], places) for slot in range(len(column[0]))]
        if any(f is None for f in found):
            return None
        operands.append([f for f in found if f is not None])
    return Loop(steps[:count], operands)


def _leaves(node: Node) -> list[Node]:
    """The nodes among a node's arguments, in order, each as often as it is there."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def _agreeing(nodes: Sequence[Node], places: dict[Node, tuple[int, int]]) -> int:
    """How many of the first steps have an operand from the same source."""
    most = 0
    for rule in _RULES:
        most = max(most, rule(nodes, places))
        if most == len(nodes):
            break
    return most


def _fixed(nodes: Sequence[Node], places: dict[Node, tuple[int, int]]) -> int:
    if nodes[0] in places:
        return 0
    return next((k for k, n in enumerate(nodes) if n is not nodes[0]), len(nodes))


def _same(nodes: Sequence[Node], places: dict[Node, tuple[int, int]]) -> int:
    number = places.get(nodes[0], (0, -1))[1]
    return next((k for k, n in enumerate(nodes) if places.get(n) != (k, number)), len(nodes))


def _before(nodes: Sequence[Node], places: dict[Node, tuple[int, int]]) -> int:
    if nodes[0] in places or nodes[1] not in places:
        return 0
    number = places[nodes[1]][1]
    return next((k for k, n in enumerate(nodes) if k and places.get(n) != (k - 1, number)), len(nodes))


def _moving(nodes: Sequence[Node], places: dict[Node, tuple[int, int]]) -> int:
    if nodes[0] in places or (series := _series(nodes)) is None:
        return 0
    return next((k for k, n in enumerate(nodes) if reading(n) != _at(series, k)), len(nodes))


_RULES: tuple[Callable[[Sequence[Node], dict[Node, tuple[int, int]]], int], ...] = (_fixed, _same, _before, _moving)


def _series(nodes: Sequence[Node]) -> Series | None:
    """The positions that the first two nodes read, if one of them moves."""
    first, second = reading(nodes[0]), reading(nodes[1])
    if first is None or second is None or (first.base, first.form) != (second.base, second.form):
        return None
    steps = [b - a for a, b in zip(first.positions, second.positions, strict=True)]
    moving = [k for k, step in enumerate(steps) if step]
    return Series(first, moving[0], steps[moving[0]]) if len(moving) == 1 else None


def _at(series: Series, k: int) -> Reading:
    positions = list(series.reading.positions)
    positions[series.moving] += k * series.stride
    return Reading(series.reading.base, series.reading.form, tuple(positions))


def _source(nodes: Sequence[Node], places: dict[Node, tuple[int, int]]) -> Operand | None:
    """Where an operand comes from in all steps."""
    number = len(nodes)
    if _fixed(nodes, places) == number:
        return Fixed(nodes[0])
    if _same(nodes, places) == number:
        return Same(places[nodes[0]][1])
    if _before(nodes, places) == number:
        return Before(places[nodes[1]][1], nodes[0])
    return _series(nodes) if _moving(nodes, places) == number else None
