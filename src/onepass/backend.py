"""Torch's door: the dynamo backend, its two graphs, and what happens when something cannot be done.

All private torch imports of the backend are here. A graph that cannot be compiled runs as eager does,
with the reason recorded and one warning; `strict` raises instead.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from .autograd.partition import SAVED_BYTES, partition
from .compilation import compile_graph
from .errors import CompilerNotFound, OnepassError
from .ir.options import Options
from .ir.record import CompileRecord
from .ir.target import Target, find_target
from .lowering.decompositions import decomposition_table
from .lowering.random import reset_streams

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]

_recorders: list[list[CompileRecord]] = []
_recorders_lock = threading.Lock()


class FallbackWarning(UserWarning):
    """A graph runs as eager does because it could not be compiled."""


@contextmanager
def record_compilations() -> Iterator[list[CompileRecord]]:
    """Collect the record of every graph compiled while the context is open, on any thread."""
    records: list[CompileRecord] = []
    with _recorders_lock:
        _recorders.append(records)
    try:
        yield records
    finally:
        with _recorders_lock:
            _recorders[:] = [r for r in _recorders if r is not records]


def _publish(record: CompileRecord) -> None:
    with _recorders_lock:
        for records in _recorders:
            records.append(record)


def choose_target(options: Options, graph: GraphModule) -> Target:
    """The target of a graph: the one asked for, else the one of its tensors."""
    return find_target("cpu" if options.target == "auto" else options.target)


def _compile(graph: GraphModule, options: Options, direction: str) -> Callable[[list[Any]], Any]:
    try:
        compiled = compile_graph(graph, choose_target(options, graph), options, direction)
    except Exception as error:
        if options.strict and not isinstance(error, CompilerNotFound):
            raise
        return _as_eager(graph, error, direction)
    if direction == "forward":
        compiled.record.saved_bytes = graph.meta.get(SAVED_BYTES, 0)
    _publish(compiled.record)
    return compiled.call


def _as_eager(graph: GraphModule, error: Exception, direction: str) -> Callable[[list[Any]], Any]:
    reason = str(error) if isinstance(error, OnepassError) else f"{type(error).__name__}: {error}"
    warnings.warn(f"onepass runs one graph as eager does: {reason}", FallbackWarning, stacklevel=2)
    _publish(CompileRecord(direction=direction, fallback=reason))
    boxed: Callable[[list[Any]], Any] = make_boxed_func(graph.forward)
    return boxed


def make_backend(options: dict[str, Any] | None = None) -> Backend:
    """A dynamo backend with these options; unknown names and bad values raise here."""
    chosen = Options.make(options)

    def compiler(direction: str) -> Callable[[GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]:
        return lambda graph, _inputs: _compile(graph, chosen, direction)

    inner = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        decompositions=decomposition_table(),
        keep_inference_input_mutations=True,
    )

    def backend(graph: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        reset_streams()
        compiled: Callable[..., Any] = inner(graph, example_inputs)
        return compiled

    return backend


def onepass(
    graph: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **_: Any
) -> Any:
    """The backend torch.compile finds by name."""
    return make_backend(options)(graph, example_inputs)


compile_fx = onepass


def jit(function: Callable[..., Any] | None = None, /, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """`torch.compile(function, backend="onepass")`; also as a decorator, with or without arguments."""
    Options.make(options)  # a bad option is an error here, not at the first call
    if function is None:
        return lambda f: jit(f, options=options, **kwargs)
    return torch.compile(function, backend=onepass, options=options, **kwargs)


def register() -> None:
    """Make the name "onepass" known to torch when no entry point does (run from a source folder)."""
    if "onepass" not in torch._dynamo.list_backends(()):
        torch._dynamo.register_backend(compiler_fn=onepass, name="onepass")
