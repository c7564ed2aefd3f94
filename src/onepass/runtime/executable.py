"""The executable: a host program as one straight Python function.

Takes a `HostProgram` and its loaded kernels, writes the function's text (`.source`, for people too) and
compiles it once; per call nothing is interpreted. While a profiler runs, a second text does the same with
the graph and each kernel as a range; while a `Clock` observes, a third one times each step. Only names and
size expressions of the known form are written into the text, so a damaged program cannot run code. The
calling convention is AOTAutograd's boxed one: `call(args)` takes a list and empties it, so that inputs can
be freed at their last use.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from ..ir import source as ir
from ..ir.callables import resolve_callable
from ..ir.host_json import MalformedProgram
from .clock import Clock
from .kernels import LoadedKernel
from .layout import settle, settle_result, word_of
from .tables import DeviceTables
from .threads import thread_count
from .torch_private import current_device, current_stream, direct, empty_cpu, empty_cuda, is_profiling, on_device, view

_NAME = re.compile(r"[abxsw]\d+")
_NUMBER = re.compile(r"\d+")
_EXPRESSION = re.compile(r"(?:s\d+|\d+|//|[-+*%() ])+")
DIVISION_BY_ZERO, INDEX_OUT_OF_RANGE = 1, 2  # the bits of a kernel's status, as in prelude.h


def raise_status(status: int) -> None:
    """The error eager raises for what a kernel met."""
    if status & DIVISION_BY_ZERO:
        raise RuntimeError("ZeroDivisionError")
    raise IndexError("index out of range in self")


class Executable:
    """A compiled graph: `call(args)` runs it, `source` shows it."""

    def __init__(self, host: ir.HostProgram, kernels: Sequence[LoadedKernel]) -> None:
        writer = Writer(host, kernels)
        self.host, self.kernels = host, kernels
        writer.namespace |= {"is_profiling": is_profiling, "profiled": self._profiled}
        self.source = writer.source()
        self._namespace = writer.namespace
        self.call = writer.compiled(self.source)
        self.call._boxed_call = True  # type: ignore[attr-defined]
        self._with_ranges: Callable[[list[Any]], Any] | None = None
        self._with_clock: Callable[[list[Any]], Any] | None = None

    @property
    def observed(self) -> bool:
        """Whether a clock times its steps."""
        return self._with_clock is not None

    def observe(self, clock: Clock | None) -> None:
        """Every step of later calls is timed by the clock; None: no longer."""
        self._with_clock = None
        if clock is not None:
            writer = Writer(self.host, self.kernels, True, clock)
            self._with_clock = writer.compiled(writer.source())
        self._namespace["is_profiling"] = is_profiling if clock is None else lambda: True

    def step_name(self, step: int) -> str:
        """What profilers call a step: the entry of a kernel, the operator of a call."""
        match self.host.instructions[step]:
            case ir.Launch(kernel=number):
                return self.kernels[number].entry or self.kernels[number].name
            case ir.Call(target=str() as target):
                return "::".join(target.split(".")[:2]) if target.count(".") > 1 else target
            case ir.Copy():
                return "aten::copy_"
        return "call"

    def _profiled(self, args: list[Any]) -> Any:
        """The same while a profiler runs."""
        if self._with_clock is not None:
            return self._with_clock(args)
        if self._with_ranges is None:
            writer = Writer(self.host, self.kernels, ranges=True)
            self._with_ranges = writer.compiled(writer.source())
        with record_function("onepass graph"):
            return self._with_ranges(args)

    def __call__(self, args: list[Any]) -> Any:
        return self.call(args)


class Writer:
    """Text and the objects it refers to."""

    def __init__(
        self, host: ir.HostProgram, kernels: Sequence[LoadedKernel], ranges: bool = False, clock: Clock | None = None
    ) -> None:
        self._host, self._kernels, self._ranges, self._clock = host, kernels, ranges, clock
        launches = [i for i in host.instructions if isinstance(i, ir.Launch)]
        self._on_cpu = any(not i.programs for i in launches)
        self._devices = list(dict.fromkeys(i.device for i in launches if i.programs))
        # The GPU that is current while the function runs; empty where none is.
        self._home = self._devices[0] if self._devices and self._devices[0].startswith("cuda") else ""
        self._lines: list[str] = []
        self._tables = 0
        self._constants: dict[tuple[Any, ...], str] = {}
        self._sizes: dict[str, str] = {}  # expression -> the variable that holds it
        self.namespace: dict[str, Any] = {
            "current_device": current_device, "empty_cpu": empty_cpu, "empty_cuda": empty_cuda, "slice": slice,
            "empty_strided": torch.empty_strided, "on_device": on_device, "raise_status": raise_status, "view": view,
            "settle": settle, "settle_result": settle_result, "thread_count": thread_count, "word_of": word_of,
            "record_function": record_function,
        }  # fmt: skip
        if clock is not None:
            self.namespace |= {"now": clock.now, "stepped": partial(clock.stepped, id(host))}

    def source(self) -> str:
        """The whole function. On a GPU it runs with that device current, whatever the caller's is."""
        if not self._ranges:
            self._line("if is_profiling(): return profiled(args)")
        if self._home:
            index = _device(self._home).index or 0
            self._line(f"if current_device() != {index}: return on_device({index}, call, args)")
        self._unpack()
        self._line("args.clear()")
        if self._on_cpu:
            self._line("threads = thread_count()")
        for device in self._devices:
            self._line(f"{self._stream(device)} = current_stream({_device(device).index or 0})")
        for number, instruction in enumerate(self._host.instructions):
            self._instruction(number, instruction)
        outputs = "".join(f"{self._tree(o)}, " for o in self._host.outputs)
        self._line(f"return ({outputs.rstrip()})")
        return "def call(args):\n" + "".join(self._lines)

    def _unpack(self) -> None:
        if inputs := [host_name(n) for n in self._host.inputs]:
            self._line(f"{', '.join(inputs)}, = args")

    def _instruction(self, number: int, instruction: ir.Instruction) -> None:
        timed = self._clock is not None and isinstance(instruction, ir.STEPS)
        if timed:
            self._line("started = now()")
        getattr(self, f"visit_{type(instruction).__name__}")(instruction)
        if timed:
            self._line(f"stepped({number}, started)")

    def compiled(self, source: str) -> Callable[[list[Any]], Any]:
        try:
            exec(compile(source, "<onepass host program>", "exec"), self.namespace)
        except SyntaxError as error:
            raise MalformedProgram(f"not a program: {error}") from error
        call: Callable[[list[Any]], Any] = self.namespace["call"]
        return call

    def _line(self, text: str) -> None:
        self._lines.append(f"    {text}\n")

    # instructions, each by the method that has the name of its class

    def visit_Bind(self, bind: ir.Bind) -> None:
        self._line(f"{host_name(bind.size)} = {host_name(bind.source)}.shape[{int(bind.dim)}]")

    def visit_WriteBack(self, back: ir.WriteBack) -> None:
        original, name = host_name(back.original), host_name(back.name)
        self._line(f"if {original} is not {name}: {original}.copy_({name})")

    def visit_Copy(self, copy: ir.Copy) -> None:
        self._line(f"{host_name(copy.target)}.copy_({host_name(copy.source)})")

    def visit_Free(self, free: ir.Free) -> None:
        self._line(f"del {', '.join(host_name(n) for n in free.names)}")

    def visit_Check(self, check: ir.Check) -> None:
        name, shape, strides = host_name(check.name), self._shape(check.shape), self._shape(check.strides)
        if check.original is not None:
            self._line(f"{host_name(check.original)} = {name}")
        if check.dtype is None:
            self._line(f"if {name}.stride() != {strides}: {name} = settle({name}, {shape}, {strides})")
            return
        dtype = self._dtype(check.dtype)
        test = f"{name}.stride() != {strides} or {name}.shape != {shape} or {name}.dtype is not {dtype}"
        self._line(f"if {test}: {name} = settle_result({name}, {shape}, {strides}, {dtype})")

    def visit_Allocate(self, allocate: ir.Allocate) -> None:
        name, shape, strides = host_name(allocate.name), self._shape(allocate.shape), self._shape(allocate.strides)
        dtype = self._dtype(allocate.dtype)
        makers = {"cpu": "empty_cpu", self._home: "empty_cuda"}
        if maker := makers.get(allocate.device):
            self._line(f"{name} = {maker}({shape}, {strides}, {dtype})")
        else:
            device = self._torch_value(ir.TorchValue("device", allocate.device))
            self._line(f"{name} = empty_strided({shape}, {strides}, dtype={dtype}, device={device})")

    def _kernel_of(self, launch: ir.Launch) -> LoadedKernel:
        if launch.kernel not in range(len(self._kernels)):
            raise MalformedProgram(f"there is no kernel {launch.kernel!r}")
        kernel = self._kernels[launch.kernel]
        pointers = len(launch.buffers) + bool(launch.table)
        if (pointers, len(launch.symbols) + len(launch.numbers)) != (kernel.pointers, kernel.symbols):
            raise MalformedProgram(f"kernel {launch.kernel} takes other arguments")
        return kernel

    def visit_Launch(self, launch: ir.Launch) -> None:
        kernel = self._kernel_of(launch)
        function = f"k{int(launch.kernel)}"
        addresses, sizes = (
            [f"{host_name(b)}.data_ptr()" for b in launch.buffers],
            [self._size(s) for s in launch.symbols],
        )
        if launch.table:
            addresses.append(self._table(launch))
        comment = _comment(kernel.name)
        if launch.programs:
            index = _device(launch.device).index or 0
            function = f"{function}_{index}"
            self.namespace[function], self.namespace[f"{function}_failed"] = kernel.function(index)[:2]
            words = [f"word_of({host_name(b)})" for b in launch.numbers]
            arguments = ", ".join(
                [*addresses, *words, *sizes, self._size(launch.programs), self._stream(launch.device)]
            )
            self._line(f"if {function}({arguments}): {function}_failed({arguments}){comment}")
            return
        self.namespace[function] = kernel.function
        arguments = ", ".join([*addresses, *sizes, "threads"])
        self.namespace[f"{function}_name"] = kernel.entry or kernel.name
        within = f"with record_function({function}_name): " if self._ranges else ""
        if kernel.raises:
            self._line(f"{within}status = {function}({arguments}){comment}")
            self._line("if status: raise_status(status)")
        else:
            self._line(f"{within}{function}({arguments}){comment}")

    def _table(self, launch: ir.Launch) -> str:
        """The address of a table: what is known now is written once, all else on every call."""
        words = [self._address(w) if isinstance(w, ir.Ref) else self._size(w.expression) for w in launch.table]
        known = next((k for k in range(len(words)) if all(map(_NUMBER.fullmatch, words[k:]))), len(words))
        addresses = sum(isinstance(w, ir.Ref) for w in launch.table)
        name = f"table{self._tables}"
        self._tables += 1
        rest = [int(w) for w in words[known:]]
        own = f"({', '.join(words[:known])},)"
        if launch.programs and not launch.device.startswith("cpu"):
            self.namespace[f"{name}_of"] = DeviceTables(launch.device, rest, addresses)
            self._line(f"{name} = {name}_of({own}, {self._stream(launch.device)})")
            return name
        self.namespace[f"{name}_known"] = array("q", rest)
        self.namespace["array"] = array
        self._line(f'{name} = array("q", {own}) + {name}_known')
        return f"{name}.buffer_info()[0]"

    def _address(self, ref: ir.Ref) -> str:
        return f"{self._ref(ref)}.data_ptr()"

    def _stream(self, device: str) -> str:
        """The variable that holds the current stream of a device."""
        kind, index = _device(device).type, _device(device).index or 0
        self.namespace["current_stream"] = current_stream if kind == "cuda" else lambda _device: 0
        return f"stream{index}"

    def visit_Call(self, call: ir.Call) -> None:
        comment = ""
        if isinstance(call.target, ir.Live):
            target = self._live(call.target)
        else:
            comment = _comment(call.target)
            try:
                target = self._constant("target", call.target, direct(resolve_callable(call.target)))
            except LookupError as error:
                raise MalformedProgram(str(error)) from error
        arguments = [*map(self._tree, call.args), *([f"**{self._tree(call.kwargs)}"] if call.kwargs else [])]
        self._line(f"{host_name(call.result)} = {target}({', '.join(arguments)}){comment}")

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
        return self._torch_value(ir.TorchValue("dtype", name))

    def _torch_value(self, value: ir.TorchValue) -> str:
        if value.kind == "device":
            return self._constant("device", value.name, _device(value.name))
        found = getattr(torch, value.name, None)
        if type(found) not in (torch.dtype, torch.layout, torch.memory_format) or type(found).__name__ != value.kind:
            raise MalformedProgram(f"torch has no {value.kind} {value.name!r}")
        self.namespace[value.name] = found
        return value.name

    def _constant(self, kind: str, key: Any, value: Any) -> str:
        name = self._constants.setdefault((kind, key), f"c{len(self._constants)}")
        self.namespace[name] = value
        return name

    def _live(self, live: ir.Live) -> str:
        return self._constant("live", live.name, self._host.live[live.name])

    def _graph_constant(self, number: int) -> str:
        if number not in range(len(self._host.constants)):
            raise MalformedProgram(f"there is no constant {number!r}")
        return self._constant("graph", number, self._host.constants[number])

    def _tree(self, tree: ir.Tree) -> str:
        match tree:
            case None | bool() | int():
                return repr(tree)
            case float() | complex() | str():  # a string is a constant of the namespace, never part of the text
                return self._constant(type(tree).__name__, repr(tree), tree)
            case list():
                return f"[{', '.join(self._tree(x) for x in tree)}]"
            case tuple():
                return "(" + "".join(f"{self._tree(x)}, " for x in tree).rstrip() + ")"
            case dict():
                return "{" + ", ".join(f"{self._tree(k)}: {self._tree(v)}" for k, v in tree.items()) + "}"
            case slice():
                return f"slice({', '.join(self._tree(x) for x in (tree.start, tree.stop, tree.step))})"
            case ir.Ref():
                return self._ref(tree)
            case ir.SizeOf():
                return self._size(tree.expression)
            case ir.TorchValue():
                return self._torch_value(tree)
            case ir.Constant(number):
                return self._graph_constant(number)
            case ir.Live():
                return self._live(tree)
        if tree is ...:
            return "..."
        raise MalformedProgram(f"no argument can be {tree!r}")

    def _ref(self, ref: ir.Ref) -> str:
        if ref.shape is None or ref.strides is None:
            return host_name(ref.name)
        shape, strides = self._shape(ref.shape), self._shape(ref.strides)
        return f"view({host_name(ref.name)}, {shape}, {strides}, {self._size(ref.offset)})"


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise MalformedProgram(f"not a device: {name!r}") from error


def host_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise MalformedProgram(f"not a host name: {name!r}")
    return name


def _comment(text: str) -> str:
    return "  # " + re.sub(r"[^\w.,:+ -]", "?", text, flags=re.ASCII)
