"""The compiler on one page: graph -> Program -> FusionPlan -> Kernels -> sources and host program.

Every stage once, in order, verified in between; `CompileRecord` keeps what each did. Building and
caching the result is `compilation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch.fx import GraphModule

from .autograd.exact import needs_exact
from .codegen.c import emit_c
from .codegen.host import emit_host
from .codegen.triton import emit_triton
from .explain.checking import checked, observed
from .explain.debug import report_stage
from .explain.measure import measure
from .ir.kernel import Kernel, ScheduledGroup
from .ir.options import Options
from .ir.plan import Group
from .ir.record import CompileRecord, stage
from .ir.source import KernelSource
from .ir.target import Target
from .ir.verify import verify_program
from .ir.verify_kernel import verify_kernel, verify_plan
from .lowering.fingerprint import kernel_device, node_names
from .lowering.graph import lower_graph
from .planner.contractions import choose_contractions
from .planner.plan import plan_fusion
from .runtime.entries import GraphEntry
from .schedule.group import schedule_group

CHECK_LEVEL = 5  # of the debug ladder
Call: TypeAlias = Callable[[list[Any]], Any]
Wrapper: TypeAlias = Callable[[Call], Call]


def compile_entry(
    graph: GraphModule,
    target: Target,
    options: Options,
    record: CompileRecord,
    candidates: Mapping[str, int] | None = None,
) -> tuple[GraphEntry, Wrapper | None]:
    """What a graph becomes, ready to be built, and what to wrap around its call, if it is to be checked.

    `candidates`: which schedule of a group is wanted, by the name of its kernels, where it is not the first.
    """
    with stage(record, "lower"):
        device = "" if target.language == "c" else kernel_device(graph)
        program = lower_graph(
            graph,
            precision=options.precision,
            strict=options.strict,
            wide_statistics=target.wide_statistics,
            device=device,
        )
        verify_program(program)
    with stage(record, "plan"):
        regions = choose_contractions(program, target, options)
        program = regions.program
        plan = plan_fusion(regions, target, options)
        verify_plan(program, plan)
    with stage(record, "schedule"):
        scheduled: dict[Group, ScheduledGroup] = {}
        for step in plan.steps:
            if isinstance(step, Group):
                name = f"k{len(scheduled)}_{_stem(step)}"
                scheduled[step] = schedule_group(step, target, name, (candidates or {}).get(name, 0))
        kernels = [k for s in scheduled.values() for k in s.kernels]
        for kernel in kernels:
            verify_kernel(kernel)
    with stage(record, "emit"):
        sources, numbers = _emit(kernels, target, needs_exact(graph))
        watched = observed(program, plan) if options.debug >= CHECK_LEVEL else program
        host = emit_host(watched, plan, scheduled, numbers)
    measure(record, program, plan, scheduled, {k: sources[n] for k, n in numbers.items()}, target)
    report_stage(options, record)
    entry = GraphEntry(host, tuple(sources), record, node_names(graph))
    if options.debug < CHECK_LEVEL:
        return entry, None
    return entry, lambda call: checked(call, program, plan)


def _emit(kernels: list[Kernel], target: Target, exact: bool) -> tuple[list[KernelSource], dict[Kernel, int]]:
    """Sources without repetition, and which one each kernel uses."""
    sources: list[KernelSource] = []
    by_key: dict[str, int] = {}
    numbers: dict[Kernel, int] = {}
    for kernel in kernels:
        tiles = target.language == "triton"
        source = emit_triton(kernel, exact, target.hardware_tanh) if tiles else emit_c(kernel)  # C never contracts
        if source.key not in by_key:
            by_key[source.key] = len(sources)
            sources.append(source)
        numbers[kernel] = by_key[source.key]
    return sources, numbers


def _stem(group: Group) -> str:
    """A name people recognise: the operations of the group, shortened."""
    ops = list(dict.fromkeys(o.op.split(".")[-2] if "." in o.op else o.op for o in group.origins))
    text = "_".join("".join(c if c.isalnum() else "_" for c in op) for op in ops[-3:])
    return text[:48] or "kernel"
