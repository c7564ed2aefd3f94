"""The compiler on one page: graph -> Program -> FusionPlan -> Kernels -> sources and host program.

Every stage once, in order, verified in between; `CompileRecord` keeps what each did. Building and
caching the result is `compilation.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from torch.fx import GraphModule

from .analysis.answers import Answer, Answers
from .analysis.layouts import lay_out
from .analysis.parts import unroll
from .autograd.exact import needs_exact
from .codegen.c import emit_c
from .codegen.host import emit_host
from .codegen.triton import emit_triton
from .explain.checking import checked, observed, watched
from .explain.measure import measure
from .ir.kernel import Kernel, ScheduledGroup
from .ir.limits import NO_LIMITS, Limits
from .ir.options import Options
from .ir.plan import FusionPlan, Group, Shared
from .ir.program import Program
from .ir.record import CompileRecord, stage
from .ir.schedule import Schedule
from .ir.source import KernelSource
from .ir.target import Target
from .ir.verify import verify_kernel, verify_plan, verify_program
from .lowering.fingerprint import kernel_device, node_names
from .lowering.graph import lower_graph
from .planner.close_calls import Judge
from .planner.contractions import choose_contractions
from .planner.plan import plan_fusion
from .planner.regions import Regions
from .planner.setting import Setting
from .runtime.entries import GraphEntry
from .schedule.group import choose, choose_products, neighbours, schedule_group, share, smaller
from .schedule.overwriting import overwrite_rows
from .schedule.shared_launch import share_launch

Call: TypeAlias = Callable[[list[Any]], Any]
Wrapper: TypeAlias = Callable[[Call], Call]
Choices: TypeAlias = Mapping[str, Schedule]  # by the name of a group's kernels
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class LoweredGraph:
    """What a graph computes, for a target. `answers`: what its plans have in common."""

    graph: GraphModule
    target: Target
    options: Options
    program: Program
    answers: Answers


@dataclass(frozen=True, eq=False)
class PlannedGraph:
    """What the schedules that are tried for a graph have in common; `names` are those of the groups' kernels.

    `program`: the graph's, or a part of it, with some products as definitions.
    """

    lowered: LoweredGraph
    program: Program
    plan: FusionPlan
    names: dict[str, Group]
    limits: Limits = NO_LIMITS

    @property
    def target(self) -> Target:
        return self.lowered.target

    @functools.cached_property
    def shared(self) -> set[str]:
        """Names of groups that share a launch: their schedules are those of the plan."""
        inside = {g for groups in self.plan.launches for g in groups}
        return {name for name, group in self.names.items() if group in inside}

    def name_of(self, group: Group) -> str:
        return next(name for name, g in self.names.items() if g is group)

    def neighbours(self, name: str, schedule: Schedule | None = None) -> dict[str, Schedule]:
        """Schedules beside the planned one of a group, or beside another, by how they differ."""
        own = schedule or schedule_named(self, name).main.schedule
        return _of_equal(self.lowered, self.limits, self.names[name], own, "neighbours", neighbours).value

    def smaller(self, name: str, count: int) -> list[Schedule]:
        """The next schedules of a group, each with fewer values per thread."""
        less = lambda g, target: smaller(g, target, count)  # noqa: E731
        return _of_equal(self.lowered, self.limits, self.names[name], None, ("smaller", count), less).value


def lower(
    graph: GraphModule,
    target: Target,
    options: Options,
    record: CompileRecord,
    rewrite: Callable[[Program], Program] | None = None,
) -> LoweredGraph:
    """What a graph computes. `rewrite`: what users plug in (`plugging/`)."""
    with stage(record, "lower"):
        device = "" if target.language == "c" else kernel_device(graph)
        program = lower_graph(
            graph,
            precision=options.precision,
            strict=options.strict,
            wide_statistics=target.wide_statistics,
            wide_products=target.wide_products,
            device=device,
        )
        program = lay_out(unroll(rewrite(program) if rewrite is not None else program))
        verify_program(program)
    return LoweredGraph(graph, target, options, program, Answers())


def plan_graph(
    lowered: LoweredGraph, record: CompileRecord, judge: Judge | None = None, limits: Limits = NO_LIMITS
) -> PlannedGraph:
    """Which operations of a graph share a kernel.

    `judge`: measures what prediction leaves open. `limits`: of operations whose kernels spilled.
    """
    with stage(record, "plan"):
        return plan_regions(lowered, choose_regions(lowered, judge, limits), limits)


def choose_regions(lowered: LoweredGraph, judge: Judge | None, limits: Limits) -> Regions:
    """What becomes of a graph's matrix products."""
    return choose_contractions(lowered.program, _setting(lowered, limits), judge)


def _setting(lowered: LoweredGraph, limits: Limits) -> Setting:
    def shared(groups: Sequence[Group], alone_us: Sequence[float]) -> Shared:
        return share(groups, lowered.target, alone_us, lambda g: _built(lowered, limits, g, g.schedule).value)

    return Setting(lowered.target, lowered.options, choose, choose_products, shared, lowered.answers, limits)


