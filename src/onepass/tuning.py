"""Tuning by measuring: where a kernel is far from its floor, a few neighbours of its schedule are timed.

Takes a planned graph whose kernels are built, gives an `Outcome` for every group: how to change its schedule, and
what was tried. The search walks from the rules' own layout to a faster neighbour, as long as there is one and
budget is left. Layouts change, programs do not: sums may be added in another order, nothing else. Groups with the most
to gain come first: time above the price, times the kernels that are equal.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from .analysis.nest import Refusal
from .codegen.trial import emit_trial
from .ir.expr import Random, postorder
from .ir.plan import Group
from .ir.record import CompileRecord, TrialRecord
from .ir.schedule import Schedule
from .ir.source import KernelSource, Trial
from .lowering.fingerprint import environment_key
from .pipeline import Choices, PlannedGraph, emit_kernels, schedule_named
from .planner.cost import SMALLEST_US, predict_us
from .runtime.cache import Cache
from .runtime.kernels import Builder, LoadedKernel, build_each, processors
from .runtime.stopwatch import Stopwatch, alone

GAIN = 1.02  # a neighbour is taken if it is faster by more than this
DROPPED = 1.3  # a neighbour whose first launch takes so many times the best time is not launched again


@dataclass(frozen=True, slots=True)
class Effort:
    """What tuning may take. The floor of a group is what the model predicts: bytes, operations, launches."""

    alternatives: int  # of one group
    group_seconds: float  # building included
    graph_seconds: float
    near_floor: float  # a group within so many times its floor stays as the rules have it


EFFORTS = {"quick": Effort(4, 1.0, 3.0, 1.25), "max": Effort(24, 20.0, 600.0, 1.03)}


@dataclass(frozen=True, slots=True)
class Workshop:
    """What builds kernels and what times them."""

    builder: Builder
    cache: Cache | None
    stopwatch: Stopwatch
    now: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a group's schedule is to be changed, one step after another, and why: for people, with all that was tried."""

    changes: tuple[str, ...]
    summary: str
    trials: tuple[TrialRecord, ...] = ()

    @property
    def time_us(self) -> float:
        """What the group takes, as measured; 0 where it was not."""
        return next((t.time_us for t in self.trials if t.chosen), 0.0)


