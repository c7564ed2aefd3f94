"""The group graph: which defines are together now, who depends on whom, and what each group stores.

Nodes are groups of defines and externs, numbered by program position; edges run from producer to
consumer. Merging keeps the graph acyclic; `reaches_around` is the test.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..analysis.inline import Inliner, Memo, loaded
from ..ir.plan import Store
from ..ir.program import Buffer, Define, Extern, HostValue, Program, Update, View


class GroupGraph:
    """Mutable state of one planning run."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.define_of: dict[Buffer, Define] = {}
        self.members: dict[int, list[Define]] = {}
        self.externs: dict[int, Extern] = {}
        self.node_of: dict[Buffer | HostValue, int] = {}
        self.consumers: dict[Buffer, set[int]] = {}  # nodes that load a buffer, its own group excluded
        self.successors: dict[int, set[int]] = {}
        self.predecessors: dict[int, set[int]] = {}
        self.required: set[Buffer] = set()  # must exist in memory: outputs, externs' arguments, updates
        self.reads: dict[Define, tuple[Buffer, ...]] = {}
        self.span: dict[int, tuple[int, int]] = {}
        self.memo = Memo()
        self.positions = {s: k for k, s in enumerate(program.statements) if isinstance(s, Define)}
        self._read_program(program)

    def _read_program(self, program: Program) -> None:
        last_ordered: int | None = None
        for number, statement in enumerate(program.statements):
            if isinstance(statement, Update):
                self.required.add(statement.source)
                continue
            self.successors[number], self.predecessors[number] = set(), set()
            self.span[number] = (number, number)
            if isinstance(statement, Define):
                self.define_of[statement.buffer] = statement
                self.members[number] = [statement]
                self.node_of[statement.buffer] = number
                self.reads[statement] = loaded(statement.value)
                self._connect(number, self.reads[statement])
                continue
            self.externs[number] = statement
            used = list(things((statement.args, statement.kwargs)))
            self.required.update(b for b in used if isinstance(b, Buffer))
            self.node_of[statement.result] = number
            self._connect(number, used)
            if statement.ordered:
                if last_ordered is not None:
                    self._edge(last_ordered, number)
                last_ordered = number
        self.required.update(b for b in things(program.outputs) if isinstance(b, Buffer))

    def _connect(self, number: int, used: Iterable[Buffer | HostValue]) -> None:
        for thing in used:
            if isinstance(thing, Buffer):
                self.consumers.setdefault(thing, set()).add(number)
            producer = self.node_of.get(thing)
            if producer is not None and producer != number:
                self._edge(producer, number)

    def _edge(self, a: int, b: int) -> None:
        self.successors[a].add(b)
        self.predecessors[b].add(a)

    def reaches_around(self, a: int, b: int) -> bool:
        """Whether b can be reached from a through another node: merging them would make a cycle."""
        limit = self.span[b][1]
        stack = [s for s in self.successors[a] if s != b]
        seen = set(stack)
        while stack:
            node = stack.pop()
            if b in self.successors[node]:
                return True
            for s in self.successors[node]:
                if s not in seen and self.span[s][0] <= limit:
                    seen.add(s)
                    stack.append(s)
        return False

    def connected(self, a: int, b: int) -> bool:
        """Whether any path joins them."""
        return (
            b in self.successors[a] or a in self.successors[b] or self.reaches_around(a, b) or self.reaches_around(b, a)
        )

    def merge(self, a: int, b: int) -> None:
        """Group b joins group a; what one of them only computed again may be the other's own."""
        both = dict.fromkeys((*self.members[a], *self.members.pop(b)))
        self.members[a] = sorted(both, key=lambda d: self.order(d))
        for d in self.members[a]:
            if self.node_of.get(d.buffer) == b:
                self.node_of[d.buffer] = a
        for s in self.successors.pop(b):
            self.predecessors[s].discard(b)
            if s != a:
                self._edge(a, s)
        for p in self.predecessors.pop(b):
            self.successors[p].discard(b)
            if p != a:
                self._edge(p, a)
        self.successors[a].discard(b)
        self.predecessors[a].discard(b)
        low, high = self.span[a], self.span.pop(b)
        self.span[a] = (min(low[0], high[0]), max(low[1], high[1]))
        for d in self.members[a]:
            for buffer in self.reads[d]:
                users = self.consumers.get(buffer, set())
                if b in users:
                    users.discard(b)
                    users.add(a)

    def join(self, members: Iterable[Define], again: Iterable[Define]) -> int:
        """Members become one group, which also computes `again`, values that belong to others; its number."""
        numbers = sorted({self.node_of[d.buffer] for d in members})
        last = numbers[-1]
        for number in numbers[:-1]:
            self.merge(last, number)
        own = {d.buffer for d in self.members[last]}
        added = [d for d in again if d.buffer not in own]
        made = own | {d.buffer for d in added}
        self.members[last] = sorted([*self.members[last], *added], key=self.order)
        for d in added:
            self.consumers.get(d.buffer, set()).discard(last)
        for buffer in {b for d in self.members[last] for b in self.reads[d]} - made:
            self.consumers.setdefault(buffer, set()).add(last)
        self.renew_edges(last)
        return last

    def renew_edges(self, number: int) -> None:
        """A group comes after the makers of what it reads, and of nothing else."""
        own = {d.buffer for d in self.members[number]}
        read = {b for d in self.members[number] for b in self.reads[d]} - own
        for before in self.predecessors[number]:
            self.successors[before].discard(number)
        self.predecessors[number].clear()
        for buffer in read:
            producer = self.node_of.get(buffer)
            if producer is not None and producer != number:
                self._edge(producer, number)

    def remove(self, number: int) -> None:
        """A group that nobody reads any more disappears."""
        for d in self.members.pop(number):
            for buffer in self.reads[d]:
                self.consumers.get(buffer, set()).discard(number)
            if self.node_of.get(d.buffer) == number:
                del self.node_of[d.buffer]
                self.consumers.pop(d.buffer, None)
        for s in self.successors.pop(number):
            self.predecessors[s].discard(number)
        for p in self.predecessors.pop(number):
            self.successors[p].discard(number)
        self.span.pop(number)

    def order(self, define: Define) -> int:
        """The define's position in the program."""
        return self.positions[define]

    def stored(self, members: Iterable[Define], group: frozenset[int]) -> list[Define]:
        """Members that must reach memory if these groups were one; what a group only computes again does not."""
        return [
            d
            for d in members
            if self.node_of.get(d.buffer) in group
            and (d.buffer in self.required or not self.consumers.get(d.buffer, set()) <= group)
        ]

    def stores(self, members: list[Define], group: frozenset[int]) -> tuple[Store, ...]:
        """The stores of a group made of these members, everything else inlined."""
        stored = self.stored(members, group)
        inliner = Inliner({d.buffer: d for d in members}, (d.buffer for d in stored), self.memo)
        return tuple(Store(d.buffer, d.dimensions, inliner.value(d.buffer)) for d in stored)


def things(tree: object) -> Iterable[Buffer | HostValue]:
    """Buffers and host values in an argument tree."""
    match tree:
        case View():
            yield tree.buffer
        case Buffer() | HostValue():
            yield tree
        case list() | tuple():
            for item in tree:
                yield from things(item)
        case dict():
            for item in tree.values():
                yield from things(item)
        case slice():
            yield from things((tree.start, tree.stop, tree.step))
