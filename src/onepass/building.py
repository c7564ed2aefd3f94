"""One graph, planned, built and tuned: takes a graph, gives its entry and its kernels.

A plan whose kernels do not fit the chip is scheduled or planned again (`resources.py`). Its kernels are then tuned.
A plan with groups that take far longer than predicted is planned again with limits for these, and the faster of both
plans stays: no fused kernel survives that was seen to be slower than its parts.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Protocol

from torch.fx import GraphModule

from .analysis.price import price
from .errors import UnmetOrder, VerifyError
from .ir.limits import NO_LIMITS, Limits
from .ir.options import Options
from .ir.plan import Group, Store
from .ir.program import Program
from .ir.record import CompileRecord, Decision, stage
from .ir.target import Target
from .judging import Judge
from .pipeline import Choices, PlannedGraph, Wrapper, choose_regions, compile_entry, lower, plan_graph
from .resources import Resources, UnbuiltGroups, build_entry
from .runtime.cache import Cache
from .runtime.entries import GraphEntry
from .runtime.kernels import Builder, LoadedKernel
from .runtime.stopwatch import Stopwatch
from .schedule.group import schedule_group
from .tuning import Outcome, Workshop, changed, expected_us, tune_groups


class Rewriter(Protocol):
    """What users plugged in."""

    def rewrite(self, program: Program, notes: list[Decision]) -> Program:
        """The program with parts of it in the users' way; `notes`: why, and why not."""


MOST_PLANS = 3  # that are tuned
FAR = 2.0  # a group that takes so many times its floor may be better off in parts


@dataclass(frozen=True, slots=True)
class Made:
    """A plan whose kernels are built. `time_us`: of its kernels, as measured or else predicted."""

    planned: PlannedGraph
    choices: Choices
    entry: GraphEntry
    wrapper: Wrapper | None
    kernels: list[LoadedKernel]
    outcomes: dict[str, Outcome]
    time_us: float = 0.0

    @property
    def calls(self) -> int:
        """Calls of the library."""
        return len(self.planned.plan.steps) - len(self.planned.names)


def planned(graph: GraphModule, target: Target, options: Options, rewrite: Rewriter | None) -> PlannedGraph:
    """The plan of a graph by predictions alone."""
    record, notes = CompileRecord(), list[Decision]()
    plugged = functools.partial(rewrite.rewrite, notes=notes) if rewrite is not None else None
    return plan_graph(lower(graph, target, options, record, plugged), record)


