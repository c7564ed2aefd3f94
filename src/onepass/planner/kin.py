"""Definitions of one kind that do not wait for each other: their groups will share a launch.

Such a group does not save a launch of its own when it joins another one. Which they are is known before any group is:
those that compute the same, sizes left out, as many steps after the inputs.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..analysis.words import words
from ..ir.program import Define
from ..ir.target import Target
from .groups import GroupGraph

MOSTLY_LAUNCHING = 1.5  # times a launch: up to here a kernel waits more than it works
MANY = 8  # of a kind, from which they are taken to share a launch


class Kin:
    """How many of its kind every definition has."""

    def __init__(self, graph: GroupGraph, target: Target) -> None:
        self.graph, self.target = graph, target
        depth: dict[int, int] = {}
        for n in sorted(graph.predecessors):
            depth[n] = 1 + max((depth.get(p, 0) for p in graph.predecessors[n]), default=0)
        kinds: dict[Hashable, list[Define]] = {}
        for n, members in graph.members.items():
            for d in members if len(members) == 1 else ():
                kinds.setdefault((depth[n], words([d.value])), []).append(d)
        self.count = {d: len(same) for same in kinds.values() if len(same) >= MANY for d in same}

    def of(self, number: int) -> int:
        """How many groups like this one there are."""
        return min(self.count.get(d, 1) for d in self.graph.members[number])

    def shared_us(self, number: int, time_us: float) -> float:
        """What is not saved by a group less: a shared launch has it, and its programs wait while others run."""
        return min(time_us, MOSTLY_LAUNCHING * self.target.launch_us) * (1 - 1 / self.of(number))
