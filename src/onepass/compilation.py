"""One graph, compiled or found in the cache, built and ready to run.

A hit loads the stored host program and machine code; the compiler itself is not even imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from .autograd.exact import needs_exact
from .errors import KernelBuildError
from .explain.debug import report_stage
from .explain.planning import is_planning
from .ir.host_json import MalformedProgram
from .ir.options import Options
from .ir.program import Extern
from .ir.record import CompileRecord
from .ir.row_loop import RowLoop
from .ir.source import HostProgram
from .ir.target import Target, find_target
from .lowering.fingerprint import graph_constants, graph_fingerprint, kernel_device, reattach
from .resources import build_entry
from .runtime.builders import INTERPRETED, builder_for
from .runtime.cache import Cache, default_cache
from .runtime.device import has_other_ranks, runs_here
from .runtime.entries import GraphEntry, load_graph, save_graph
from .runtime.executable import Executable
from .runtime.kernels import Builder, LoadedKernel
from .runtime.launcher import launcher
from .runtime.stopwatch import Stopwatch, stopwatch_for

if TYPE_CHECKING:
    from .building import Made, Rewriter


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph ready to run, and the story of how it became so."""

    call: Callable[[list[Any]], Any]
    record: CompileRecord
    parts: tuple[Compiled, ...] = ()  # its loops' bodies
    executable: Executable | None = None  # None where it runs operation by operation
    made: Made | None = None  # None where it was found in the cache
    entry: GraphEntry | None = None


def compile_graph(
    graph: GraphModule,
    target: Target,
    options: Options,
    direction: str,
    stopwatch: Stopwatch | None = None,
    rewrite: Rewriter | None = None,
) -> Compiled:
    """Compile one AOTAutograd graph, or take it from the cache. `stopwatch`: in the place of the device's own.

    `rewrite`: what users plugged in.
    """
    bodies = list(_compile_bodies(graph, target, options, stopwatch))
    compiled = _compile_alone(graph, target, options, direction, stopwatch, rewrite)
    return replace(compiled, parts=tuple(bodies))


def _compile_bodies(
    graph: GraphModule, target: Target, options: Options, stopwatch: Stopwatch | None
) -> Iterator[Compiled]:
    """Compile what the graph's loops do for each chunk."""
    for name, loop in list(vars(graph).items()):
        if isinstance(loop, RowLoop) and loop.call is None:
            compiled = _compile_alone(loop.body, target, options, "rows", stopwatch)
            setattr(graph, name, replace(loop, call=compiled.call))
            compiled.record.repeats = loop.repeats
            yield compiled


def _compile_alone(
    graph: GraphModule,
    target: Target,
    options: Options,
    direction: str,
    stopwatch: Stopwatch | None,
    rewrite: Rewriter | None = None,
) -> Compiled:
    builder = builder_for(target)
    cache = default_cache() if options.cache and not options.observes else None  # what is stored has no wrapper
    measures = options.tune != "off" and not is_planning() and not has_other_ranks()
    timer = (stopwatch or stopwatch_for(target, kernel_device(graph))) if measures else None
    extra = f"{options.code_key()} {target} {direction} {needs_exact(graph)} {builder.fingerprint()}"
    # What users plug in has no key that holds in another process.
    key = graph_fingerprint(graph, f"{extra} {timer.chip if timer else ''}") if rewrite is None else None
    record = CompileRecord(direction=direction, target=target.name, key=key or "", cache="miss" if cache else "off")
    if cache is None or key is None:
        return _built(graph, options, record, target, builder, cache, timer, rewrite)
    found = _found(cache, key, graph, options, builder)
    if found is not None:
        return found
    with cache.building(key):  # of many processes one compiles, the others read
        found = _found(cache, key, graph, options, builder)
        return found or _built(graph, options, record, target, builder, cache, timer, rewrite)


def _found(cache: Cache, key: str, graph: GraphModule, options: Options, builder: Builder) -> Compiled | None:
    """The graph as the cache has it."""
    found = load_graph(cache, key, graph_constants(graph))
    if found is None:
        return None
    record = reattach(found.record, found.nodes, graph)
    record.cache = "hit"
    report_stage(options, record)
    try:
        return _loaded(found, build_entry(found, record, builder, cache), record, graph, options)
    except MalformedProgram:
        cache.discard("graphs", key)
        return None


