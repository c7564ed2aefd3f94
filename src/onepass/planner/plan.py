"""`plan_fusion`: which defines share a kernel. One legality function, one ranking function.

First single-use point-wise producers join their reader (always a gain); then a priority queue over
producer-consumer edges and siblings by predicted time saved, re-scoring neighbours only; then what is
left between groups is recomputed where that moves fewer bytes. Every answer keeps its number.
"""

from __future__ import annotations

import heapq
import itertools

from ..analysis.access import numel, storage_bytes, work_of
from ..analysis.inline import is_pointwise, loads_of, reductions
from ..analysis.nest import Refusal
from ..ir.expr import Load, postorder
from ..ir.plan import Decision, FusionPlan, Group, Store
from ..ir.program import Define, Extern
from ..ir.schedule import Schedule
from .cost import Cost
from .launches import Launches
from .memory import eager_peak, plan_peak
from .priced_groups import PricedGroups, failing
from .recompute import recompute
from .regions import Regions
from .setting import Setting
from .storage import place_updates

CHEAP_COST = 6.0  # recomputing less than this per element beats a trip through memory
SIBLING_NEIGHBOURS = 8
LEAST_US = 0.5  # of a gain in bytes for which groups that share a launch anyway become one


class Planner(PricedGroups):
    """One planning run."""

    def run(self) -> FusionPlan:
        steps = self.fused_steps(siblings=True)
        limit, needed = eager_peak(self.program), plan_peak(self.program, steps)
        if needed > limit:
            # Siblings joined early keep their results alive together: plan again without joining them.
            self.restart()
            self.decisions.append(
                Decision("plan", "plan", "sibling", False, f"{needed} bytes at the peak, eager needs {limit}", 0.0, 0)
            )
            steps = self.fused_steps(siblings=False)
        launches: list[tuple[Group, ...]] = []
        if self.setting.options.fuse:
            placed, _, rereads, _ = place_updates(self.program, steps)
            found = Launches(self.program, steps, (source for _, source in rereads), self.setting.limits)
            peak, launch_us = lambda s: plan_peak(self.program, s, placed), self.target.launch_us
            found.share(self.setting.share, self._alone_us, launch_us, peak, limit)
            most = max(limit, plan_peak(self.program, steps, placed))
            steps, launches = found.ordered()
            if plan_peak(self.program, steps, placed) > most:  # results of steps that run meanwhile are alive together
                steps, launches = found.ordered(overlap=False)
            self.decisions += found.decisions
        in_place, copies, rereads, notes = place_updates(self.program, steps, launches)
        return FusionPlan(steps, (*self.decisions, *notes), in_place, copies, rereads, tuple(launches))

    def _alone_us(self, group: Group) -> float:
        """The time of a group that is planned."""
        cost = self.cost(self.graph.node_of[group.stores[0].buffer])
        return cost.time_us if cost is not None else 0.0

    def fused_steps(self, siblings: bool) -> tuple[Group | Extern, ...]:
        """The steps after all fusions that gain."""
        if self.setting.options.fuse:
            self.fuse_chains()
            self.fuse_by_gain(siblings)
            if recompute(self):
                self.fuse_by_gain(siblings)  # groups that waited for each other may be neighbours now
        return self.steps()

    # --- chains ---

    def fuse_chains(self) -> None:
        """A point-wise value with one reader is computed where it is read."""
        sizes: dict[int, int] = {}
        for define in self.program.defines():
            buffer = define.buffer
            users = self.graph.consumers.get(buffer, set())
            if buffer in self.graph.required or len(users) != 1:
                continue
            (user,) = users
            number = self.graph.node_of[buffer]
            if (
                user not in self.graph.members
                or user == number
                or not {user, number}.isdisjoint(self.closed | self.asked)
            ):
                continue
            if not all(is_pointwise(d.value) for d in self.graph.members[number]):
                continue
            size = sizes.get(number, 1) + sizes.get(user, 1)
            if size > (limit := self.most_members(number, user)):
                self._decide(number, user, "vertical", False, f"{size} operations, limit {limit}", 0.0, 0)
                continue
            if not self._reads_once(define, user):
                continue
            if self._device(number) != self._device(user):
                continue
            saved = 2 * storage_bytes(buffer)
            gain = saved / self.target.memory_bytes_per_us + self.target.launch_us
            self._decide(number, user, "vertical", True, f"its only reader: {saved} bytes never travel", gain, saved)
            self.graph.merge(user, number)
            sizes[user] = size

    def _device(self, number: int) -> str:
        return self.graph.members[number][0].buffer.device

    def _reads_once(self, define: Define, user: int) -> bool:
        """The reader loads it at one index, in range, and not many times over."""
        readers = [d for d in self.graph.members[user] if define.buffer in self.graph.reads[d]]
        loads = {e: d for d in readers for e in loads_of([d.value])[define.buffer]}
        if len(loads) != 1:
            return False
        ((load, reader),) = loads.items()
        if failing(postorder([define.value])) and load.axes and not _plain(load):
            return False
        points = max([numel(reader.axes), *(numel(r.axes | frozenset(r.over)) for r in reductions([reader.value]))])
        return sum(map(work_of, postorder([define.value]))) <= CHEAP_COST or points <= 2 * max(1, numel(define.axes))

    # --- the queue ---

    def fuse_by_gain(self, siblings: bool) -> None:
        """Merge the pair with the largest predicted gain until none is left."""
        queue: list[tuple[float, int, int, int, int, int]] = []
        ticket = itertools.count()
        version: dict[int, int] = dict.fromkeys(self.graph.members, 0)
        rejected: set[tuple[int, int, int, int]] = set()

        def push(a: int, b: int) -> None:
            gain = self._quick_gain(a, b)
            if gain > 0:
                heapq.heappush(queue, (-gain, next(ticket), a, b, version[a], version[b]))

        for a in list(self.graph.members):
            for b in self._partners(a, siblings):
                if a < b:
                    push(a, b)
        while queue:
            _, _, a, b, va, vb = heapq.heappop(queue)
            if a not in self.graph.members or b not in self.graph.members:
                continue
            key = (a, b, version[a], version[b])
            if (version[a], version[b]) != (va, vb) or key in rejected:
                continue
            rejected.add(key)
            if not self._try(a, b):
                continue
            version[a] += 1
            version.pop(b, None)
            for c in self._partners(a, siblings):
                push(min(a, c), max(a, c))

    def _partners(self, a: int, siblings: bool) -> list[int]:
        """Groups joined to `a` by an edge, and the nearest ones that read what it reads."""
        graph = self.graph
        if a in self.closed:
            return []
        found = {n for n in (*graph.successors[a], *graph.predecessors[a]) if n in graph.members}
        if not siblings:
            return sorted(found - self.closed)
        for d in graph.members[a]:
            for buffer in graph.reads[d]:
                users = graph.consumers.get(buffer, set())
                near = sorted((u for u in users if u in graph.members and u != a), key=lambda u: (abs(u - a), u))
                found.update(near[:SIBLING_NEIGHBOURS])
        found.discard(a)
        return sorted(found - self.closed)

    def _quick_gain(self, a: int, b: int) -> float:
        """Bytes that would not travel, over bandwidth, plus one launch: an optimistic rank."""
        graph = self.graph
        both = frozenset((a, b))
        saved = 0
        reads_a = {x for d in graph.members[a] for x in graph.reads[d]}
        reads_b = {x for d in graph.members[b] for x in graph.reads[d]}
        made = {d.buffer for n in (a, b) for d in graph.members[n]}
        for buffer in (reads_a & reads_b) - made:
            saved += storage_bytes(buffer)
        for d in (*graph.members[a], *graph.members[b]):
            other = reads_b if d in graph.members[a] else reads_a
            if d.buffer in other:
                saved += storage_bytes(d.buffer)
                if d.buffer not in graph.required and graph.consumers.get(d.buffer, set()) <= both:
                    saved += storage_bytes(d.buffer)
        if not saved:
            return 0.0
        return saved / self.target.memory_bytes_per_us + self.target.launch_us

    def _try(self, a: int, b: int) -> bool:
        """Merge if legal and cheaper; record the answer either way."""
        graph = self.graph
        kind = "vertical" if b in graph.successors[a] or a in graph.successors[b] else "sibling"
        if graph.reaches_around(a, b) or graph.reaches_around(b, a):
            return self._decide(a, b, kind, False, "another step lies between them", 0.0, 0)
        if kind == "sibling" and graph.connected(a, b):
            return False
        if (count := len(graph.members[a]) + len(graph.members[b])) > (limit := self.most_members(a, b)):
            return self._decide(a, b, kind, False, f"{count} operations in one kernel, limit {limit}", 0.0, 0)
        members = sorted([*graph.members[a], *graph.members[b]], key=graph.order)
        after = self.consider(members, frozenset((a, b)))
        before = [cost for n in (a, b) if (cost := self.cost(n)) is not None] if isinstance(after, Cost) else []
        apart_us = sum(c.time_us for c in before)
        if len(before) == 2:
            apart_us -= self._lost_us({a: before[0], b: before[1]})
        if isinstance(after, Cost) and after.time_us < apart_us:
            after = self.price(members, frozenset((a, b)))
        if isinstance(after, Refusal) or len(before) < 2:
            reason = after.reason if isinstance(after, Refusal) else "one side cannot stand alone"
            return self._decide(a, b, kind, False, reason, 0.0, 0)
        gain = apart_us - after.time_us
        moved = sum(c.moved for c in before) - after.moved
        if kind == "sibling" and min(map(self.kin.of, (a, b))) > 1:  # they will share a launch: only bytes count
            gain = min(gain, moved / self.target.memory_bytes_per_us - LEAST_US)
        if gain <= 0:
            reason = f"predicted {after.time_us:.1f} us together, {apart_us:.1f} us apart"
            return self._decide(a, b, kind, False, reason, gain, moved)
        reason = f"saves {gain:.1f} us and {moved} bytes"
        self._decide(a, b, kind, True, reason, gain, moved)
        graph.merge(a, b)
        self.costs[a] = after
        self.costs.pop(b, None)
        return True

    def _lost_us(self, costs: dict[int, Cost]) -> float:
        """What two groups have only apart: the launch that one of them shares with others of its kind, and results
        that overwrite inputs. Together these are copied; where both have their like, so are those of all others."""
        kin = [self.kin.of(n) for n in costs]
        shared = max(self.kin.shared_us(n, c.time_us) for n, c in costs.items()) if min(kin) == 1 else 0.0
        copied = self.copied(frozenset(costs)).difference(*(self.copied(frozenset((n,))) for n in costs))
        each = (self.target.launch_us + 2 * storage_bytes(x) / self.target.memory_bytes_per_us for x in copied)
        return shared + min(kin) * sum(each)

    def _decide(self, a: int, b: int, kind: str, accepted: bool, reason: str, gain: float, moved: int) -> bool:
        names = [self.graph.members[n][-1].origin.node for n in (a, b)]
        self.decisions.append(Decision(names[0], names[1], kind, accepted, reason, gain, moved))
        return accepted

    # --- result ---

    def _group(self, number: int, stores: tuple[Store, ...]) -> Group:
        chosen = self.locked[number].chosen if number in self.locked else None
        schedule = chosen.schedule if chosen is not None else self._schedule(number)
        return Group(stores, tuple(self.graph.members[number]), schedule)

    def _schedule(self, number: int) -> Schedule | None:
        """How a group runs; on a GPU with the sizes of tiles that are priced lowest."""
        cost = self.cost(number)
        if cost is not None and self.target.warp:
            found = self.price(self.graph.members[number], frozenset((number,)), neighbours=True)
            cost = found if isinstance(found, Cost) else cost
        return cost.schedule if cost is not None else None

    def steps(self) -> tuple[Group | Extern, ...]:
        """Groups and externs in dependency order, program order where free."""
        graph = self.graph
        waiting = {n: len(p) for n, p in graph.predecessors.items()}
        ready = [(graph.span[n][1], n) for n, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        steps: list[Group | Extern] = []
        while ready:
            _, n = heapq.heappop(ready)
            if n in graph.externs:
                steps.append(graph.externs[n])
            else:
                stores = graph.stores(graph.members[n], frozenset((n,)))
                if stores:
                    steps.append(self._group(n, stores))
            for s in graph.successors[n]:
                waiting[s] -= 1
                if waiting[s] == 0:
                    heapq.heappush(ready, (graph.span[s][1], s))
        return tuple(steps)


def plan_fusion(regions: Regions, setting: Setting) -> FusionPlan:
    """The fusion plan of a program, its matrix products decided on."""
    return Planner(regions, setting).run()


def _plain(load: Load) -> bool:
    return all(p.axis is not None or p.constant == 0 for p in load.index)
