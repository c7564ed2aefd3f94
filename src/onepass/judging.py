"""Close calls on matrix products, decided by measuring: one kernel, or the library and kernels around it.

Takes a region as a program of its own, planned both ways, builds both by the usual stages, lets them race on the
device and gives a `Verdict`. Both have the schedules they would run with: what spills or holds too few programs gets
its next one first. Equal regions are measured once, in this process and, by the persistent cache, in later ones.
Measuring stops when the graph's seconds are spent; prediction decides what is left. Building takes longer than racing,
so the questions are foreseen: regions are chosen without answers first, and what they ask for is built meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeAlias

from .analysis.access import estimate
from .autograd.exact import needs_exact
from .codegen.host import emit_host
from .codegen.trial import have_examples, stand_in, stays_inside
from .ir.kernel import Kernel
from .ir.poly import Symbol
from .ir.program import Buffer
from .ir.record import KernelRecord
from .ir.source import HostProgram, KernelSource
from .ir.structure import Unwritable, structure
from .ir.target import Target
from .lowering.fingerprint import environment_key
from .pipeline import Choices, LoweredGraph, PlannedGraph, emit_kernels, plan_regions, schedule_named
from .planner.close_calls import Verdict
from .planner.memory import plan_peak
from .planner.regions import Regions
from .resources import Resources
from .runtime.kernels import LoadedKernel, build_each, processors
from .runtime.stopwatch import Race, Run, alone
from .tuning import EFFORTS, Workshop

FAR, DOUBTS = 2.0, 2  # a time that is so many times the predicted one is doubted, and so often measured again
MANY = 8  # processors, some of which may build what is not needed in the end
# What the regions of a graph are chosen with to know its questions: prediction decides, or everything loses.
FORESEEN = (Verdict(problem="not measured yet"), Verdict(lost="was not measured yet"))
_Built: TypeAlias = LoadedKernel | BaseException
_Both: TypeAlias = tuple[Regions, Regions]  # a region in one kernel, and apart
_known: dict[str, Verdict] = {}  # what this process has measured


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the two ways, ready to be built."""

    planned: PlannedGraph
    choices: Choices
    host: HostProgram
    kernels: tuple[Kernel, ...]
    sources: tuple[KernelSource, ...]
    numbers: Mapping[Kernel, int]  # which source a kernel uses

    @property
    def inside(self) -> bool:
        """Whether everything that is read through integers that are 0 exists."""
        return all(map(stays_inside, self.kernels))


