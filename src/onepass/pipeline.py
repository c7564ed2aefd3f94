"""The compiler on one page: graph -> Program -> FusionPlan -> Kernels -> sources -> Executable.

Every stage once, in order, verified in between; `CompileRecord` keeps what each did. A graph found in
the cache skips all of it but the building of its executable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.fx import GraphModule

from .codegen.c import emit_c
from .codegen.c_ops import PRELUDE
from .codegen.host import emit_host
from .explain.debug import build_progress, report_stage
from .explain.measure import measure
from .ir.host_json import MalformedProgram
from .ir.kernel import Kernel, ScheduledGroup
from .ir.options import Options
from .ir.plan import Group
from .ir.record import CompileRecord
from .ir.source import KernelSource
from .ir.target import Target
from .ir.verify import verify_program
from .ir.verify_kernel import verify_kernel, verify_plan
from .lowering.fingerprint import graph_constants, graph_fingerprint, node_names, reattach
from .lowering.graph import lower_graph
from .planner.plan import plan_fusion
from .runtime.cache import Cache, default_cache
from .runtime.entries import GraphEntry, load_graph, save_graph
from .runtime.executable import Executable
from .runtime.kernels import build_kernels
from .runtime.toolchain import Toolchain, find_toolchain
from .schedule.group import schedule_group


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph ready to run, and the story of how it became so."""

    executable: Executable
    record: CompileRecord


def compile_graph(graph: GraphModule, target: Target, options: Options, direction: str) -> Compiled:
    """Compile one AOTAutograd graph."""
    toolchain = find_toolchain(PRELUDE.parent)
    cache = default_cache() if options.cache else None
    key = graph_fingerprint(graph, f"{options.code_key()} {target} {direction} {toolchain.fingerprint()}")
    constants = graph_constants(graph)
    if cache is not None and key is not None and (found := load_graph(cache, key, constants)) is not None:
        record = reattach(found.record, found.nodes, graph)
        record.cache = "hit"
        report_stage(options, record)
        try:
            return _finish(found, record, toolchain, cache)
        except MalformedProgram:
            cache.discard_graph(key)
    record = CompileRecord(direction=direction, target=target.name, key=key or "", cache="miss" if cache else "off")
    entry = _compile(graph, target, options, record)
    compiled = _finish(entry, record, toolchain, cache)
    if cache is not None and key is not None:
        save_graph(cache, key, entry, constants)
    return compiled


def _compile(graph: GraphModule, target: Target, options: Options, record: CompileRecord) -> GraphEntry:
    with _stage(record, "lower"):
        program = lower_graph(graph, precision=options.precision, strict=options.strict)
        verify_program(program)
    with _stage(record, "plan"):
        plan = plan_fusion(program, target, options)
        verify_plan(program, plan)
    with _stage(record, "schedule"):
        scheduled: dict[Group, ScheduledGroup] = {}
        for step in plan.steps:
            if isinstance(step, Group):
                scheduled[step] = schedule_group(step, target, f"k{len(scheduled)}_{_stem(step)}")
        kernels = [k for s in scheduled.values() for k in s.kernels]
        for kernel in kernels:
            verify_kernel(kernel)
    with _stage(record, "emit"):
        sources, numbers = _emit(kernels)
        host = emit_host(program, plan, scheduled, numbers)
    measure(record, program, plan, scheduled, {k: sources[n] for k, n in numbers.items()}, target)
    report_stage(options, record)
    return GraphEntry(host, tuple(sources), record, node_names(graph))


def _emit(kernels: list[Kernel]) -> tuple[list[KernelSource], dict[Kernel, int]]:
    """Sources without repetition, and which one each kernel uses."""
    sources: list[KernelSource] = []
    by_key: dict[str, int] = {}
    numbers: dict[Kernel, int] = {}
    for kernel in kernels:
        source = emit_c(kernel)
        if source.key not in by_key:
            by_key[source.key] = len(sources)
            sources.append(source)
        numbers[kernel] = by_key[source.key]
    return sources, numbers


def _finish(entry: GraphEntry, record: CompileRecord, toolchain: Toolchain, cache: Cache | None) -> Compiled:
    with _stage(record, "build"):
        kernels = build_kernels(entry.kernels, toolchain, cache, build_progress())
        executable = Executable(entry.host, kernels)
    return Compiled(executable, record)


def _stem(group: Group) -> str:
    """A name people recognise: the operations of the group, shortened."""
    ops = list(dict.fromkeys(o.op.split(".")[-2] if "." in o.op else o.op for o in group.origins))
    text = "_".join("".join(c if c.isalnum() else "_" for c in op) for op in ops[-3:])
    return text[:48] or "kernel"


@contextmanager
def _stage(record: CompileRecord, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    record.stage_seconds[name] = record.stage_seconds.get(name, 0.0) + time.perf_counter() - start
