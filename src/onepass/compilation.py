"""One graph, compiled or found in the cache, built and ready to run.

A hit loads the stored host program and machine code; the compiler itself is not even imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from .autograd.exact import needs_exact
from .errors import KernelBuildError
from .explain.debug import build_progress, report_stage
from .explain.planning import is_planning
from .ir.choice import FIRST, group_name
from .ir.host_json import MalformedProgram
from .ir.limits import NO_LIMITS, Limits
from .ir.options import Options
from .ir.record import CompileRecord, DecisionRecord, stage
from .ir.target import Target
from .lowering.fingerprint import graph_constants, graph_fingerprint, kernel_device, reattach
from .runtime.builders import INTERPRETED, builder_for
from .runtime.cache import Cache, default_cache
from .runtime.device import runs_here
from .runtime.entries import GraphEntry, load_graph, save_graph
from .runtime.executable import Executable
from .runtime.kernels import Builder, LoadedKernel, build_each, build_kernels
from .runtime.launcher import launcher
from .runtime.stopwatch import Stopwatch, stopwatch_for

if TYPE_CHECKING:
    from .pipeline import Wrapper


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph ready to run, and the story of how it became so."""

    call: Callable[[list[Any]], Any]
    record: CompileRecord


def compile_graph(
    graph: GraphModule, target: Target, options: Options, direction: str, stopwatch: Stopwatch | None = None
) -> Compiled:
    """Compile one AOTAutograd graph, or take it from the cache. `stopwatch`: in the place of the device's own."""
    builder = builder_for(target)
    cache = default_cache() if options.cache and options.debug < 5 else None  # 5 checks, and stores nothing
    measures = options.tune != "off" and not is_planning()
    timer = (stopwatch or stopwatch_for(target, kernel_device(graph))) if measures else None
    extra = f"{options.code_key()} {target} {direction} {needs_exact(graph)} {builder.fingerprint()}"
    key = graph_fingerprint(graph, f"{extra} {timer.chip if timer else ''}")
    constants = graph_constants(graph)
    if cache is not None and key is not None and (found := load_graph(cache, key, constants)) is not None:
        record = reattach(found.record, found.nodes, graph)
        record.cache = "hit"
        report_stage(options, record)
        try:
            return _loaded(found, _build(found, record, builder, cache), record, graph)
        except MalformedProgram:
            cache.discard_graph(key)
    if not is_planning() and kernel_device(graph) != "cpu" and _can_run(target.name, graph):
        launcher()  # where nothing can be launched nothing is compiled
    record = CompileRecord(direction=direction, target=target.name, key=key or "", cache="miss" if cache else "off")
    try:
        entry, wrapper, compiled = _compile(graph, target, options, record, builder, cache, timer)
    except KernelBuildError:
        report_stage(options, record)  # what could not be built is what people want to see
        raise
    report_stage(options, record)
    if wrapper is not None:
        compiled = replace(compiled, call=wrapper(compiled.call))
    if cache is not None and key is not None and record.cache == "miss":
        save_graph(cache, key, entry, constants)
    return compiled


def _compile(
    graph: GraphModule,
    target: Target,
    options: Options,
    record: CompileRecord,
    builder: Builder,
    cache: Cache | None,
    timer: Stopwatch | None,
) -> tuple[GraphEntry, Wrapper | None, Compiled]:
    """Plan, schedule and build; what does not fit the chip is scheduled or planned again, slow kernels are adjusted."""
    from .judging import Judge  # here, because a hit does without
    from .pipeline import PlannedGraph, compile_entry, plan_graph
    from .resources import Resources
    from .tuning import Workshop, tune_groups

    workshop = Workshop(builder, cache, timer) if timer is not None else None
    judge = Judge(graph, options, workshop) if workshop is not None else None

    def plan(target: Target, limits: Limits = NO_LIMITS) -> PlannedGraph:
        return plan_graph(graph, target, options, record, None if judge is None else partial(judge, target), limits)

    notes: list[DecisionRecord] = []
    resources = Resources(notes)
    planned = plan(target)
    while True:
        choices = resources.choices(planned)
        entry, wrapper = compile_entry(planned, record, choices)
        if problems := _problems(entry, record, builder, cache):
            limits = resources.failed(planned, problems)
            if limits is None:
                raise next(iter(problems.values()))
        else:
            kernels = _build(entry, record, builder, cache)
            limits = resources.after(planned, record.kernels)
        if limits is not planned.limits:
            planned = plan(target, limits)
        elif resources.choices(planned) == choices:
            break
    if workshop is not None and record.kernels:
        with stage(record, "tune"):
            outcomes = tune_groups(planned, choices, record, workshop)
        tuned = {n: replace(choices.get(n, FIRST), adjustment=o.adjustment) for n, o in outcomes.items()}
        if any(choice != choices.get(n, FIRST) for n, choice in tuned.items()):
            choices |= tuned
            entry, wrapper = compile_entry(planned, record, choices)
            kernels = _build(entry, record, builder, cache)
        for kernel in record.kernels:
            if (outcome := outcomes.get(kernel.name.removesuffix("_partial"))) is not None:
                kernel.tuning, kernel.trials = outcome.summary, list(outcome.trials)
    if judge is not None and judge.left_open and cache is not None:
        record.cache = "not kept"  # what another time may find
    record.decisions[:0] = notes
    return entry, wrapper, _loaded(entry, kernels, record, graph)


def _problems(
    entry: GraphEntry, record: CompileRecord, builder: Builder, cache: Cache | None
) -> dict[str, BaseException]:
    """Build every kernel of a graph: what went wrong, by the names of groups."""
    with stage(record, "build"):
        built = build_each(entry.kernels, builder, cache, build_progress())
    wrong = {s.text: b for s, b in zip(entry.kernels, built, strict=True) if isinstance(b, BaseException)}
    for error in wrong.values():
        if not isinstance(error, KernelBuildError):
            raise error
    return {group_name(k.name): wrong[k.source] for k in record.kernels if k.source in wrong}


def _build(entry: GraphEntry, record: CompileRecord, builder: Builder, cache: Cache | None) -> Sequence[LoadedKernel]:
    with stage(record, "build"):
        kernels = build_kernels(entry.kernels, builder, cache, build_progress())
        _note_resources(record, entry, kernels)
    return kernels


def _loaded(entry: GraphEntry, kernels: Sequence[LoadedKernel], record: CompileRecord, graph: GraphModule) -> Compiled:
    """The graph as it runs. What does not fit the chip must not come here: its driver refuses to load it."""
    if is_planning() or not _can_run(record.target, graph):
        return Compiled(_as_traced(graph), record)
    return Compiled(Executable(entry.host, list(kernels)).call, record)


def _note_resources(record: CompileRecord, entry: GraphEntry, kernels: Sequence[LoadedKernel]) -> None:
    """What the chip's own compiler said of every kernel, where it did."""
    built = {s.text: getattr(k.function, "built", None) for s, k in zip(entry.kernels, kernels, strict=True)}
    for kernel in record.kernels:
        kernel.note(built.get(kernel.source))


def _can_run(target: str, graph: GraphModule) -> bool:
    """Whether the kernels of a target can run on the graph's tensors; a plan for another chip cannot."""
    on_host = target in ("cpu", INTERPRETED)
    return on_host if kernel_device(graph) == "cpu" else not on_host and runs_here(target)


def _as_traced(graph: GraphModule) -> Callable[[list[Any]], Any]:
    """The graph run operation by operation."""

    def call(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()
        return graph.forward(*taken)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