class Judge:
    """What measures the close calls of one graph."""

    def __init__(self, lowered: LoweredGraph, workshop: Workshop) -> None:
        self.lowered, self.workshop = lowered, workshop
        self._made_by = f"{environment_key()} {workshop.builder.fingerprint()} {needs_exact(lowered.graph)}"
        self._answers: dict[str, Verdict] = {}
        self._end: float | None = None
        self._foreseen: tuple[ThreadPoolExecutor, Verdict] | None = None
        self._ways: dict[str, tuple[_Both, list[_Way]]] = {}  # of questions that were foreseen, maybe of equal parts
        self._building: list[Future[list[_Built]]] = []
        self.left_open = False  # something could not be measured now, but might be another time

    def __call__(self, together: Regions, apart: Regions, expected: tuple[float, float]) -> Verdict:
        """What both ways take on the device; `problem` where that cannot be known. `expected`: what they should."""
        try:
            key = self._key(together, apart)
        except Unwritable:
            return Verdict(problem="it does not run by itself")
        if key not in self._answers:
            found = _known.get(key) or self._stored(key)
            if found is None and self._foreseen is not None:
                return self._foresee(key, (together, apart), *self._foreseen)
            self._answers[key] = found or self._judged(key, (together, apart), expected)
        return self._answers[key]

    def foresee(self, choose: Callable[[], object]) -> None:
        """Build what the questions of `choose` need: those that follow predictions, and those that follow losses.

        All at once, while regions are chosen; nothing is built any more when the first kernels race.
        """
        pool = ThreadPoolExecutor(processors(), "onepass-foreseen")
        try:
            for verdict in FORESEEN if processors() >= MANY else FORESEEN[:1]:
                before = len(self._ways)
                self._foreseen = pool, verdict
                choose()
                if len(self._ways) == before:
                    break
        finally:
            self._foreseen = None
            wait(self._building, EFFORTS[self.lowered.options.tune].graph_seconds)
            pool.shutdown(wait=False, cancel_futures=True)
            self._building.clear()  # what is cancelled never counts as done

    def _foresee(self, key: str, both: _Both, pool: ThreadPoolExecutor, verdict: Verdict) -> Verdict:
        if key not in self._ways and have_examples(_inputs(both)):
            try:
                ways = self._planned(both)
            except Exception:  # the question itself will say what is wrong
                return verdict
            self._ways[key] = both, ways
            sources = [s for way in ways for s in way.sources]
            self._building.append(pool.submit(build_each, sources, self.workshop.builder, self.workshop.cache))
        return verdict

    def _planned(self, both: _Both) -> list[_Way]:
        return [_way(plan_regions(self.lowered, regions), {}) for regions in both]

    def _judged(self, key: str, both: _Both, expected: tuple[float, float]) -> Verdict:
        now = self.workshop.now()
        if self._end is None:
            self._end = now + EFFORTS[self.lowered.options.tune].graph_seconds
        if now >= self._end:
            return Verdict(problem="the time for measuring is spent")
        try:
            both, ways = self._ways.get(key) or (both, None)
            verdict = self._measured(both, ways, expected)
        except Exception as error:  # a mistake of ours: the graph itself may well be compiled
            if self.lowered.options.strict:
                raise
            return Verdict(problem=f"{type(error).__name__}: {error}")
        if not verdict.problem:
            _known[key] = verdict
            if self.workshop.cache is not None and not verdict.lost:
                self.workshop.cache.write("times", key, (verdict.together_us, verdict.apart_us))
        return verdict

    def _measured(self, both: _Both, ways: list[_Way] | None, expected: tuple[float, float]) -> Verdict:
        if not have_examples(_inputs(both)):
            return Verdict(problem="its sizes are known only at run time")
        ways = ways or self._planned(both)
        if not all(way.inside for way in ways):
            return Verdict(problem="what it reads depends on values")
        ways, (one, other) = self._built(ways)
        if (fault := _fault(one, self.lowered.target)) is not None:
            return Verdict(lost=f"its kernel {fault}")
        if any(isinstance(k, BaseException) for k in other):
            return Verdict(problem="a kernel around it cannot be built")
        names = {b: f"a{n}" for n, b in enumerate(dict.fromkeys(_inputs(both)))}
        runs = [_run(way, kernels, names) for way, kernels in zip(ways, (one, other), strict=True)]
        race = self._race(runs, max(plan_peak(w.planned.program, w.planned.plan.steps) for w in ways), expected)
        if race.problem:
            self.left_open = True
            return Verdict(problem=race.problem)
        together_us, apart_us = race.times_us
        return Verdict(together_us, apart_us)

    def _built(self, ways: list[_Way]) -> tuple[list[_Way], list[list[_Built]]]:
        """The ways with the schedules they would run with, and their kernels."""
        known = [Resources([]) for _ in ways]
        while True:
            found = iter(build_each([s for w in ways for s in w.sources], self.workshop.builder, self.workshop.cache))
            built = [[next(found) for _ in w.sources] for w in ways]
            after = [_next(w, own, r) for w, own, r in zip(ways, built, known, strict=True)]
            if all(mine is others for mine, others in zip(ways, after, strict=True)):
                return ways, built
            ways = after

    def _race(self, runs: Sequence[Run], bytes_beside: int, expected: tuple[float, float]) -> Race:
        """The least that each run took; a time far above the predicted one is doubted."""
        with alone:
            race = self.workshop.stopwatch.race(runs, bytes_beside)
            for _ in range(DOUBTS):
                if race.problem or all(t <= FAR * us for t, us in zip(race.times_us, expected, strict=True)):
                    break
                again = self.workshop.stopwatch.race(runs, bytes_beside)
                race = again if again.problem else Race(tuple(map(min, race.times_us, again.times_us)))
        return race

    def _stored(self, key: str) -> Verdict | None:
        times = self.workshop.cache.read_times(key) if self.workshop.cache is not None else None
        if times is None or len(times) != 2:
            return None
        _known[key] = Verdict(times[0], times[1])
        return _known[key]

    def _key(self, together: Regions, apart: Regions) -> str:
        """What decides on times: both programs and their kernels, the chip, and all that builds them."""
        parts = [self._made_by, self.workshop.stopwatch.chip, str(self.lowered.target)]
        for regions in (together, apart):
            place = {s: n for n, s in enumerate(regions.program.statements)}
            for r in regions.regions:
                assert r.chosen is not None
                kind = bool(r.chosen.schedule.shares), r.chosen.schedule.states
                parts.append(f"{[place[d] for d in (*r.members, *r.again)]} {kind}")
            parts.append(structure(regions.program))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _inputs(both: _Both) -> list[Buffer]:
    return [i for r in both for i in r.program.inputs if isinstance(i, Buffer)]


def _way(planned: PlannedGraph, choices: Choices) -> _Way:
    scheduled = {g: schedule_named(planned, name, choices.get(name)) for name, g in planned.names.items()}
    kernels = tuple(k for s in scheduled.values() for k in s.kernels)
    sources, numbers = emit_kernels(planned, list(kernels))
    host = emit_host(planned.program, planned.plan, scheduled, numbers)
    return _Way(planned, choices, host, kernels, tuple(sources), numbers)


def _next(way: _Way, built: Sequence[_Built], known: Resources) -> _Way:
    """The way with the next schedules of kernels that do not fit the chip; itself where there are none."""
    records: list[KernelRecord] = []
    for kernel in way.kernels:
        loaded = built[way.numbers[kernel]]
        if isinstance(loaded, BaseException):
            return way
        records.append(KernelRecord(kernel.name, [], 0, 0, str(kernel.schedule), "", 0.0))
        records[-1].note(getattr(loaded.function, "built", None))
    known.after(way.planned, records)
    choices = known.choices(way.planned)
    return way if choices == way.choices else _way(way.planned, choices)


def _fault(built: Sequence[_Built], target: Target) -> str | None:
    """Why a kernel with products is none that one would run."""
    for kernel in built:
        if isinstance(kernel, BaseException):
            return f"cannot be built: {str(kernel).splitlines()[0]}"
        found = getattr(kernel.function, "built", None)
        if found is not None and found.spills:
            return f"spills {found.spills} bytes at {found.registers} registers"
        if found is not None and found.shared > target.shared_bytes:
            return f"needs {found.shared} bytes of shared memory"
    return None


def _run(way: _Way, built: Sequence[_Built], names: dict[Buffer, str]) -> Run:
    inputs = [i for i in way.planned.program.inputs if isinstance(i, Buffer | Symbol)]
    taken = tuple(estimate(i.poly()) if isinstance(i, Symbol) else stand_in(i, names[i]) for i in inputs)
    return Run(way.host, [k for k in built if isinstance(k, LoadedKernel)], taken)
