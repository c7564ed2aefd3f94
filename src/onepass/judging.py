"""Close calls on matrix products, decided by measuring: one kernel, or the library and kernels around it.

Takes a region as a program of its own, planned both ways, builds both by the usual stages, lets them race on the
device and gives a `Verdict`. Equal regions are measured once, in this process and, by the persistent cache, in later
ones. Measuring stops when the graph's seconds are spent; prediction decides what is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from .analysis.access import estimate
from .autograd.exact import needs_exact
from .codegen.host import emit_host
from .codegen.trial import have_examples, stand_in, stays_inside
from .ir.choice import FIRST
from .ir.options import Options
from .ir.poly import Symbol
from .ir.program import Buffer
from .ir.source import HostProgram, KernelSource
from .ir.structure import Unwritable, structure
from .ir.target import Target
from .lowering.fingerprint import environment_key
from .pipeline import PlannedGraph, emit_kernels, plan_regions, schedule_named
from .planner.close_calls import Verdict
from .planner.memory import plan_peak
from .planner.regions import Regions
from .runtime.kernels import LoadedKernel, build_each
from .runtime.stopwatch import Run, alone
from .tuning import EFFORTS, Workshop

_known: dict[str, Verdict] = {}  # what this process has measured


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the two ways, ready to be built."""

    planned: PlannedGraph
    host: HostProgram
    sources: tuple[KernelSource, ...]
    inside: bool  # whatever is read through integers that are 0 exists


class Judge:
    """What measures the close calls of one graph."""

    def __init__(self, graph: GraphModule, options: Options, workshop: Workshop) -> None:
        self.graph, self.options, self.workshop = graph, options, workshop
        self._made_by = f"{environment_key()} {workshop.builder.fingerprint()} {needs_exact(graph)}"
        self._answers: dict[str, Verdict] = {}
        self._end: float | None = None
        self.left_open = False  # something could not be measured now, but might be another time

    def __call__(self, target: Target, together: Regions, apart: Regions) -> Verdict:
        """What both ways take on the device; `problem` where that cannot be known."""
        try:
            key = self._key(target, together, apart)
        except Unwritable:
            return Verdict(problem="it does not run by itself")
        if key not in self._answers:
            found = _known.get(key) or self._stored(key)
            self._answers[key] = found or self._judged(key, target, together, apart)
        return self._answers[key]

    def _judged(self, key: str, target: Target, together: Regions, apart: Regions) -> Verdict:
        now = self.workshop.now()
        if self._end is None:
            self._end = now + EFFORTS[self.options.tune].graph_seconds
        if now >= self._end:
            self.left_open = True
            return Verdict(problem="the time for measuring is spent")
        try:
            verdict = self._measured(target, together, apart)
        except Exception as error:  # a mistake of ours: the graph itself may well be compiled
            if self.options.strict:
                raise
            return Verdict(problem=f"{type(error).__name__}: {error}")
        if not verdict.problem:
            _known[key] = verdict
            if self.workshop.cache is not None and not verdict.lost:
                self.workshop.cache.write_times(key, (verdict.together_us, verdict.apart_us))
        return verdict

    def _measured(self, target: Target, together: Regions, apart: Regions) -> Verdict:
        buffers = [i for r in (together, apart) for i in r.program.inputs if isinstance(i, Buffer)]
        if not have_examples(buffers):
            return Verdict(problem="its sizes are known only at run time")
        ways = [self._way(target, regions) for regions in (together, apart)]
        if not all(way.inside for way in ways):
            return Verdict(problem="what it reads depends on values")
        built = iter(build_each([s for w in ways for s in w.sources], self.workshop.builder, self.workshop.cache))
        one, other = ([next(built) for _ in w.sources] for w in ways)
        if (fault := _fault(one, target)) is not None:
            return Verdict(lost=f"its kernel {fault}")
        if any(isinstance(k, BaseException) for k in other):
            return Verdict(problem="a kernel around it cannot be built")
        names = {b: f"a{n}" for n, b in enumerate(dict.fromkeys(buffers))}
        runs = [_run(way, kernels, names) for way, kernels in zip(ways, (one, other), strict=True)]
        most = max(plan_peak(w.planned.program, w.planned.plan.steps) for w in ways)
        with alone:
            race = self.workshop.stopwatch.race(runs, most)
        if race.problem:
            self.left_open = True
            return Verdict(problem=race.problem)
        together_us, apart_us = race.times_us
        return Verdict(together_us, apart_us)

    def _way(self, target: Target, regions: Regions) -> _Way:
        planned = plan_regions(self.graph, regions, target, self.options)
        scheduled = {group: schedule_named(planned, name, FIRST) for name, group in planned.names.items()}
        kernels = [k for s in scheduled.values() for k in s.kernels]
        sources, numbers = emit_kernels(planned, kernels)
        host = emit_host(planned.program, planned.plan, scheduled, numbers)
        return _Way(planned, host, tuple(sources), all(map(stays_inside, kernels)))

    def _stored(self, key: str) -> Verdict | None:
        times = self.workshop.cache.read_times(key) if self.workshop.cache is not None else None
        if times is None or len(times) != 2:
            return None
        _known[key] = Verdict(times[0], times[1])
        return _known[key]

    def _key(self, target: Target, together: Regions, apart: Regions) -> str:
        """What decides on times: both programs and their kernels, the chip, and all that builds them."""
        parts = [self._made_by, self.workshop.stopwatch.chip, str(target)]
        for regions in (together, apart):
            place = {s: n for n, s in enumerate(regions.program.statements)}
            parts += [f"{[place[d] for d in (*r.members, *r.again)]} {r.beside} {r.tiled}" for r in regions.regions]
            parts.append(structure(regions.program))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _fault(built: Sequence[LoadedKernel | BaseException], target: Target) -> str | None:
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


def _run(way: _Way, built: Sequence[LoadedKernel | BaseException], names: dict[Buffer, str]) -> Run:
    inputs = [i for i in way.planned.program.inputs if isinstance(i, Buffer | Symbol)]
    taken = tuple(estimate(i.poly()) if isinstance(i, Symbol) else stand_in(i, names[i]) for i in inputs)
    return Run(way.host, [k for k in built if isinstance(k, LoadedKernel)], taken)
