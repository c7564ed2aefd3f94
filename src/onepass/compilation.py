"""One graph, compiled or found in the cache, built and ready to run.

A hit loads the stored host program and machine code; the compiler itself is not even imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from .explain.debug import build_progress, report_stage
from .ir.host_json import MalformedProgram
from .ir.options import Options
from .ir.record import CompileRecord, stage
from .ir.target import Target
from .lowering.fingerprint import graph_constants, graph_fingerprint, reattach
from .runtime.cache import Cache, default_cache
from .runtime.entries import GraphEntry, load_graph, save_graph
from .runtime.executable import Executable
from .runtime.kernels import build_kernels
from .runtime.toolchain import PRELUDE_FOLDER, Toolchain, find_toolchain


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph ready to run, and the story of how it became so."""

    call: Callable[[list[Any]], Any]
    record: CompileRecord


def compile_graph(graph: GraphModule, target: Target, options: Options, direction: str) -> Compiled:
    """Compile one AOTAutograd graph, or take it from the cache."""
    toolchain = find_toolchain(PRELUDE_FOLDER)
    cache = default_cache() if options.cache and options.debug < 5 else None  # 5 checks, and stores nothing
    key = graph_fingerprint(graph, f"{options.code_key()} {target} {direction} {toolchain.fingerprint()}")
    constants = graph_constants(graph)
    if cache is not None and key is not None and (found := load_graph(cache, key, constants)) is not None:
        record = reattach(found.record, found.nodes, graph)
        record.cache = "hit"
        report_stage(options, record)
        try:
            return _build(found, record, toolchain, cache)
        except MalformedProgram:
            cache.discard_graph(key)
    from .pipeline import compile_entry  # here, because a hit does without

    record = CompileRecord(direction=direction, target=target.name, key=key or "", cache="miss" if cache else "off")
    entry, wrapper = compile_entry(graph, target, options, record)
    compiled = _build(entry, record, toolchain, cache)
    if wrapper is not None:
        compiled = replace(compiled, call=wrapper(compiled.call))
    if cache is not None and key is not None:
        save_graph(cache, key, entry, constants)
    return compiled


def _build(entry: GraphEntry, record: CompileRecord, toolchain: Toolchain, cache: Cache | None) -> Compiled:
    with stage(record, "build"):
        kernels = build_kernels(entry.kernels, toolchain, cache, build_progress())
        executable = Executable(entry.host, kernels)
    return Compiled(executable.call, record)
