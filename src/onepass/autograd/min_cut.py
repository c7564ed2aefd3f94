"""The cheapest cut of a directed graph with capacities, by Dinic's algorithm.

Graphs have thousands of nodes and short paths; networkx takes a second for what is done here in a tenth.
"""

from __future__ import annotations

import math
from collections import deque


class Network:
    """Numbered nodes, 0 the source and 1 the sink, and edges with capacities."""

    def __init__(self) -> None:
        self.edges: list[list[int]] = [[], []]  # of each node; edge k ^ 1 is edge k turned around
        self.ends: list[int] = []
        self.room: list[float] = []

    def node(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def edge(self, start: int, end: int, capacity: float) -> int:
        for a, b, room in ((start, end, capacity), (end, start, 0.0)):
            self.edges[a].append(len(self.ends))
            self.ends.append(b)
            self.room.append(room)
        return len(self.ends) - 2

    def cut(self) -> list[bool]:
        """Of each node whether it is on the sink's side. A cut must exist that goes through no endless edge."""
        room, ends, edges = self.room, self.ends, self.edges
        while (levels := self._levels())[1] >= 0:
            left = [len(e) for e in edges]  # edges of each node that may still lead on
            path: list[int] = []
            while True:
                at = ends[path[-1]] if path else 0
                if at == 1:
                    flow = min(room[k] for k in path)
                    if flow == math.inf:
                        raise ValueError("no cut: a path that nothing may interrupt")
                    first = len(path)
                    for n, k in enumerate(path):
                        room[k] -= flow
                        room[k ^ 1] += flow
                        if room[k] <= 0 and n < first:
                            first = n
                    del path[first:]
                    continue
                own = edges[at]
                while left[at] and not (
                    room[own[left[at] - 1]] > 0 and levels[ends[own[left[at] - 1]]] == levels[at] + 1
                ):
                    left[at] -= 1
                if left[at]:
                    path.append(own[left[at] - 1])
                elif path:
                    path.pop()
                    left[ends[path[-1]] if path else 0] -= 1
                else:
                    break
        return [level < 0 for level in levels]

    def _levels(self) -> list[int]:
        """The fewest edges with room that lead from the source to each node; -1: none do."""
        levels = [-1] * len(self.edges)
        levels[0] = 0
        queue = deque([0])
        while queue:
            at = queue.popleft()
            for k in self.edges[at]:
                end = self.ends[k]
                if levels[end] < 0 and self.room[k] > 0:
                    levels[end] = levels[at] + 1
                    queue.append(end)
        return levels
