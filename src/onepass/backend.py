"""Torch's door: the dynamo backend, its two graphs, and what happens when something cannot be done.

All private torch imports of the backend are here. A graph that cannot be compiled runs as eager does,
with the reason recorded and one warning; `strict` raises instead.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_export_module, make_boxed_func
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import _config as shape_config

from .autograd.between import bytes_of, hint
from .autograd.partition import SAVED, Saving, partition
from .autograd.row_loops import DECISIONS, loop_over_rows
from .autograd.saved import choose_saved
from .autograd.undefined import tangents_of, without_tangents
from .compilation import Compiled, compile_graph, library_products
from .errors import CompilerNotFound, OnepassError, UnmetOrder
from .explain.facts import ending, facts_of
from .explain.memoryless import has_no_memory
from .explain.planning import is_planning
from .ir.options import Options, options_of_mode
from .ir.origins import origin_of
from .ir.plan import Decision
from .ir.record import CompileRecord, SavedRecord
from .ir.target import Target, find_target
from .lowering.absent_gpu import absent_gpu
from .lowering.decompositions import decomposition_table
from .lowering.fingerprint import kernel_device
from .lowering.fused_updates import write_out_fused_updates
from .lowering.marked import mark
from .lowering.masked_attention import prepare_attention
from .lowering.random import reset_streams
from .lowering.registry import RULES
from .lowering.rerolled import reroll
from .lowering.size_one import is_right_for_one
from .plugging import Plugged, plug_into, plugged
from .runtime.device import current_chip
from .runtime.launcher import start_launcher

T = TypeVar("T")
Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]

_recorders: list[list[CompileRecord]] = []
_watchers: list[list[Compiled]] = []
_recorders_lock = threading.Lock()


class FallbackWarning(UserWarning):
    """A graph runs as eager does because it could not be compiled."""


@contextmanager
def record_compilations() -> Iterator[list[CompileRecord]]:
    """Collect the record of every graph compiled while the context is open, on any thread."""
    with _collected(_recorders) as records:
        yield records


@contextmanager
def watch_compilations() -> Iterator[list[Compiled]]:
    """Collect every graph compiled while the context is open, as it runs, on any thread."""
    with _collected(_watchers) as compiled:
        yield compiled


@contextmanager
def _collected(collectors: list[list[T]]) -> Iterator[list[T]]:
    found: list[T] = []
    with _recorders_lock:
        collectors.append(found)
    try:
        yield found
    finally:
        with _recorders_lock:
            collectors[:] = [c for c in collectors if c is not found]


def _publish(record: CompileRecord, compiled: Compiled | None = None) -> None:
    with _recorders_lock:
        for records in _recorders:
            records.append(record)
        if compiled is not None:
            for watcher in _watchers:
                watcher.append(compiled)


def choose_target(options: Options, graph: GraphModule) -> Target:
    """The target of a graph: the one asked for, else the chip its tensors are on."""
    if options.target == "auto":
        target = find_target("cpu") if kernel_device(graph) == "cpu" else current_chip()
    else:
        target = find_target(options.target)
    rounded = bool(target.products_per_us) and torch.get_float32_matmul_precision() != "highest"
    return replace(target, rounded_products=True) if rounded else target


def _multiplying_target(options: Options, joint: GraphModule) -> Target | None:
    """The target of a joint graph, if its kernels may compute products again that the library would store."""
    with suppress(OnepassError):
        target = choose_target(options, joint)
        return target if options.fuse and options.precision == "fused" and target.products_per_us else None
    return None


def _compile(
    graph: GraphModule,
    options: Options,
    direction: str,
    ended: tuple[str, str] = ("", ""),
    notes: Sequence[Decision] = (),
) -> Callable[[list[Any]], Any]:
    if direction == "inference":
        _check_any_size(graph)
    try:
        target = choose_target(options, graph)
        rewrite = plugged(graph, target, options) if direction == "inference" else None
        if direction == "inference":
            _loop_over_rows(graph, target, options, rewrite)
        compiled = compile_graph(graph, target, options, direction, rewrite=rewrite)
    except UnmetOrder:  # the user's own error, which they must see
        raise
    except Exception as error:
        if options.strict and not isinstance(error, CompilerNotFound):
            raise
        return _as_eager(graph, error, direction)
    if direction == "forward":
        compiled.record.saved = [_saved_record(*saved) for saved in graph.meta.get(SAVED, ())]
        compiled.record.saved_bytes = sum(s.bytes for s in compiled.record.saved)
    calls = {e.name for e in compiled.record.externs}
    loops = [d for d in graph.meta.get(DECISIONS, []) if d.accepted or d.producer in calls or direction != "inference"]
    compiled.record.decisions += [*notes, *loops]
    if direction != "backward":
        compiled.record.facts = facts_of(graph, ended)
    for part in (compiled, *compiled.parts):
        _publish(part.record, part)
    return compiled.call


def _loops(options: Options) -> Callable[[GraphModule], bool] | None:
    """What puts losses of products into loops over rows; None where all is to be as in eager."""
    if options.precision == "eager" or not options.fuse:
        return None
    return lambda graph: loop_over_rows(graph, choose_target(options, graph), options.strict)


def _loop_over_rows(graph: GraphModule, target: Target, options: Options, rewrite: Plugged | None) -> None:
    """Put losses of products of an inference graph into loops over rows, before it is compiled.

    A product inside a kernel is nowhere as a whole: where there is something to put into a loop, a plan says which
    products the library computes.
    """
    if (loops := _loops(options)) is None:
        return
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    if loops(trial := GraphModule(graph, copy)):
        names = library_products(graph, target, options, rewrite)
        loop_over_rows(graph, target, options.strict, names)
    else:
        graph.meta[DECISIONS] = trial.meta[DECISIONS]


def _saved_record(node: Node, why: str) -> SavedRecord:
    origin, value = origin_of(node), node.meta["val"]
    shape = ", ".join(str(hint(n)) for n in value.shape)
    text = f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    return SavedRecord(origin.node, origin.op, origin.line, text, bytes_of(node), why)


def _saving(options: Options, joint: GraphModule) -> Saving | None:
    """What decides by predicted times which values are kept; None where every operation is a kernel of its own."""
    with suppress(OnepassError):
        target = choose_target(options, joint)
        budget = min(options.memory, functorch_config.activation_memory_budget)
        if options.fuse:
            return lambda graph, outputs: choose_saved(graph, outputs, target, RULES, budget)
    return None


MOST_SETS = 8  # of tangents given, each with a backward graph of its own; torch's own limit for one function


def _for_each_set(graph: GraphModule, tangents: list[int], options: Options) -> Callable[[list[Any]], Any]:
    """A backward graph of several tangents, compiled when it is known which of them are given."""
    compiled: dict[tuple[int, ...], Callable[[list[Any]], Any]] = {}
    shapes = {p: node.meta["val"] for p, node in enumerate(graph.graph.find_nodes(op="placeholder")) if p in tangents}
    lock = threading.Lock()

    def compiled_without(missing: tuple[int, ...]) -> Callable[[list[Any]], Any]:
        with lock:
            if missing not in compiled:
                part = without_tangents(graph, missing) if missing else graph
                compiled[missing] = _compile(part, options, "backward")
            return compiled[missing]

    def call(args: list[Any]) -> Any:
        missing = tuple(k for k in tangents if args[k] is None)
        if missing not in compiled and len(compiled) >= MOST_SETS:
            for k in missing:
                args[k] = _zeros(shapes[k])
            missing = ()
        for k in reversed(missing):
            del args[k]
        return (compiled.get(missing) or compiled_without(missing))(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()


def _with_undefined(compiled: Callable[..., Any], mark: object) -> Callable[..., Any]:
    """The same function; backward is given None, not zeros, for results that nobody differentiates.

    `mark`: what the forward function is marked with; torch wraps it in functions that have its attributes.
    """

    def call(*args: Any) -> Any:
        results = compiled(*args)
        for result in results:
            node: Any = getattr(result, "grad_fn", None)
            owner = getattr(type(node), "_forward_cls", None)
            if getattr(getattr(owner, "compiled_fw", None), "onepass", None) is mark:
                if _takes_undefined(owner):
                    node.set_materialize_grads(False)
                break
        return results

    return call


def _takes_undefined(owner: Any) -> bool:
    """Whether torch's autograd function passes None on to its backward, which it makes sure of.

    Of a tensor subclass, torch would pass one None for several tensors. Compiled autograd copies torch's backward
    graph, which reads tensors: it asks the function for a key first, and is given zeros from there on.
    """
    key = getattr(owner, "_compiled_autograd_key", None)
    if getattr(owner, "maybe_subclass_metadata", owner) is not None or key is None:
        return False
    if "onepass" not in vars(owner):

        def key_with_zeros(node: Any) -> Any:
            node.set_materialize_grads(True)
            return key(node)

        owner._compiled_autograd_key = staticmethod(key_with_zeros)
        owner.onepass = True
    return True


class _Made(threading.local):
    """What is made while a graph is compiled on this thread. `mark`: of a forward with several tangents in backward.

    `ended`: why tracing ended with it, and where; `notes`: on what is plugged into it.
    """

    mark: object = None
    ended: tuple[str, str] = ("", "")
    notes: Sequence[Decision] = ()


def _as_eager(graph: GraphModule, error: Exception, direction: str) -> Callable[[list[Any]], Any]:
    _tell(error, direction)
    boxed: Callable[[list[Any]], Any] = make_boxed_func(graph.forward)
    return boxed


def _tell(error: Exception, direction: str) -> None:
    """One warning and one record of a graph that runs as eager does."""
    reason = str(error) if isinstance(error, OnepassError) else f"{type(error).__name__}: {error}"
    warnings.warn(f"onepass runs one graph as eager does: {reason}", FallbackWarning, stacklevel=3)
    _publish(CompileRecord(direction=direction, fallback=reason))


def _prepare(graph: GraphModule, inputs: Sequence[Any], options: Options, multiplies: bool) -> list[Decision]:
    """Change dynamo's graph before AOTAutograd sees it; what is to be said of it."""
    mark(graph, options.no_fuse)
    notes = plug_into(graph, inputs, options, functools.partial(choose_target, options))
    reset_streams()
    if options.fuse and multiplies:
        prepare_attention(graph)
    write_out_fused_updates(graph)
    if options.fuse and options.precision != "eager":
        reroll(graph)
    return notes


