"""The executable: a host program as one straight Python function.

Takes a `HostProgram` and its loaded kernels, writes the function's text (`.source`, for people too) and
compiles it once; per call nothing is interpreted. Only names and size expressions of the known form are
written into the text, so a damaged program cannot run code. The calling convention is AOTAutograd's
boxed one: `call(args)` takes a list and empties it, so that inputs can be freed at their last use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ir.callables import resolve_callable
from ..ir.host_json import MalformedProgram
from ..ir.source import (
    Allocate,
    Bind,
    Call,
    Check,
    Constant,
    Copy,
    Free,
    HostProgram,
    Instruction,
    Launch,
    Live,
    Ref,
    SizeOf,
    TorchValue,
    Tree,
    WriteBack,
)
from .kernels import LoadedKernel
from .layout import settle, settle_result, word_of
from .threads import thread_count
from .torch_private import current_device, current_stream, direct, empty_cpu, empty_cuda, on_device, view

_NAME = re.compile(r"[abxsw]\d+")
_NUMBER = re.compile(r"\d+")
_EXPRESSION = re.compile(r"(?:s\d+|\d+|//|[-+*%() ])+")
_STATUS_DIVISION, _STATUS_INDEX = 1, 2


def raise_status(status: int) -> None:
    """The error eager raises for what a kernel met."""
    if status & _STATUS_DIVISION:
        raise RuntimeError("ZeroDivisionError")
    raise IndexError("index out of range in self")


class Executable:
    """A compiled graph: `call(args)` runs it, `source` shows it."""

    def __init__(self, host: HostProgram, kernels: Sequence[LoadedKernel]) -> None:
        writer = _Writer(host, kernels)
        self.host = host
        self.source = writer.source()
        exec(compile(self.source, "<onepass host program>", "exec"), writer.namespace)
        self.call: Callable[[list[Any]], Any] = writer.namespace["call"]
        self.call._boxed_call = True  # type: ignore[attr-defined]

    def __call__(self, args: list[Any]) -> Any:
        return self.call(args)


class _Writer:
    """Text and the objects it refers to."""

    def __init__(self, host: HostProgram, kernels: Sequence[LoadedKernel]) -> None:
        self._host, self._kernels = host, kernels
        self._lines: list[str] = []
        self._constants: dict[tuple[Any, ...], str] = {}
        self._sizes: dict[str, str] = {}  # expression -> the variable that holds it
        self.namespace: dict[str, Any] = {
            "empty_cpu": empty_cpu,
            "empty_cuda": empty_cuda,
            "empty_strided": torch.empty_strided,
            "raise_status": raise_status,
            "settle": settle,
            "settle_result": settle_result,
            "thread_count": thread_count,
            "view": view,
            "word_of": word_of,
        }

    def source(self) -> str:
        """The whole function. On a GPU it runs with that device current, whatever the caller's is."""
        launches = [i for i in self._host.instructions if isinstance(i, Launch)]
        devices = [torch.device(i.device) for i in launches if i.programs]
        if devices and devices[0].type == "cuda":
            index = devices[0].index or 0
            self.namespace |= {"current_device": current_device, "on_device": on_device}
            self._line(f"if current_device() != {index}: return on_device({index}, call, args)")
        inputs = [_name(n) for n in self._host.inputs]
        if inputs:
            self._line(f"{', '.join(inputs)}, = args")
        self._line("args.clear()")
        if any(not i.programs for i in launches):
            self._line("threads = thread_count()")
        for device in dict.fromkeys(i.device for i in launches if i.programs):
            self._line(f"{self._stream(device)} = current_stream({torch.device(device).index or 0})")
        for instruction in self._host.instructions:
            self._instruction(instruction)
        outputs = "".join(f"{self._tree(o)}, " for o in self._host.outputs)
        self._line(f"return ({outputs.rstrip()})")
        return "def call(args):\n" + "".join(self._lines)

    def _line(self, text: str) -> None:
        self._lines.append(f"    {text}\n")

    def _instruction(self, instruction: Instruction) -> None:
        match instruction:
            case Bind():
                self._line(f"{_name(instruction.size)} = {_name(instruction.source)}.shape[{int(instruction.dim)}]")
            case Check():
                self._check(instruction)
            case WriteBack(original, name):
                original, name = _name(original), _name(name)
                self._line(f"if {original} is not {name}: {original}.copy_({name})")
            case Allocate():
                self._allocate(instruction)
            case Launch():
                self._launch(instruction)
            case Call():
                self._call(instruction)
            case Copy(target, source):
                self._line(f"{_name(target)}.copy_({_name(source)})")
            case Free(names):
                self._line(f"del {', '.join(_name(n) for n in names)}")

    def _check(self, check: Check) -> None:
        name, shape, strides = _name(check.name), self._shape(check.shape), self._shape(check.strides)
        if check.original is not None:
            self._line(f"{_name(check.original)} = {name}")
        if check.dtype is None:
            self._line(f"if {name}.stride() != {strides}: {name} = settle({name}, {shape}, {strides})")
            return
        dtype = self._dtype(check.dtype)
        test = f"{name}.stride() != {strides} or {name}.shape != {shape} or {name}.dtype is not {dtype}"
        self._line(f"if {test}: {name} = settle_result({name}, {shape}, {strides}, {dtype})")

    def _allocate(self, allocate: Allocate) -> None:
        name, shape, strides = _name(allocate.name), self._shape(allocate.shape), self._shape(allocate.strides)
        dtype = self._dtype(allocate.dtype)
        if allocate.device == "cpu":
            self._line(f"{name} = empty_cpu({shape}, {strides}, {dtype})")
        elif allocate.device == self._home():
            self._line(f"{name} = empty_cuda({shape}, {strides}, {dtype})")
        else:
            device = self._constant("device", allocate.device, torch.device(allocate.device))
            self._line(f"{name} = empty_strided({shape}, {strides}, dtype={dtype}, device={device})")

    def _home(self) -> str:
        """The GPU that is current while the function runs; empty where none is."""
        found = [i.device for i in self._host.instructions if isinstance(i, Launch) and i.programs]
        return found[0] if found and found[0].startswith("cuda") else ""

    def _launch(self, launch: Launch) -> None:
        if launch.kernel not in range(len(self._kernels)):
            raise MalformedProgram(f"there is no kernel {launch.kernel!r}")
        kernel = self._kernels[launch.kernel]
        if (len(launch.buffers), len(launch.symbols) + len(launch.numbers)) != (kernel.pointers, kernel.symbols):
            raise MalformedProgram(f"kernel {launch.kernel} takes other arguments")
        function = f"k{int(launch.kernel)}"
        if launch.programs:
            self._launch_tiles(launch, kernel)
            return
        self.namespace[function] = kernel.function
        pointers = [f"{_name(b)}.data_ptr()" for b in launch.buffers]
        arguments = ", ".join([*pointers, *(self._size(s) for s in launch.symbols), "threads"])
        comment = _comment(kernel.name)
        if kernel.raises:
            self._line(f"status = {function}({arguments}){comment}")
            self._line("if status: raise_status(status)")
        else:
            self._line(f"{function}({arguments}){comment}")

    def _launch_tiles(self, launch: Launch, kernel: LoadedKernel) -> None:
        index = torch.device(launch.device).index or 0
        name = f"k{int(launch.kernel)}_{index}"
        self.namespace[name], self.namespace[f"{name}_failed"] = kernel.function(index)
        words = [f"{_name(b)}.data_ptr()" for b in launch.buffers]
        words += [f"word_of({_name(b)})" for b in launch.numbers]
        words += [self._size(s) for s in (*launch.symbols, launch.programs)]
        arguments = ", ".join([*words, self._stream(launch.device)])
        self._line(f"if {name}({arguments}): {name}_failed({arguments}){_comment(kernel.name)}")

    def _stream(self, device: str) -> str:
        """The variable that holds the current stream of a device."""
        kind, index = torch.device(device).type, torch.device(device).index or 0
        self.namespace["current_stream"] = current_stream if kind == "cuda" else _no_stream
        return f"stream{index}"

    def _call(self, call: Call) -> None:
        comment = ""
        if isinstance(call.target, Live):
            target = self._live(call.target)
        else:
            comment = _comment(call.target)
            try:
                target = self._constant("target", call.target, direct(resolve_callable(call.target)))
            except LookupError as error:
                raise MalformedProgram(str(error)) from error
        arguments = [self._tree(a) for a in call.args]
        if call.kwargs:
            pairs = (f"{self._text(k)}: {self._tree(v)}" for k, v in call.kwargs.items())
            arguments.append(f"**{{{', '.join(pairs)}}}")
        self._line(f"{_name(call.result)} = {target}({', '.join(arguments)}){comment}")

    # expressions

    def _size(self, expression: str) -> str:
        if not _EXPRESSION.fullmatch(expression):
            raise MalformedProgram(f"not a size: {expression!r}")
        if _NUMBER.fullmatch(expression) or _NAME.fullmatch(expression):
            return expression
        if expression not in self._sizes:
            self._sizes[expression] = f"n{len(self._sizes)}"
            self._line(f"{self._sizes[expression]} = {expression}")
        return self._sizes[expression]

    def _shape(self, sizes: Sequence[str]) -> str:
        return "(" + "".join(f"{self._size(s)}, " for s in sizes).rstrip() + ")"

    def _dtype(self, name: str) -> str:
        return self._torch_value(TorchValue("dtype", name))

    def _torch_value(self, value: TorchValue) -> str:
        if value.kind == "device":
            return self._constant("device", value.name, torch.device(value.name))
        found = getattr(torch, value.name, None)
        if type(found).__name__ != value.kind or not isinstance(
            found, torch.dtype | torch.layout | torch.memory_format
        ):
            raise MalformedProgram(f"torch has no {value.kind} {value.name!r}")
        self.namespace[value.name] = found
        return value.name

    def _text(self, text: str) -> str:
        # A string is a constant of the namespace, never part of the text.
        return self._constant("str", text, text)

    def _constant(self, kind: str, key: Any, value: Any) -> str:
        name = self._constants.setdefault((kind, key), f"c{len(self._constants)}")
        self.namespace[name] = value
        return name

    def _live(self, live: Live) -> str:
        return self._constant("live", live.name, self._host.live[live.name])

    def _graph_constant(self, number: int) -> str:
        if number not in range(len(self._host.constants)):
            raise MalformedProgram(f"there is no constant {number!r}")
        return self._constant("graph", number, self._host.constants[number])

    def _tree(self, tree: Tree) -> str:
        match tree:
            case None | bool() | int():
                return repr(tree)
            case float() | complex():
                return self._constant(type(tree).__name__, repr(tree), tree)
            case str():
                return self._text(tree)
            case list():
                return f"[{', '.join(self._tree(x) for x in tree)}]"
            case tuple():
                return "(" + "".join(f"{self._tree(x)}, " for x in tree).rstrip() + ")"
            case dict():
                return "{" + ", ".join(f"{self._tree(k)}: {self._tree(v)}" for k, v in tree.items()) + "}"
            case slice():
                return self._slice(tree)
            case Ref():
                return self._ref(tree)
            case SizeOf():
                return self._size(tree.expression)
            case TorchValue():
                return self._torch_value(tree)
            case Constant(number):
                return self._graph_constant(number)
            case Live():
                return self._live(tree)
        if tree is ...:
            return "..."
        raise MalformedProgram(f"no argument can be {tree!r}")

    def _slice(self, tree: slice) -> str:
        self.namespace["slice"] = slice
        return f"slice({', '.join(self._tree(x) for x in (tree.start, tree.stop, tree.step))})"

    def _ref(self, ref: Ref) -> str:
        if ref.shape is None or ref.strides is None:
            return _name(ref.name)
        shape, strides = self._shape(ref.shape), self._shape(ref.strides)
        return f"view({_name(ref.name)}, {shape}, {strides}, {self._size(ref.offset)})"


def _no_stream(_device: int) -> int:
    return 0


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise MalformedProgram(f"not a host name: {name!r}")
    return name


def _comment(text: str) -> str:
    return "  # " + re.sub(r"[^\w.,:+ -]", "?", text, flags=re.ASCII)