class Building:
    """The way of one graph; `record` is of the plan made last."""

    def __init__(
        self,
        graph: GraphModule,
        target: Target,
        options: Options,
        record: CompileRecord,
        builder: Builder,
        cache: Cache | None,
        timer: Stopwatch | None,
        rewrite: Rewriter | None = None,
    ) -> None:
        self.target, self.record = target, record
        self.notes: list[Decision] = []
        plugged = functools.partial(rewrite.rewrite, notes=self.notes) if rewrite is not None else None
        self.lowered = lower(graph, target, options, record, plugged)
        self.builder, self.cache = builder, cache
        self.workshop = Workshop(builder, cache, timer) if timer is not None else None
        self.judge = Judge(self.lowered, self.workshop) if self.workshop is not None else None
        self.resources = Resources(self.notes)

    def run(self) -> Made:
        """The graph as it should run."""
        best = self._tuned(self._fitted(NO_LIMITS))
        for _ in range(1, MOST_PLANS):
            limits = _limits_of_slow(best, self.record)
            if limits is best.planned.limits:
                break
            other = self._tuned(self._fitted(limits))
            gains = other.time_us <= best.time_us or other.calls != best.calls  # the judge has measured those
            if (len(other.planned.names), other.calls) != (len(best.planned.names), best.calls):
                self.notes.append(_plan_note(best, other, gains))
            if not gains:
                self._made(best.planned, best.choices)  # nothing is built again, but the record is of this plan
                self._note_tuning(best.outcomes)
                break
            best = other
        if self.judge is not None and self.judge.left_open and self.cache is not None:
            self.record.cache = "not kept"  # what another time may find
        self.record.decisions[:0] = self.notes
        return best

    def _plan(self, limits: Limits) -> PlannedGraph:
        if self.judge is not None:
            with stage(self.record, "plan"):
                self.judge.foresee(functools.partial(choose_regions, self.lowered, self.judge, limits))
        return plan_graph(self.lowered, self.record, self.judge, limits)

    def _made(self, planned: PlannedGraph, choices: Choices) -> Made:
        entry, wrapper = compile_entry(planned, self.record, choices)
        kernels = build_entry(entry, self.record, self.builder, self.cache)
        return Made(planned, choices, entry, wrapper, kernels, {})

    def _fitted(self, limits: Limits) -> Made:
        """A plan within limits, or tighter ones, and schedules that fit the chip."""
        planned = self._plan(limits)
        while True:
            choices = self.resources.choices(planned)
            try:
                made = self._made(planned, choices)
                limits = self.resources.after(planned, self.record.kernels)
            except UnbuiltGroups as error:
                _refuse_asked(planned, error)
                tighter = self.resources.failed(planned, error.problems)
                if tighter is None:
                    raise
                limits = tighter
            if limits is not planned.limits:
                planned = self._plan(limits)
            elif self.resources.choices(planned) == choices:
                return made

    def _tuned(self, made: Made) -> Made:
        """The plan with faster neighbours of its schedules, where the device found any."""
        planned, record = made.planned, self.record
        if self.workshop is None or not record.kernels:
            return made
        with stage(record, "tune"):
            outcomes = tune_groups(planned, made.choices, record, self.workshop)
        times = (o.time_us or expected_us(planned, n, record)[0] for n, o in outcomes.items())
        made = replace(made, outcomes=outcomes, time_us=sum(times))
        found = {n: changed(planned, n, made.choices.get(n), o.changes) for n, o in outcomes.items()}
        tuned = {name: schedule for name, schedule in found.items() if schedule is not None}
        if tuned != made.choices:
            made = replace(self._made(planned, tuned), outcomes=outcomes, time_us=made.time_us)
        self._note_tuning(outcomes)
        return made

    def _note_tuning(self, outcomes: dict[str, Outcome]) -> None:
        for kernel in self.record.kernels:
            if (outcome := outcomes.get(kernel.name.removesuffix("_partial"))) is not None:
                kernel.tuning, kernel.trials = outcome.summary, list(outcome.trials)


def _refuse_asked(planned: PlannedGraph, error: UnbuiltGroups) -> None:
    """A region that is asked to share a kernel cannot be planned in another way."""
    for name, problem in error.problems.items():
        first = next((d for d in planned.names[name].members if d.orders.fuse), None)
        if first is not None:
            fix = "Ask for a smaller region, or use onepass.fuse(backward=False) if forward alone can be one kernel."
            raise UnmetOrder("onepass.fuse", first.origin.line, f"it does not fit: {problem}", fix) from problem


def _plan_note(before: Made, after: Made, gains: bool) -> Decision:
    slow = [n for n, o in before.outcomes.items() if o.time_us]
    reason = f"measured {before.time_us:.1f} us for all kernels, {after.time_us:.1f} us with slow ones in parts"
    return Decision(slow[0], slow[-1], "parts", gains, reason, before.time_us - after.time_us, 0)


def _limits_of_slow(made: Made, record: CompileRecord) -> Limits:
    """The limits of the next plan: those of this one unless a group takes far longer than predicted.

    A kernel with products is then compared with the library on the device; another one does half as much, where
    prediction says that its parts take less than it was seen to take.
    """
    limits, target = made.planned.limits, made.planned.target
    for name, outcome in made.outcomes.items():
        group = made.planned.names[name]
        if outcome.time_us <= FAR * expected_us(made.planned, name, record)[1]:
            continue
        if group.products:
            limits = limits.doubting(group)
        elif outcome.time_us > _parts_us(group, target):
            limits = limits.without(group, target) or limits
    return limits


def _parts_us(group: Group, target: Target) -> float:
    """What the parts of a group should take: a kernel for every result, or for every operation."""
    each = (group.stores, [Store(d.buffer, d.dimensions, d.value) for d in group.members])
    return min(sum(_alone_us(Group((s,), group.members), target) for s in stores) for stores in each)


def _alone_us(part: Group, target: Target) -> float:
    try:
        return sum(price(k, target).total_us for k in schedule_group(part, target, "part").kernels)
    except VerifyError:  # there is no such kernel
        return math.inf