def plan_regions(lowered: LoweredGraph, regions: Regions, limits: Limits = NO_LIMITS) -> PlannedGraph:
    """The plan of a program, or of a part of it, whose matrix products are decided on."""
    plan = plan_fusion(regions, _setting(lowered, limits))
    verify_plan(regions.program, plan)
    groups = [step for step in plan.steps if isinstance(step, Group)]
    names = {f"k{number}_{_stem(group)}": group for number, group in enumerate(groups)}
    return PlannedGraph(lowered, regions.program, plan, names, limits)


def compile_entry(planned: PlannedGraph, record: CompileRecord, choices: Choices) -> tuple[GraphEntry, Wrapper | None]:
    """What a graph becomes, ready to be built, and what to wrap around its call, if it is to be checked.

    `choices`: the schedule that is wanted of a group, by the name of its kernels, where it is not the planned one.
    """
    target, program, plan = planned.target, planned.program, planned.plan
    with stage(record, "schedule"):
        scheduled = {g: schedule_named(planned, n, choices.get(n)) for n, g in planned.names.items()}
        plan, scheduled = overwrite_rows(plan, scheduled)
        launched = share_launches(plan, scheduled)
    with stage(record, "emit"):
        sources, numbers = emit_kernels(planned, [k for s in launched.values() for k in s.kernels])
        shown = observed(program, plan) if planned.lowered.options.checks else program
        host = emit_host(shown, plan, launched, numbers)
    texts = {k: sources[n] for k, n in numbers.items()}
    measure(record, program, plan, (scheduled, launched), texts, target)
    entry = GraphEntry(host, tuple(sources), record, node_names(planned.lowered.graph))
    return entry, _wrapper(planned.lowered.options, program, plan)


def _wrapper(options: Options, program: Program, plan: FusionPlan) -> Wrapper | None:
    """What the options ask to be done around each call, if anything."""

    def wrapped(call: Call) -> Call:
        call = checked(call, program, plan) if options.checks else call
        return watched(call, program, options.watch) if options.watch else call

    return wrapped if options.observes else None


def schedule_named(planned: PlannedGraph, name: str, schedule: Schedule | None = None) -> ScheduledGroup:
    """The kernels of one group, by another schedule if one is given."""

    group = planned.names[name]
    answer = _built(planned.lowered, planned.limits, group, schedule)
    return answer.value.over(answer.own, name, group.origins)


def _built(lowered: LoweredGraph, limits: Limits, group: Group, schedule: Schedule | None) -> Answer[ScheduledGroup]:
    """The kernels of a group, without names."""

    def built(group: Group, target: Target) -> ScheduledGroup:
        scheduled = schedule_group(group, target, "")
        for kernel in scheduled.kernels:
            verify_kernel(kernel)
        return scheduled

    return _of_equal(lowered, limits, group, schedule, "built", built)


def _of_equal(
    lowered: LoweredGraph,
    limits: Limits,
    group: Group,
    schedule: Schedule | None,
    about: Hashable,
    answer: Callable[[Group, Target], T],
) -> Answer[T]:
    """An answer about a group; equal groups have the same one, over their own buffers."""
    target = limits.narrowed(lowered.target, group.members)
    wanted = replace(group, schedule=schedule or group.schedule)
    return lowered.answers.ask((about, target, wanted.schedule), group.stores, (), lambda: answer(wanted, target))


def share_launches(plan: FusionPlan, scheduled: dict[Group, ScheduledGroup]) -> dict[Group, ScheduledGroup]:
    """Groups that share a launch leave their kernels to the first of them."""
    launched = dict(scheduled)
    for groups in plan.launches:
        launched |= dict.fromkeys(groups, ScheduledGroup(()))
        launched[groups[0]] = share_launch([scheduled[g] for g in groups])
        for kernel in launched[groups[0]].kernels:
            verify_kernel(kernel)
    return launched


def emit_kernels(
    planned: PlannedGraph, kernels: list[Kernel], leading: bool = True
) -> tuple[list[KernelSource], dict[Kernel, int]]:
    """Sources without repetition, and which one each kernel uses. `leading`: nothing of the graph runs before them."""
    target, exact = planned.target, needs_exact(planned.lowered.graph)
    sources: list[KernelSource] = []
    by_key: dict[str, int] = {}
    emitted: dict[tuple[Kernel, bool], int] = {}
    numbers: dict[Kernel, int] = {}
    for position, kernel in enumerate(kernels):
        # Waiting costs a little, and what comes before a graph is seldom a kernel.
        overlaps = target.overlaps and (position > 0 or not leading)
        same = (kernel.like or kernel, overlaps)
        if same not in emitted:
            source = emit_triton(kernel, exact, overlaps) if target.language == "triton" else emit_c(kernel)
            emitted[same] = by_key.setdefault(source.key, len(sources))
            sources += [source] if emitted[same] == len(sources) else []
        numbers[kernel] = emitted[same]
    return sources, numbers


def _stem(group: Group) -> str:
    """A name people recognise: the operations of the group, shortened."""
    ops = list(dict.fromkeys(o.op.split(".")[-2] if "." in o.op else o.op for o in group.origins))
    text = "_".join("".join(c if c.isalnum() else "_" for c in op) for op in ops[-3:])
    return text[:48] or "kernel"
