"""Groups that do not wait for each other share a launch, where that is predicted to be faster.

What is gained is launches, and processors that a small kernel leaves idle; bytes are the same. Groups of one kind (64
updates) come first: they are one range of the launch, however many they are. Then launches of several kinds. A launch
waits for all that one of its groups waits for. It must leave the graph free of cycles and need no more memory than
eager.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..analysis.inline import loaded
from ..analysis.reach import reached
from ..analysis.words import words
from ..ir.limits import Limits
from ..ir.plan import Decision, Group
from ..ir.program import Buffer, Extern, HostValue, Program, Update, held
from .setting import ShareLaunch

Step: TypeAlias = Group | Extern
MOST_KINDS = 8  # bodies of one launch
AHEAD = 8  # launches that another kind of group is tried with
LEAST_GAIN = 0.5  # of every launch that is not needed: the rest may go to what prediction does not see
LEAST_PART = 0.02  # of the time apart: less than that prediction does not tell from nothing


Peak: TypeAlias = Callable[[Sequence[Step]], int]


class Launches:
    """The steps of a plan, as launches."""

    def __init__(self, program: Program, steps: Sequence[Step], kept: Iterable[Buffer], limits: Limits) -> None:
        """`kept`: results whose groups stay apart."""
        self.steps = list(steps)
        self.after: list[set[int]] = [set() for _ in steps]  # what a launch must wait for, and what waits for it
        self.before: list[set[int]] = [set() for _ in steps]
        self.members: dict[int, list[int]] = {k: [k] for k in range(len(steps))}
        self.alone: dict[int, float] = {}  # the time of a group's own launches
        self.times: dict[int, float] = {}  # of a launch as it is now
        self.made: dict[int, Decision] = {}  # the last one of each launch
        self.refused: list[Decision] = []
        apart = {*kept}
        self.free = [isinstance(s, Group) and _may_share(s, apart, limits) for s in steps]
        self._link(program)
        self.turn = _turns(self.steps, self.before)

    def _link(self, program: Program) -> None:
        makers: dict[Buffer | HostValue, int] = {}
        readers: dict[Buffer | HostValue, list[int]] = {}
        ordered: int | None = None
        for k, step in enumerate(self.steps):
            for b in _reads(step):
                readers.setdefault(b, []).append(k)
                if b in makers:
                    self._edge(makers[b], k)
            if isinstance(step, Group):
                makers |= {s.buffer: k for s in step.stores}
                continue
            makers[step.result] = k
            if step.ordered and not step.is_wait:
                if ordered is not None:
                    self._edge(ordered, k)
                ordered = k
        for update in (s for s in program.statements if isinstance(s, Update)):
            writer = makers.get(update.source)
            for k in readers.get(update.target, ()):
                if writer is not None and k < writer:  # it sees the input as it was
                    self._edge(k, writer)

    def _edge(self, first: int, second: int) -> None:
        if first != second:
            self.before[second].add(first)
            self.after[first].add(second)

    # --- the graph ---

    def waits(self, a: int, b: int) -> bool:
        """Whether one launch comes after another, by way of any others."""
        stack, seen = [a], {a}
        while stack:
            for p in self.before[stack.pop()] - seen:
                if p == b:
                    return True
                seen.add(p)
                stack.append(p)
        return False

    def connected(self, a: int, b: int) -> bool:
        return self.waits(a, b) or self.waits(b, a)

    def join(self, a: int, b: int) -> None:
        self.members[a] = sorted([*self.members[a], *self.members.pop(b)])
        for links, back in ((self.before, self.after), (self.after, self.before)):
            for other in links[b]:
                back[other].discard(b)
                back[other].add(a)
            links[a] |= links[b]
            links[b] = set()

    def ordered(self, overlap: bool = True) -> tuple[tuple[Step, ...], list[tuple[Group, ...]]]:
        """Steps in an order in which launches are neighbours, and those with several groups.

        `overlap`: exchanges start as early as they can and are waited for as late, so that other steps run meanwhile.
        """
        waiting = {k: len(self.before[k]) for k in self.members}

        def key(k: int) -> tuple[int, int, int]:
            return max(self.turn[m] for m in self.members[k]) if overlap else 0, self.members[k][-1], k

        ready = [key(k) for k, count in waiting.items() if not count]
        heapq.heapify(ready)
        steps: list[Step] = []
        launches: list[tuple[Group, ...]] = []
        while ready:
            *_, k = heapq.heappop(ready)
            own = [self.steps[m] for m in self.members[k]]
            steps += own
            launches += [tuple(s for s in own if isinstance(s, Group))] if len(own) > 1 else []
            for s in self.after[k]:
                waiting[s] -= 1
                if not waiting[s]:
                    heapq.heappush(ready, key(s))
        return tuple(steps), launches

    # --- which ---

    def share(
        self, share: ShareLaunch, alone_us: Callable[[Group], float], launch_us: float, peak: Peak, limit: int
    ) -> None:
        """Join what gains. `alone_us`: a group's time without others; `limit`: of bytes at the peak."""
        self.launch_us = launch_us
        self.ask, self.peak = share, peak
        self.limit = max(limit, peak(self.steps))
        kinds: dict[Hashable, list[int]] = {}
        for k, step in enumerate(self.steps):
            if self.free[k] and isinstance(step, Group):
                kinds.setdefault(_kind(step), []).append(k)
                self.times[k] = self.alone[k] = alone_us(step)
        for same in kinds.values():
            for antichain in self._antichains(same):
                self._try(antichain)
        self._across_kinds()

    def _antichains(self, same: list[int]) -> list[list[int]]:
        """Groups of one kind in as few sets as first-fit finds in which none waits for another."""
        found: list[list[int]] = []
        for k in same:
            fitting = next((chain for chain in found if not self._reached(k, chain)), None)
            if fitting is None:
                found.append([k])
            else:
                fitting.append(k)
        return [chain for chain in found if len(chain) > 1]

    def _reached(self, k: int, others: list[int]) -> bool:
        """Whether a launch and one of others wait for each other."""
        for links in (self.before, self.after):
            stack, seen, wanted = [k], {k}, {*others}
            while stack:
                fresh = links[stack.pop()] - seen
                if fresh & wanted:
                    return True
                seen |= fresh
                stack += fresh
        return False

    def _across_kinds(self) -> None:
        """Launches of several kinds, of neighbours in the plan's order."""
        waiting = [k for k in self.members if self.free[k]]
        while waiting:
            first = waiting.pop(0)
            for other in [k for k in waiting[:AHEAD] if not self.connected(first, k)]:
                if not self.connected(first, other) and self._try([first, other], quiet=True):
                    waiting.remove(other)

    def _try(self, found: list[int], quiet: bool = False) -> bool:
        """One launch of several, if it gains. `quiet`: nobody would have expected it."""
        first, *others = found
        members = sorted(m for k in found for m in self.members[k])
        groups = [s for m in members if isinstance(s := self.steps[m], Group)]
        if len({_kind(g) for g in groups}) > MOST_KINDS:
            return False
        apart_us = sum(self.times[k] for k in found)
        each_us = [self.alone[m] for m in members]
        shared, alone_us = self.ask(groups, each_us), sum(each_us)
        names = groups[0].members[-1].origin.node, groups[-1].members[-1].origin.node
        reason = f"predicted {shared.together_us:.1f} us as {len(groups)} parts of one launch, {alone_us:.1f} us apart"
        reason = shared.refusal or reason
        least_us = max(LEAST_GAIN * self.launch_us * (len(found) - 1), LEAST_PART * apart_us)
        gains = not shared.refusal and apart_us - shared.together_us > least_us
        if gains:
            kept = self._state()
            for other in others:
                self.join(first, other)
            needed = self.peak(self._launched())
            if needed > self.limit:
                self._restore(kept)
                gains, reason = False, f"{needed} bytes at the peak, {self.limit} apart"
        if gains:
            self.times[first] = shared.together_us
            for m, group in zip(members, shared.groups, strict=True):
                self.steps[m] = group
        if gains:
            self.made = {k: d for k, d in self.made.items() if k not in found}
            self.made[first] = Decision(*names, "launch", True, reason, alone_us - shared.together_us)
        elif not quiet or shared.together_us > apart_us:  # the largest body costs the others their occupancy
            self.refused.append(Decision(*names, "launch", False, reason, apart_us - shared.together_us))
        return gains

    @property
    def decisions(self) -> list[Decision]:
        """One for every launch, and for those that were to be expected and do not gain."""
        return [*self.made.values(), *self.refused]

    def _launched(self) -> list[Step]:
        """Steps, those of one launch as one: all that they store is there at once."""
        steps, launches = self.ordered()
        several = {own[0]: own for own in launches}
        inside = {s for own in launches for s in own[1:]}
        found: list[Step] = []
        for s in steps:
            if isinstance(s, Group) and s in several:
                s = replace(s, stores=tuple(x for g in several[s] for x in g.stores))
            found += [] if s in inside else [s]
        return found

    def _state(self) -> tuple[list[set[int]], list[set[int]], dict[int, list[int]]]:
        return [set(x) for x in self.after], [set(x) for x in self.before], dict(self.members)

    def _restore(self, state: tuple[list[set[int]], list[set[int]], dict[int, list[int]]]) -> None:
        self.after, self.before, self.members = state