@dataclass(frozen=True, slots=True)
class _Version:
    """A group by one schedule: its sources in launch order, and how to launch them. `changes`: steps from its own."""

    changes: tuple[str, ...]
    schedule: Schedule
    sources: tuple[KernelSource, ...]
    trial: Trial

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(s.key for s in self.sources)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A version and what the device said of it."""

    version: _Version
    record: TrialRecord

    def beats(self, other: _Tried) -> bool:
        """No spilling before speed; a failure never."""
        mine, others = self.record, other.record
        if mine.problem or mine.spills > others.spills:
            return False
        return mine.spills < others.spills or mine.time_us * GAIN < others.time_us


LAUNCHING = Refusal("it is mostly launching")
SHARING = Refusal("it shares a launch")
DRAWING = Refusal("drawing random numbers takes most of it, in any layout")
_Key = tuple[str, str, str, Trial, tuple[str, ...]]
_decided: dict[_Key, Outcome] = {}  # what this process has found: equal layers of other graphs are not timed again


def tune_groups(
    planned: PlannedGraph, choices: Choices, record: CompileRecord, workshop: Workshop
) -> dict[str, Outcome]:
    """What measuring says of every group, by the name of its kernels. `record`: of the schedules as they are."""
    effort = EFFORTS[planned.lowered.options.tune]
    end = workshop.now() + effort.graph_seconds
    outcomes: dict[str, Outcome] = {}
    found: dict[_Key, Outcome] = {}
    equal: dict[_Key, list[str]] = {}
    slow: list[tuple[float, _Key, _Tried]] = []
    with alone:
        for name in planned.names:
            predicted_us, floor_us = expected_us(planned, name, record)
            version: _Version | Refusal
            if name in planned.shared:
                version = SHARING
            elif predicted_us < SMALLEST_US:
                version = LAUNCHING
            elif planned.lowered.options.tune == "quick" and _draws(planned.names[name]):
                version = DRAWING
            else:
                version = _version(planned, name, (), choices.get(name))
            if isinstance(version, Refusal):
                summary = f"not measured: predicted {predicted_us:.3g} us, {version.reason}"
                outcomes[name] = Outcome((), summary)
                continue
            key = _key(planned, version, workshop)
            equal.setdefault(key, []).append(name)
            if len(equal[key]) > 1:
                continue
            if (known := _decided.get(key) or _stored(key, workshop)) is not None:
                found[key] = known
                continue
            (ruled,) = _try([version], workshop)
            if (settled := _settled(ruled, floor_us, effort)) is not None:
                found[key] = settled
            else:
                slow.append((ruled.record.time_us - floor_us, key, ruled))
        slow.sort(key=lambda s: s[0] * len(equal[s[1]]), reverse=True)
        searches = {key: _Search(planned, equal[key][0], ruled, effort, workshop) for _, key, ruled in slow}
        at_once = max(1, processors() // effort.alternatives)
        for number, (key, search) in enumerate(searches.items()):
            if number % at_once == 0 and workshop.now() < end:
                _build([v for s in list(searches.values())[number : number + at_once] for v in s.first], workshop)
            found[key] = search.run(min(end, workshop.now() + effort.group_seconds))
        for key, outcome in found.items():
            if outcome.trials and key not in _decided:  # it was measured
                _keep(key, outcome, workshop)
    return outcomes | {name: found[key] for key, names in equal.items() for name in names}


class _Search:
    """The walk of one group."""

    def __init__(self, planned: PlannedGraph, name: str, ruled: _Tried, effort: Effort, workshop: Workshop) -> None:
        """`ruled`: the rules' own version."""
        self.planned, self.name = planned, name
        self.ruled, self.effort, self.workshop = ruled, effort, workshop
        self.asked = {ruled.version.schedule}
        self.seen = {ruled.version.keys}

    @functools.cached_property
    def first(self) -> list[_Version]:
        """The neighbours of the rules' version, with which the walk begins."""
        return list(itertools.islice(self._unmet(self.ruled.version), self.effort.alternatives))

    def run(self, end: float) -> Outcome:
        """Start at the rules' own version and stop at `end` at the latest, up to one round of building."""
        tried, best = [self.ruled], self.ruled
        at_once = max(1, processors() // len(self.ruled.version.sources))
        moved = True
        while moved and self.workshop.now() < end:
            moved = False
            left = max(0, self.effort.alternatives + 1 - len(tried))
            around = self.first if len(tried) == 1 else [*itertools.islice(self._unmet(best.version), left)]
            for first in range(0, len(around), at_once):
                if self.workshop.now() >= end:
                    break
                worst_us = math.inf if best.record.spills else DROPPED * best.record.time_us
                for found in _try(around[first : first + at_once], self.workshop, worst_us):
                    tried.append(found)
                    if found.beats(best):
                        best, moved = found, True
        return self._outcome(best, tried)

    def _unmet(self, beside: _Version) -> Iterator[_Version]:
        """Neighbours that were not met before."""
        for change, neighbour in self.planned.neighbours(self.name, beside.schedule).items():
            if neighbour in self.asked:
                continue
            self.asked.add(neighbour)
            version = _version(self.planned, self.name, (*beside.changes, change), neighbour)
            if isinstance(version, _Version) and version.keys not in self.seen:
                self.seen.add(version.keys)
                yield version

    def _outcome(self, best: _Tried, tried: Sequence[_Tried]) -> Outcome:
        ruled = self.ruled
        if best is not ruled and not ruled.record.spills:  # one slow run must not decide
            again = _try([best.version, ruled.version], self.workshop)
            if not _fastest(best, again[0]).beats(_fastest(ruled, again[1])):
                best = ruled
        records = tuple(replace(t.record, chosen=t is best) for t in tried)
        time_us = f"{ruled.record.time_us:.3g} us as the rules say"
        if best is ruled:
            others = f"of {len(tried) - 1} others none is better" if len(tried) > 1 else "no other was tried"
            return Outcome((), f"{time_us}; {others}", records)
        summary = f"{best.record.time_us:.3g} us with {best.record.change}; {time_us}"
        return Outcome(best.version.changes, summary, records)


def _fastest(first: _Tried, again: _Tried) -> _Tried:
    return again if not again.record.problem and again.record.time_us < first.record.time_us else first


def _settled(ruled: _Tried, floor_us: float, effort: Effort) -> Outcome | None:
    """What is decided after the first measurement, if it is."""
    record = ruled.record
    if record.problem:
        return Outcome((), f"not measured: {record.problem}")
    if record.time_us > effort.near_floor * floor_us or record.spills:
        return None
    summary = f"{record.time_us:.3g} us, {record.time_us / floor_us:.2f} of its floor"
    return Outcome((), summary, (replace(record, chosen=True),))


def _keep(key: _Key, outcome: Outcome, workshop: Workshop) -> None:
    _decided[key] = outcome
    if workshop.cache is not None:
        workshop.cache.write("times", _hashed(key), asdict(outcome))


def _stored(key: _Key, workshop: Workshop) -> Outcome | None:
    """What an earlier process found."""
    data = workshop.cache.read("times", _hashed(key)) if workshop.cache is not None else None
    try:
        if data is None:
            return None
        trials = tuple(TrialRecord(**t) for t in data["trials"])
        _decided[key] = Outcome(tuple(map(str, data["changes"])), str(data["summary"]), trials)
    except (KeyError, TypeError):  # of another make
        return None
    return _decided[key]


def _hashed(key: _Key) -> str:
    return hashlib.sha256(f"{environment_key()} {key}".encode()).hexdigest()


def _draws(group: Group) -> bool:
    return any(isinstance(e, Random) for e in postorder([s.value for s in group.stores]))


def expected_us(planned: PlannedGraph, name: str, record: CompileRecord) -> tuple[float, float]:
    """What the model predicts of a group, and its floor."""
    found = [k for k in record.kernels if k.group == name]
    moved = sum(k.bytes_read + k.bytes_written for k in found)
    predicted = sum(k.predicted_us for k in found)
    return predicted, max(predicted, predict_us(moved, 0.0, len(found), planned.target))


def changed(planned: PlannedGraph, name: str, schedule: Schedule | None, changes: Sequence[str]) -> Schedule | None:
    """The schedule so many steps from another, which is the planned one where none is given."""
    for change in changes:
        schedule = planned.neighbours(name, schedule)[change]
    return schedule


def _version(
    planned: PlannedGraph, name: str, changes: tuple[str, ...], schedule: Schedule | None
) -> _Version | Refusal:
    scheduled = schedule_named(planned, name, schedule)
    trial = emit_trial(scheduled)
    if isinstance(trial, Refusal):
        return trial
    sources, numbers = emit_kernels(planned, list(scheduled.timed), name == next(iter(planned.names)))
    own = tuple(sources[numbers[k]] for k in scheduled.timed)
    return _Version(changes, schedule or scheduled.main.schedule, own, trial)


def _key(planned: PlannedGraph, version: _Version, workshop: Workshop) -> _Key:
    tune, chip = planned.lowered.options.tune, workshop.stopwatch.chip
    return tune, chip, workshop.builder.fingerprint(), version.trial, version.keys


def _try(versions: Sequence[_Version], workshop: Workshop, worst_us: float = math.inf) -> list[_Tried]:
    """Build versions, in parallel, then time them one after another; those slower than the worst only roughly."""
    built = iter(_build(versions, workshop))
    return [_Tried(v, _timed(v, [next(built) for _ in v.sources], workshop, worst_us)) for v in versions]


def _build(versions: Sequence[_Version], workshop: Workshop) -> list[LoadedKernel | BaseException]:
    return build_each([s for v in versions for s in v.sources], workshop.builder, workshop.cache)


def _timed(
    version: _Version, built: Sequence[LoadedKernel | BaseException], workshop: Workshop, worst_us: float
) -> TrialRecord:
    change = ", ".join(version.changes) or "as the rules say"
    for kernel in built:
        if isinstance(kernel, BaseException):
            return TrialRecord(change, 0.0, problem=f"not built: {str(kernel).splitlines()[0]}")
    kernels = [k for k in built if isinstance(k, LoadedKernel)]
    timing = workshop.stopwatch.time(version.trial, kernels, worst_us)
    known = [b for k in kernels if (b := getattr(k.function, "built", None)) is not None]
    registers, spilled = max((b.registers for b in known), default=0), max((b.spills for b in known), default=0)
    return TrialRecord(change, timing.time_us, registers, spilled, problem=timing.problem)
