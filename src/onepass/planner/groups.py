"""The group graph: which defines are together now, who depends on whom, and what each group stores.

Nodes are groups of defines and externs, numbered by program position; edges run from producer to
consumer. Merging keeps the graph acyclic; `reaches_around` is the test.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from ..analysis.inline import Inliner, Memo, loaded, read_by
from ..ir.plan import Store
from ..ir.program import Buffer, Define, Extern, Program, Update, buffers_in
from .links import Links


class GroupGraph(Links):
    """Mutable state of one planning run."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.program = program
        self.members: dict[int, list[Define]] = {}
        self.externs: dict[int, Extern] = {}
        self.consumers: dict[Buffer, set[int]] = {}  # nodes that load a buffer, its own group excluded
        self.required = {*buffers_in(program.outputs), *program.kept}  # must exist in memory
        self.reads: dict[Define, tuple[Buffer, ...]] = {}
        self.memo = Memo()
        self.positions = {s: k for k, s in enumerate(program.statements) if isinstance(s, Define)}
        for number, s in enumerate(program.statements):
            buffers = [b for b in read_by(s) if isinstance(b, Buffer)]
            if isinstance(s, Define):
                self.members[number], self.reads[s] = [s], loaded(s.value)
            else:
                self.required.update(buffers)
            if isinstance(s, Extern):
                self.externs[number] = s
            if not isinstance(s, Update):
                for buffer in buffers:
                    self.consumers.setdefault(buffer, set()).add(number)

    def merge(self, a: int, b: int) -> None:
        """Group b joins group a; what one of them only computed again may be the other's own."""
        super().merge(a, b)
        both = dict.fromkeys((*self.members[a], *self.members.pop(b)))
        self.members[a] = sorted(both, key=self.order)
        for d in self.members[a]:
            if self.node_of.get(d.buffer) == b:
                self.node_of[d.buffer] = a
        for d in self.members[a]:
            for buffer in self.reads[d]:
                users = self.consumers.get(buffer, set())
                if b in users:
                    users.discard(b)
                    users.add(a)

    def join(self, members: Iterable[Define], again: Iterable[Define]) -> int:
        """Members become one group, which also computes `again`, values that belong to others; its number."""
        again = list(again)
        last = super().join(members, again)
        own = {d.buffer for d in self.members[last]}
        added = [d for d in again if d.buffer not in own]
        made = own | {d.buffer for d in added}
        self.members[last] = sorted([*self.members[last], *added], key=self.order)
        for d in added:
            self.consumers.get(d.buffer, set()).discard(last)
        for buffer in {b for d in self.members[last] for b in self.reads[d]} - made:
            self.consumers.setdefault(buffer, set()).add(last)
        return last

    def renew_edges(self, number: int) -> None:
        """A group comes after the makers of what it reads, and of nothing else."""
        own = {d.buffer for d in self.members[number]}
        self.renew(number, {b for d in self.members[number] for b in self.reads[d]} - own)

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

    def remove_unread(self, kept: Set[int]) -> None:
        """What only kernels that compute it again would read is not made."""
        for number in sorted(self.members.keys() - kept, reverse=True):
            if not any(self.consumers.get(d.buffer) or d.buffer in self.required for d in self.members[number]):
                self.remove(number)

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