def _turns(steps: Sequence[Step], before: Sequence[set[int]]) -> list[int]:
    """Of each step: 0 where an exchange with other processes waits for it, 2 where it waits for one, 1 elsewhere."""
    calls = [(k, s) for k, s in enumerate(steps) if isinstance(s, Extern)]
    starts = [k for k, s in calls if s.is_collective]
    if not starts or any(s.overwrites is not None for _, s in calls):
        return [1] * len(steps)
    early, waits = reached(starts, before.__getitem__), {k for k, s in calls if s.is_wait}
    return [2 if k in waits else int(k not in early) for k in range(len(steps))]


def _may_share(group: Group, apart: set[Buffer], limits: Limits) -> bool:
    if group.products or group.schedule is None or any(d.orders.no_fuse for d in group.members):
        return False
    if any(d.buffer.name in limits.members for d in group.members):
        return False  # parts of what was too much for one kernel
    stored = {s.buffer for s in group.stores}
    read = {b for s in group.stores for b in loaded(s.value)}
    device = group.stores[0].buffer.device
    return not stored & apart and not limits.apart & {b.name for b in stored} and all(b.device == device for b in read)


def _kind(group: Group) -> Hashable:
    """What a group computes, its sizes left out."""
    assert group.schedule is not None
    factors = tuple((f.grid, f.loop, f.chunk > 0) for _, f in group.schedule.axes)
    stored = tuple((s.buffer.dtype, s.buffer.device) for s in group.stores)
    return stored, words(s.value for s in group.stores), factors, group.schedule.way


def _reads(step: Step) -> set[Buffer | HostValue]:
    if isinstance(step, Group):
        return {b for s in step.stores for b in loaded(s.value)}
    return {*held((step.args, step.kwargs))}
