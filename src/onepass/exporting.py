"""`onepass.export`: a function or module, compiled to a file that `onepass.load` runs without a compiler.

torch.export captures; AOTAutograd makes the graph that `torch.compile` would; it is compiled as always, for a chip that
may be absent. The file holds what the cache keeps of a graph, machine code, weights and what they need to run.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from .backend import choose_target, functional_graph
from .compilation import compile_graph
from .errors import OnepassError, UnexportableProgram
from .explain.capture import uncompiled
from .ir import source as ir
from .ir.options import Options
from .ir.source import KernelSource
from .ir.target import Target, find_target
from .lowering.fingerprint import graph_constants
from .runtime.archive import is_dense, write_archive
from .runtime.builders import INTERPRETED, builder_for
from .runtime.cache import default_cache
from .runtime.entries import GraphEntry, entry_to_json
from .runtime.kernels import Builder, artifact_key, processors
from .runtime.launcher import build_launcher
from .runtime.loading import KERNELS, MANIFEST, PROGRAM
from .runtime.requirements import FORMAT, Requirements, glibc_of, machine_here, needed_openmp, schema_of
from .runtime.scratch import scratch_folder
from .runtime.shipped import LAUNCHER
from .runtime.signature import Inputs, Leaf
from .runtime.toolchain import Toolchain
from .version import VERSION

_OWN = ("aten", "prims", "onepass")
_KEEP_OUT = "Keep it out of the exported function, or write it with torch's own operators."


def export(
    function: Callable[..., Any] | ExportedProgram,
    /,
    *args: Any,
    path: str | os.PathLike[str],
    target: str | None = None,
    dynamic_shapes: Any = None,
    weights: bool = True,
    march: str = "native",
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Compile `function(*args, **kwargs)`, forward alone, into one file for `onepass.load`.

    Takes a function, a module or what `torch.export.export` returned (then without arguments). `target`: a chip of the
    table, which need not be here. `dynamic_shapes`: as of torch.export. `weights=False` leaves parameters and buffers
    out of the file. `march`: of a program for CPUs, the processor as the C compiler names it, such as "x86-64-v3".
    """
    chosen = Options.make({**(options or {}), **({"target": target} if target else {})})
    program = _captured(function, args, kwargs, dynamic_shapes)
    if weights and any(t.device.type == "meta" for t in program.state_dict.values()):
        raise UnexportableProgram("its parameters have no values", "Leave them out: weights=False.")
    graph = _Graph(program, None if chosen.target == "auto" else find_target(chosen.target))
    chip = choose_target(chosen, graph.compiled_from(chosen))
    if chip.name == INTERPRETED:
        raise UnexportableProgram("Triton's interpreter makes no machine code", "Name a chip: target='sm_90'.")
    functional = graph.functional
    entry = compile_graph(functional, chip, replace(chosen, strict=True), "inference").entry
    assert entry is not None
    builder = builder_for(chip)
    if isinstance(builder, Toolchain) and march != "native":
        builder = builder.made_for(march)
    constants = graph_constants(functional)
    data = entry_to_json(entry, constants)
    if data is None or not all(isinstance(c, torch.Tensor) for c in entry.host.constants):
        raise UnexportableProgram(_live_problem(entry.host), _KEEP_OUT)
    binaries = dict(_binaries(entry, chip, builder, chosen))
    constant_names = [graph.add_weight(f"constant {n}", c) for n, c in enumerate(constants)]
    manifest = {
        "format": FORMAT, "onepass": VERSION, "torch": torch.__version__,
        "needs": _requirements(entry.host, chip, builder, binaries).to_json(),
        "inputs": graph.inputs().to_json(), "outputs": graph.outputs, "given": graph.given, "aliases": graph.aliases,
        "constants": constant_names, "weights": [w.described(weights) for w in graph.weights],
    }  # fmt: skip
    tensors = ((w.member, w.laid_out()) for w in graph.weights) if weights else ()
    write_archive(Path(path), [(MANIFEST, _json(manifest)), (PROGRAM, _json(data)), *binaries.items(), *tensors])


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _captured(
    function: Callable[..., Any] | ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    if isinstance(function, ExportedProgram):
        if args or kwargs or dynamic_shapes is not None:
            problem = "a program of torch.export has its example arguments and sizes already"
            raise UnexportableProgram(problem, "Give the program alone.")
        return function
    function = uncompiled(function)
    module = function if isinstance(function, torch.nn.Module) else _as_module(function)
    try:
        with torch.no_grad():
            return torch.export.export(module, args, kwargs or None, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = "Make it a program that torch.export takes (one graph, no branches on values)."
        raise UnexportableProgram(f"torch.export says: {reason}", fix) from error


def _as_module(function: Callable[..., Any]) -> torch.nn.Module:
    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    module = torch.nn.Module()
    module.forward = forward
    return module


@dataclass(slots=True)
class _Weight:
    """A tensor of the file, and what it is called."""

    names: list[str]
    tensor: torch.Tensor
    member: str

    def described(self, kept: bool) -> Any:
        t = self.tensor
        dtype = str(t.dtype).removeprefix("torch.")
        own = {"names": self.names, "dtype": dtype, "shape": list(t.shape), "strides": list(t.stride())}
        return {**own, "member": self.member if kept else None}

    def laid_out(self) -> torch.Tensor:
        """On the CPU, all of a memory of its own."""
        return torch.empty_strided(
            self.tensor.shape, self.tensor.stride(), dtype=self.tensor.dtype, device="cpu"
        ).copy_(self.tensor)


class _Graph:
    """A captured program as a flat function of weights and inputs, on the device it is to run on."""

    def __init__(self, program: ExportedProgram, target: Target | None) -> None:
        self.weights: list[_Weight] = []
        self.given: list[tuple[str, str | int]] = []
        self.aliases: list[tuple[int, int]] = []
        self._program, self._signature = program, program.graph_signature
        self._graph: GraphModule = copy.deepcopy(program.graph_module)
        self._placeholders: list[Node] = []
        self._taken = 0
        self._device = self._device_of(target)
        self._leaves = list(self._arguments())
        _move(self._graph, self._device)
        modes = (v.fake_mode for n in self._placeholders if hasattr(v := n.meta["val"], "fake_mode"))
        self._mode: Any = next(modes, None)
        if self._mode is None:
            raise UnexportableProgram("it takes no tensors", "Give it one.")
        self.fakes = [self._fake(n) for n in self._placeholders]

    def _device_of(self, target: Target | None) -> str:
        if target is not None:
            return "cuda:0" if target.language != "c" and target.name != INTERPRETED else "cpu"
        tensors = (n.meta.get("val") for n in self._graph.graph.find_nodes(op="placeholder"))
        return "cuda:0" if any(isinstance(t, torch.Tensor) and t.is_cuda for t in tensors) else "cpu"

    # what goes in

    def _arguments(self) -> Iterator[Any]:
        """What each leaf of the inputs is: a constant, or a placeholder. Others of the placeholders are weights."""
        for node, spec in zip(self._graph.graph.find_nodes(op="placeholder"), self._signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument):
                node.replace_all_uses_with(spec.arg.value)
                self._graph.graph.erase_node(node)
                yield ["constant", spec.arg.value]
                continue
            self._placeholders.append(node)
            if spec.kind is InputKind.USER_INPUT:
                self.given.append(("input", self._taken))
                yield ["leaf", self._taken]
                self._taken += 1
                continue
            tensor = self._program.state_dict.get(spec.target, self._program.constants.get(spec.target))
            if not isinstance(tensor, torch.Tensor):
                raise UnexportableProgram(f"{spec.target} is a {type(tensor).__name__}, no tensor", _KEEP_OUT)
            self.given.append(("weight", self.add_weight(spec.target, tensor)))

    def add_weight(self, name: str, tensor: torch.Tensor) -> str:
        """Keep a tensor under a name; equal ones are kept once."""
        tensor = tensor.detach()
        tensor = tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()
        key = _place(tensor)
        for weight in self.weights:
            if tensor.numel() and key is not None and _place(weight.tensor) == key:
                weight.names.append(name)
                return name
        self.weights.append(_Weight([name], tensor, f"weights/{len(self.weights)}"))
        return name

    def _fake(self, node: Node) -> Any:
        """What stands for a placeholder while the graph is traced."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        kind, name = self.given[self._placeholders.index(node)]
        like = next(w.tensor for w in self.weights if name in w.names) if kind == "weight" else value
        with self._mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._device)

    def inputs(self) -> Inputs:
        """What a call must give. Sizes as they are known after compiling."""
        leaves = [
            _leaf(value, n.name)
            for n, value, (kind, _) in zip(self._placeholders, self.fakes, self.given, strict=True)
            if kind == "input"
        ]
        structure = _structure(self._program.call_spec.in_spec, iter(self._leaves))
        used = {s for v in self.fakes for s in _symbols(v)}
        return Inputs(structure, tuple(leaves), dict(_ranges(used, self._program, self.fakes)))

    # what comes out

    def compiled_from(self, options: Options) -> GraphModule:
        """The graph to compile: functional, new values of inputs copied into them at its end."""
        shape_env = getattr(self._mode, "shape_env", None)
        before = len(shape_env.guards) if shape_env is not None else 0
        try:
            self.functional, changed = functional_graph(self._graph, self.fakes, options)
        except OnepassError:
            raise
        except Exception as error:
            raise UnexportableProgram(f"{type(error).__name__}: {error}", _KEEP_OUT) from error
        if shape_env is not None:
            _refuse_guards(shape_env.guards[before:])
        graph = self.functional.graph
        placeholders, output = graph.find_nodes(op="placeholder"), graph.output_node()
        results = list(output.args[0])
        updates = [(results[k], placeholders[i]) for k, i in changed.items()]
        returned = results[len(changed) :]
        kept: list[Any] = []
        for value, spec in zip(returned, self._signature.output_specs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                kept.append(value)
            elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
                updates.append((value, placeholders[self._position(spec.target)]))
            else:
                raise UnexportableProgram(f"it has a result of the kind {spec.kind.name}", "Export inference alone.")
        with graph.inserting_before(output):
            for value, placeholder in updates:
                copied = graph.call_function(torch.ops.aten.copy_.default, (placeholder, value))
                copied.meta["val"] = placeholder.meta["val"]
        for value, placeholder in updates:
            for k, result in enumerate(kept):
                if result is value:
                    kept[k] = None
                    self.aliases.append((k, placeholders.index(placeholder)))
        output.args = (tuple(kept),)
        self.functional.recompile()
        leaves = iter([["leaf", k] for k in range(len(kept))])
        self.outputs = _structure(self._program.call_spec.out_spec, leaves)
        return self.functional

    def _position(self, target: str) -> int:
        """Of the placeholder of a buffer or an input."""
        specs = [s for s in self._signature.input_specs if not isinstance(s.arg, ConstantArgument)]
        return next(k for k, s in enumerate(specs) if target in (s.target, s.arg.name))


def _move(graph: GraphModule, device: str) -> None:
    """Every device that a graph names is this one."""
    moved = torch.device(device)

    def placed(value: Any) -> Any:
        return moved if isinstance(value, torch.device) else value

    for part in (m for m in graph.modules() if isinstance(m, GraphModule)):
        for node in part.graph.nodes:
            node.args, node.kwargs = (pytree.tree_map(placed, x) for x in (node.args, node.kwargs))
            if "autocast" in str(node.target) and node.args and isinstance(node.args[0], str):
                node.args = (moved.type, *node.args[1:])
        part.recompile()


def _place(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one."""
    if tensor.device.type == "meta" or not hasattr(tensor, "data_ptr"):
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _leaf(value: Any, name: str) -> Leaf:
    if isinstance(value, torch.Tensor):
        shape, strides = tuple(map(_size, value.shape)), tuple(map(_size, value.stride()))
        return Leaf(name, str(value.dtype).removeprefix("torch."), shape, strides)
    size = _size(value)
    if not isinstance(size, str):
        raise UnexportableProgram(f"the input {name} is always {size}", "Make it a constant of the function.")
    return Leaf(name, "", (size,), ())


def _size(size: Any) -> int | str:
    """A size as the file has it."""
    if isinstance(size, int):
        return size
    found = size.node.shape_env.simplify(size.node.expr)
    return int(found) if found.is_Integer else str(found)


def _symbols(value: Any) -> Iterator[Any]:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    for size in sizes:
        if isinstance(size, torch.SymInt):
            yield from size.node.expr.free_symbols


def _ranges(
    symbols: set[Any], program: ExportedProgram, inputs: Sequence[Any]
) -> Iterator[tuple[str, tuple[int, int | None]]]:
    for symbol in sorted(symbols, key=str):
        if (bounds := program.range_constraints.get(symbol)) is not None:
            high = int(bounds.upper) if bounds.upper.is_Integer else None
            yield str(symbol), (int(bounds.lower), high)


def _refuse_guards(guards: Sequence[Any]) -> None:
    """Nothing may be concluded of sizes that a call does not check."""
    if guards:
        problem = f"it depends on {guards[0].expr}, which is no range of a size"
        raise UnexportableProgram(problem, "Make that size fixed in dynamic_shapes=.")


def _structure(spec: Any, leaves: Iterator[Any]) -> Any:
    """A structure of pytree as JSON (`runtime/signature.py`)."""
    if spec.is_leaf():
        return next(leaves)
    kind, context = spec.type, spec.context
    parts = [_structure(child, leaves) for child in spec.children()]
    if kind in (tuple, list):
        return [kind.__name__, parts]
    if hasattr(context, "_fields"):
        return ["named", context.__name__, list(context._fields), parts]
    plain = isinstance(context, list) and all(type(k) in (str, int) for k in context)
    if isinstance(kind, type) and issubclass(kind, dict) and plain:
        return ["dict", [[key, part] for key, part in zip(context, parts, strict=True)]]
    problem = f"it takes or returns a {getattr(kind, '__name__', kind)}"
    raise UnexportableProgram(problem, "Use tuples, lists, dicts and named tuples of tensors.")


# --- machine code ---


def _binaries(entry: GraphEntry, target: Target, builder: Builder, options: Options) -> Iterator[tuple[str, bytes]]:
    """Every kernel in each of its variants; for GPUs also what launches them."""
    sources = {s.key: s for kernel in entry.kernels for s in _variants(kernel)}
    cache = default_cache() if options.cache else None

    def built(source: KernelSource) -> bytes:
        key = artifact_key(source, builder.fingerprint())
        if cache is not None and (found := cache.kernel_bytes(key)) is not None:
            return found
        output = scratch_folder() / f"{key}.export"
        builder.build(source, output)
        content = output.read_bytes()
        output.unlink()
        return content

    with ThreadPoolExecutor(processors(), "onepass-export") as pool:
        for key, content in zip(sources, pool.map(built, sources.values()), strict=True):
            yield KERNELS + key, content
    if target.language != "c":
        output = scratch_folder() / "exported_launcher.so"
        build_launcher(output)
        yield LAUNCHER, output.read_bytes()


def _variants(kernel: KernelSource) -> list[KernelSource]:
    if kernel.language == "c":
        return [kernel]
    from .runtime.triton_kernels import variants_of

    return variants_of(kernel)


def _requirements(host: ir.HostProgram, target: Target, builder: Builder, binaries: dict[str, bytes]) -> Requirements:
    names = dict.fromkeys(i.target for i in host.instructions if isinstance(i, ir.Call) and isinstance(i.target, str))
    operators = {str(name): schema_of(str(name)) for name in names}
    for name in operators:
        if name.split(".")[0] not in _OWN and _in_python(name):
            raise UnexportableProgram(f"the operator {name} is written in Python", _KEEP_OUT)
    system, machine = machine_here()
    on_cpu = isinstance(builder, Toolchain)
    return Requirements(
        target.name, system, machine,
        instructions=builder.instruction_sets() if isinstance(builder, Toolchain) and len(binaries) else (),
        openmp=needed_openmp(binaries.values()) if on_cpu else "",
        operators={name: schema for name, schema in operators.items() if schema},
        glibc=glibc_of(b for name, b in binaries.items() if on_cpu or name == LAUNCHER),
        cuda=(0, 0) if on_cpu else _assembler_version(target),
    )  # fmt: skip


def _assembler_version(target: Target) -> tuple[int, int]:
    """The version of CUDA that machine code was made with; a driver must know it."""
    from .runtime.triton_private import find_assembler

    found = None if target.name.startswith("gfx") else find_assembler(target)
    return (found.version[0], found.version[1]) if found is not None and len(found.version) > 1 else (0, 0)


def _in_python(name: str) -> bool:
    """Whether an operator was registered from Python: another process does not have it."""
    namespace, operation, overload = name.split(".")
    full = f"{namespace}::{operation}" + ("" if overload == "default" else f".{overload}")
    found = next((x for x in torch._C._dispatch_dump(full).splitlines() if x.startswith("debug:")), "")
    return ".py:" in found


def _live_problem(host: ir.HostProgram) -> str:
    """What of a host program has no written form."""
    called = [
        host.live[i.target.name] for i in host.instructions if isinstance(i, ir.Call) and isinstance(i.target, ir.Live)
    ]
    names = [str(getattr(c, "__name__", c)) for c in called]
    return f"it calls {names[0]}, which only this process has" if names else "it holds an object of this process"