def make_backend(options: dict[str, Any] | None = None) -> Backend:
    """A dynamo backend with these options; unknown names and bad values raise here."""
    chosen = Options.make(options)
    made = _Made()

    def forward_compiler(graph: GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        call = _compile(graph, chosen, "forward", made.ended, made.notes)
        call.onepass = made.mark  # type: ignore[attr-defined]
        return call

    def backward_compiler(graph: GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        tangents = tangents_of(graph)
        return _for_each_set(graph, tangents, chosen) if len(tangents) > 1 else _compile(graph, chosen, "backward")

    def parted(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        _check_any_size(joint)
        loops, saving = _loops(chosen), _saving(chosen, joint)
        multiplying = _multiplying_target(chosen, joint)
        forward, backward = partition(joint, inputs, multiplying, chosen.strict, loops, saving, **kwargs)
        made.mark = object() if len(tangents_of(backward)) > 1 else None
        return forward, backward

    inner = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=backward_compiler,
        inference_compiler=lambda graph, _inputs: _compile(graph, chosen, "inference", made.ended, made.notes),
        partition_fn=parted,
        decompositions=decomposition_table(chosen.target, chosen.eager_random),
        keep_inference_input_mutations=True,
    )

    def traced(graph: GraphModule, example_inputs: Sequence[Any], multiplies: bool) -> Callable[..., Any]:
        made.notes = _prepare(graph, example_inputs, chosen, multiplies)
        made.mark, made.ended = None, ending(graph)
        compiled: Callable[..., Any] = inner(graph, example_inputs)
        return compiled if made.mark is None else _with_undefined(compiled, made.mark)

    def backend(graph: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        as_it_is: Callable[..., Any] = graph.forward
        if not is_planning() and any(map(_without_memory, example_inputs)):
            return as_it_is
        on_gpu = any(isinstance(i, torch.Tensor) and i.is_cuda for i in example_inputs)
        if on_gpu:
            start_launcher()  # while graphs are traced
        multiplies = on_gpu if chosen.target == "auto" else bool(find_target(chosen.target).products_per_us)
        try:
            return traced(graph, example_inputs, multiplies)
        except (TorchDynamoException, UnmetOrder):  # dynamo's own signals, such as that it must trace again
            raise
        except Exception as error:
            if chosen.strict:
                raise
            _tell(error, "inference")
            return as_it_is

    return backend


def functional_graph(graph: GraphModule, inputs: Sequence[Any], options: Options) -> tuple[GraphModule, dict[int, int]]:
    """A graph of torch.export as inference compiles it, and which of its first results are new values of which inputs.

    `inputs`: fake tensors and sizes, for all of its placeholders.
    """
    mark(graph, options.no_fuse)
    on_gpu = any(isinstance(i, torch.Tensor) and i.is_cuda for i in inputs)
    if options.fuse and on_gpu:
        for node in graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
        ):
            node.target = torch.nn.functional.scaled_dot_product_attention
        prepare_attention(graph)
    reset_streams()
    table = decomposition_table(options.target, options.eager_random)
    with torch.no_grad(), absent_gpu() if on_gpu else nullcontext():
        functional, signature = aot_export_module(graph, inputs, trace_joint=False, decompositions=table)
    for node in functional.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        functional.graph.erase_node(node)  # what is asserted was decided by this trace
    changed = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    order = {name: k for k, name in enumerate(signature.user_inputs)}
    return functional, {k: order[name] for k, name in enumerate(changed.values())}


def _without_memory(value: Any) -> bool:
    """Whether a tensor has no memory when the graph runs. Fake tensors of the trace's own mode stand for real ones."""
    context = TracingContext.try_get()
    tracing = context.fake_mode if context is not None else None
    return isinstance(value, torch.Tensor) and has_no_memory(value) and getattr(value, "fake_mode", 0) is not tracing


def onepass(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    **_: Any,
) -> Any:
    """The backend torch.compile finds by name."""
    return make_backend({**options_of_mode(mode), **(options or {})})(graph, example_inputs)


compile_fx = onepass


def jit(function: Callable[..., Any] | None = None, /, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """`torch.compile(function, backend="onepass")`; also as a decorator, with or without arguments.

    Options may be given by name, too: `jit(function, tune="max")`.
    With `dynamic=True` one compilation serves every size, 1 included where a size of 1 is not broadcast or
    squeezed and the function is one graph. `torch.compile` itself makes a graph of
    its own where a size is 0 or 1, unless `torch.fx.experimental._config.backed_size_oblivious` is set.
    """
    named = {f.name: kwargs.pop(f.name) for f in fields(Options) if f.name in kwargs}
    options = {**(options or {}), **named} or None
    Options.make({**options_of_mode(kwargs.get("mode")), **(options or {})})  # an error here, not at the first call
    if function is None:
        return lambda f: jit(f, options=options, **kwargs)
    if kwargs.get("dynamic") and not torch.compiler.is_exporting():
        return _for_any_size(function, options, **kwargs)
    return torch.compile(function, backend=onepass, options=options, **kwargs)


def _for_any_size(
    function: Callable[..., Any],
    options: dict[str, Any] | None,
    *,
    fullgraph: bool = False,
    mode: str | None = None,
    name: str | None = None,
    **kwargs: Any,
) -> Any:
    """What `torch.compile` does, with the context it has no argument for. `name` is for other backends."""
    if mode is not None and options is not None:
        raise RuntimeError("Either mode or options can be specified, but both can't be specified at the same time.")
    backend = torch._TorchCompileWrapper(onepass, mode, options, kwargs["dynamic"])  # type: ignore[no-untyped-call]
    compiler, whole = (
        torch._dynamo.optimize(backend=backend, nopython=nopython, **kwargs) for nopython in (fullgraph, True)
    )
    if not kwargs.get("disable"):
        compiler.callback = _AnySize(whole.callback, compiler.callback)
    return compiler(function)


class _AnySize:
    """Traces a function with sizes 0 and 1 like all others, if that makes one graph and it is right for them.

    Else by torch's own rule: torch guards nothing that it concludes from a size being none of them.
    """

    def __init__(self, whole: Callable[..., Any], convert: Callable[..., Any]) -> None:
        self._whole, self._convert = whole, convert
        self._torchdynamo_orig_backend = convert  # torch tells compilers apart by what they call

    def __call__(self, *frame: Any) -> Any:
        try:
            with shape_config.patch(backed_size_oblivious=True), _for_one_too():
                return self._whole(*frame)
        except Exception:
            return self._convert(*frame)


_any_size = ContextVar("_any_size", default=False)


@contextmanager
def _for_one_too() -> Iterator[None]:
    token = _any_size.set(True)
    try:
        yield
    finally:
        _any_size.reset(token)


def _check_any_size(graph: GraphModule) -> None:
    if _any_size.get() and not is_right_for_one(graph):
        raise OnepassError("a result depends on a size being 1")


def register() -> None:
    """Make the name "onepass" known to torch when no entry point does (run from a source folder)."""
    if "onepass" not in torch._dynamo.list_backends(()):
        torch._dynamo.register_backend(compiler_fn=onepass, name="onepass")
