"""The dependency graph of planning: which steps come after which, steps joined into one included.

A step is a statement of the program, by its number, or several that run as one. Joining steps must keep the graph
free of cycles; `waits` is the test: no step outside may wait for one inside and be waited for by another.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from ..analysis.inline import loaded, read_by
from ..ir.program import Buffer, Define, Extern, HostValue, Program, Update


class Links:
    """Steps and their order; edges run from a producer to its consumers."""

    def __init__(self, program: Program) -> None:
        self.node_of: dict[Buffer | HostValue, int] = {}  # the step that makes it
        self.successors: dict[int, set[int]] = {}
        self.predecessors: dict[int, set[int]] = {}
        self.span: dict[int, tuple[int, int]] = {}  # first and last statement
        self._across = list(range(len(program.statements)))  # the first statement of a step that lies across this one
        ordered: int | None = None
        for number, s in enumerate(program.statements):
            if isinstance(s, Update):
                continue
            self.successors[number], self.predecessors[number] = set(), set()
            self.span[number] = number, number
            self.read(number, read_by(s))
            self.node_of[s.buffer if isinstance(s, Define) else s.result] = number
            if isinstance(s, Extern) and s.ordered and not s.is_wait:
                if ordered is not None:
                    self.edge(ordered, number)
                ordered = number

    def edge(self, first: int, second: int) -> None:
        self.successors[first].add(second)
        self.predecessors[second].add(first)

    def read(self, number: int, buffers: Iterable[Buffer | HostValue]) -> None:
        """A step comes after the makers of what it reads."""
        for producer in self.makers(buffers):
            if producer != number:
                self.edge(producer, number)

    def makers(self, buffers: Iterable[Buffer | HostValue]) -> set[int]:
        """The steps that make buffers; what is given has none."""
        return {self.node_of[b] for b in buffers if b in self.node_of}

    def renew(self, number: int, buffers: Iterable[Buffer | HostValue]) -> None:
        """A step reads these buffers, and nothing else any more."""
        for before in self.predecessors[number]:
            self.successors[before].discard(number)
        self.predecessors[number].clear()
        self.read(number, buffers)

    def merge(self, a: int, b: int) -> None:
        """Step b becomes a part of step a."""
        for s in self.successors.pop(b):
            self.predecessors[s].discard(b)
            if s != a:
                self.edge(a, s)
        for p in self.predecessors.pop(b):
            self.successors[p].discard(b)
            if p != a:
                self.edge(p, a)
        self.successors[a].discard(b)
        self.predecessors[a].discard(b)
        one, other = self.span[a], self.span.pop(b)
        first, last = self.span[a] = min(one[0], other[0]), max(one[1], other[1])
        for k in range(first, last + 1):
            self._across[k] = min(self._across[k], first)

    def join(self, members: Iterable[Define], again: Iterable[Define]) -> int:
        """Members become one step, which also computes `again`, values that belong to others; its number."""
        members = list(members)
        *others, last = sorted({self.node_of[d.buffer] for d in members})
        for number in others:
            self.merge(last, number)
        self.node_of |= {d.buffer: last for d in members}
        self.renew(last, _outside(members, again))
        return last

    def waits(self, steps: Iterable[int], others: Set[int], most: int | None = None) -> bool:
        """Whether one of some steps is among others or must run after one of them.

        `most`: of steps to look at; what has not been decided then counts as waiting.
        """
        first = min(self.span[n][0] for n in others)
        while self._across[first] < first:  # steps that end before this statement wait for none that begins after it
            first = self._across[first]
        stack = [n for n in steps if self.span[n][1] >= first]
        seen = set(stack)
        while stack:
            n = stack.pop()
            if n in others or (most is not None and len(seen) > most):
                return True
            fresh = [p for p in self.predecessors[n] if p not in seen and self.span[p][1] >= first]
            seen.update(fresh)
            stack += fresh
        return False

    def is_cyclic(self, members: Iterable[Define], again: Iterable[Define]) -> bool:
        """Whether a step outside a region waits for it and is waited for by it."""
        members = list(members)
        inside = self.makers(d.buffer for d in members)
        return self.waits(self.makers(_outside(members, again)) - inside, inside)

    def reaches_around(self, a: int, b: int) -> bool:
        """Whether b waits for a through another step: merging them would make a cycle."""
        return self.waits(self.predecessors[b] - {a}, {a})

    def connected(self, a: int, b: int) -> bool:
        """Whether one of two steps waits for the other."""
        return self.waits((a,), {b}) or self.waits((b,), {a})


def _outside(members: Iterable[Define], again: Iterable[Define]) -> set[Buffer]:
    """What a kernel reads that it does not compute."""
    defines = (*members, *again)
    return {b for d in defines for b in loaded(d.value)} - {d.buffer for d in defines}
