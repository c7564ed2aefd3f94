"""One graph, compiled or found in the cache, built and ready to run.

A hit loads the stored host program and machine code; the compiler itself is not even imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from .autograd.exact import needs_exact
from .errors import KernelBuildError
from .explain.debug import report_stage
from .explain.planning import is_planning
from .ir.host_json import MalformedProgram
from .ir.options import Options
from .ir.record import CompileRecord
from .ir.row_loop import RowLoop
from .ir.target import Target
from .lowering.fingerprint import graph_constants, graph_fingerprint, kernel_device, reattach
from .resources import build_entry
from .runtime.builders import INTERPRETED, builder_for
from .runtime.cache import default_cache
from .runtime.device import runs_here
from .runtime.entries import GraphEntry, load_graph, save_graph
from .runtime.executable import Executable
from .runtime.kernels import LoadedKernel
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
    measures = options.tune != "off" and not is_planning()
    timer = (stopwatch or stopwatch_for(target, kernel_device(graph))) if measures else None
    extra = f"{options.code_key()} {target} {direction} {needs_exact(graph)} {builder.fingerprint()}"
    # What users plug in has no key that holds in another process.
    key = graph_fingerprint(graph, f"{extra} {timer.chip if timer else ''}") if rewrite is None else None
    constants = graph_constants(graph)
    if cache is not None and key is not None and (found := load_graph(cache, key, constants)) is not None:
        record = reattach(found.record, found.nodes, graph)
        record.cache = "hit"
        report_stage(options, record)
        try:
            return _loaded(found, build_entry(found, record, builder, cache), record, graph)
        except MalformedProgram:
            cache.discard("graphs", key)
    if not is_planning() and kernel_device(graph) != "cpu" and can_run(target.name, graph):
        launcher()  # where nothing can be launched nothing is compiled
    record = CompileRecord(direction=direction, target=target.name, key=key or "", cache="miss" if cache else "off")
    from .building import Building  # here, because a hit does without

    try:
        made = Building(graph, target, options, record, builder, cache, timer, rewrite).run()
        compiled = replace(_loaded(made.entry, made.kernels, record, graph), made=made)
    except KernelBuildError:
        report_stage(options, record)  # what could not be built is what people want to see
        raise
    report_stage(options, record)
    if made.wrapper is not None:
        compiled = replace(compiled, call=made.wrapper(compiled.call))
    if cache is not None and key is not None and record.cache == "miss":
        save_graph(cache, key, made.entry, constants)
    return compiled


def _loaded(entry: GraphEntry, kernels: Sequence[LoadedKernel], record: CompileRecord, graph: GraphModule) -> Compiled:
    """The graph as it runs. What does not fit the chip must not come here: its driver refuses to load it."""
    if is_planning() or not can_run(record.target, graph):
        return Compiled((is_planning() and _as_promised(graph)) or _as_traced(graph), record)
    executable = Executable(entry.host, list(kernels))
    return Compiled(executable.call, record, executable=executable)


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