def _built(
    graph: GraphModule,
    options: Options,
    record: CompileRecord,
    target: Target,
    builder: Builder,
    cache: Cache | None,
    timer: Stopwatch | None,
    rewrite: Rewriter | None,
) -> Compiled:
    if not is_planning() and kernel_device(graph) != "cpu" and can_run(target.name, graph):
        launcher()  # where nothing can be launched nothing is compiled
    from .building import Building  # here, because a hit does without

    try:
        made = Building(graph, target, options, record, builder, cache, timer, rewrite).run()
        compiled = replace(_loaded(made.entry, made.kernels, record, graph, options), made=made)
    except KernelBuildError:
        report_stage(options, record)  # what could not be built is what people want to see
        raise
    report_stage(options, record)
    if made.wrapper is not None:
        compiled = replace(compiled, call=made.wrapper(compiled.call))
    if cache is not None and record.key and record.cache == "miss":
        save_graph(cache, record.key, made.entry, graph_constants(graph))
    return compiled


def _loaded(
    entry: GraphEntry, kernels: Sequence[LoadedKernel], record: CompileRecord, graph: GraphModule, options: Options
) -> Compiled:
    """The graph as it runs. What does not fit the chip must not come here: its driver refuses to load it."""
    wanted = options.graphs != "off" and record.direction != "rows"  # a loop over rows is part of the graph around it
    record.graph = _recordable(entry.host, record.target) if wanted else ""
    if is_planning() or not can_run(record.target, graph):
        return Compiled((is_planning() and _as_promised(graph)) or _as_traced(graph), record, entry=entry)
    executable = Executable(entry.host, list(kernels))
    call = _as_graph(executable, record, graph, options.graphs) if wanted else executable.call
    return Compiled(call, record, executable=executable, entry=entry)


def _recordable(host: HostProgram, target: str) -> str:
    """How a program will run as a CUDA graph, or why it will not."""
    from .runtime.graph_parts import LATER, NotRecordable, take_apart  # here, because others do without

    if not target.startswith("sm_"):
        return "none: only NVIDIA's GPUs have them"
    try:
        take_apart(host)
    except NotRecordable as error:
        return f"none: {error}"
    return LATER


def _as_graph(
    executable: Executable, record: CompileRecord, graph: GraphModule, mode: str
) -> Callable[[list[Any]], Any]:
    """The executable as a CUDA graph, where it can be."""
    if record.graph.startswith("none"):
        return executable.call
    from .runtime.graph_driver import graph_driver
    from .runtime.graphs import Graphs

    target = find_target(record.target)
    steps = [k.predicted_us for k in record.kernels]
    steps += [e.predicted_us or e.bytes_moved / target.memory_bytes_per_us for e in record.externs]
    working = sum(max(0.0, t - target.launch_us) for t in steps)  # starting the next one takes a graph next to nothing
    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    dynamic = [n for n, value in zip(executable.host.inputs, values, strict=True) if _has_any_size(value)]
    return Graphs(executable, partial(graph_driver, target), mode, record, working, dynamic).call


def _has_any_size(value: Any) -> bool:
    """Whether the shape or the strides of a tensor are known at run time only."""
    return isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))


def library_products(graph: GraphModule, target: Target, options: Options, rewrite: Rewriter | None = None) -> set[str]:
    """The products of a graph that the library computes, by the names of their nodes; predicted, nothing is built."""
    from .building import planned

    plan = planned(graph, target, options, rewrite).plan
    return {s.origin.node for s in plan.steps if isinstance(s, Extern) and s.contraction is not None}


def can_run(target: str, graph: GraphModule) -> bool:
    """Whether the kernels of a target can run on the graph's tensors; a plan for another chip cannot."""
    on_host = target in ("cpu", INTERPRETED)
    return on_host if kernel_device(graph) == "cpu" else not on_host and runs_here(target)


def _as_promised(graph: GraphModule) -> Callable[[list[Any]], Any] | None:
    """Results without values, where their sizes are fixed: all that tensors without memory have."""
    results = [n.meta["val"] if isinstance(n, Node) else n for n in graph.graph.output_node().args[0]]
    tensors = [x for x in results if isinstance(x, torch.Tensor)]
    if any(isinstance(n, torch.SymInt) for n in (*results, *(n for x in tensors for n in (*x.shape, *x.stride())))):
        return None

    def call(args: list[Any]) -> Any:
        args.clear()
        return [_empty(x) if isinstance(x, torch.Tensor) else x for x in results]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _as_traced(graph: GraphModule) -> Callable[[list[Any]], Any]:
    """The graph run operation by operation."""

    def call(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()
        return graph.forward(*taken)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
