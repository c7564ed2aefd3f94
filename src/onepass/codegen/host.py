"""The host program: allocate, launch, call, free at last use.

Takes the plan with its scheduled kernels, gives a `HostProgram`. Every name in it is generated here
("a0" inputs, "b3" buffers, "x1" host values, "s0" sizes), so nothing a user wrote reaches executed text.
A buffer that only kernels touch hands its storage to the next one of the same size, if nothing is
allocated in between: that saves an allocation and page faults and cannot raise the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, TypeAlias

import torch

from ..errors import VerifyError
from ..ir import source as ir
from ..ir.callables import callable_name
from ..ir.kernel import Kernel, ScheduledGroup
from ..ir.plan import FusionPlan, Group
from ..ir.poly import Atom, Poly, Quotient, Remainder, Symbol, product, sum_text
from ..ir.program import Buffer, Extern, HostValue, Program, View, leaves
from ..ir.row_loop import RowLoop

Thing: TypeAlias = Buffer | HostValue
Update: TypeAlias = tuple[Buffer, Buffer]  # (input, source)
Event: TypeAlias = Kernel | Extern | Update

_PLAIN = (type(None), bool, int, float, complex, str, type(...))


def emit_host(
    program: Program, plan: FusionPlan, scheduled: dict[Group, ScheduledGroup], kernel_numbers: dict[Kernel, int]
) -> ir.HostProgram:
    """The instructions that run the plan, in its order."""
    steps: list[tuple[Event, ...]] = [(s,) if isinstance(s, Extern) else scheduled[s].kernels for s in plan.steps]
    events: list[Event] = [*chain.from_iterable(steps), *plan.copies]
    uses = _find_uses(program, plan, events)
    emitter = _Emitter(uses, kernel_numbers)
    emitter.inputs(program)
    for position, event in enumerate(events):
        emitter.event(event)
        emitter.release(position)
    outputs = tuple(emitter.tree(o) for o in program.outputs)
    emitter.write_back()
    instructions = (*emitter.binds(program), *emitter.instructions)
    return ir.HostProgram(emitter.input_names, instructions, outputs, tuple(emitter.constants.values()), emitter.live)


def launch_of(
    kernel: Kernel, number: int, name: Callable[[Buffer], str], size: Callable[[Poly | Symbol], str]
) -> ir.Launch:
    """The launch of a kernel, with the names of buffers and the texts of sizes."""
    by_value = kernel.numbers if kernel.warps else ()
    buffers = tuple(name(b) for b in kernel.passed if b not in by_value)
    rows = [b for parts in kernel.parts for row in parts.buffers for b in row]
    words = [n for parts in kernel.parts for row in (parts.firsts, *(r for _, r in parts.numbers)) for n in row]
    table: tuple[ir.Ref | ir.SizeOf, ...] = (*(ir.Ref(name(b)) for b in rows), *(ir.SizeOf(size(n)) for n in words))
    launch = ir.Launch(number, buffers, tuple(map(size, kernel.symbols)), table=table)
    if not kernel.warps:
        return launch
    numbers, device = tuple(map(name, by_value)), kernel.writes[0].device
    return replace(launch, programs=size(kernel.programs), device=device, numbers=numbers)


def size_text(poly: Poly, names: dict[Symbol, str]) -> str:
    """The poly as a Python expression over the names of its symbols."""

    def atom_text(atom: Atom) -> str:
        match atom:
            case Symbol():
                return names[atom]
            case Quotient(numerator=a, denominator=b) | Remainder(numerator=a, denominator=b):
                operator = "//" if isinstance(atom, Quotient) else "%"
                return f"(({size_text(a, names)}){operator}({size_text(b, names)}))"
        raise VerifyError(f"{atom} is no size the host can compute")

    return sum_text(poly, atom_text, space="")


@dataclass(slots=True)
class _Uses:
    """Facts about storages: when each dies, which kernels rely on a layout, which leave our hands."""

    storage: dict[Buffer, Buffer]  # a buffer that overwrites an input lives in that input
    last: dict[Thing, int] = field(default_factory=dict)
    laid_out: set[Thing] = field(default_factory=set)  # read by address or through a view
    escaping: set[Thing] = field(default_factory=set)  # seen by operators or the caller
    written: set[Thing] = field(default_factory=set)  # by kernels
    dying: dict[int, list[Thing]] = field(default_factory=dict)

    def of(self, buffer: Buffer) -> Buffer:
        return self.storage.get(buffer, buffer)


def _find_uses(program: Program, plan: FusionPlan, events: list[Event]) -> _Uses:
    changed = {s.result: s.overwrites for s in plan.steps if isinstance(s, Extern) and isinstance(s.result, Buffer)}
    uses = _Uses(plan.in_place | {result: given for result, given in changed.items() if given is not None})
    for thing in program.inputs:
        if not isinstance(thing, Symbol):
            uses.last[thing] = -1
    for position, event in enumerate(events):
        for thing in _touched(event, uses):
            uses.last[thing] = position
    for tree in program.outputs:
        for thing in _in_tree(tree, uses):
            uses.escaping.add(thing)
            uses.last[thing] = len(events)
    for thing, position in uses.last.items():
        uses.dying.setdefault(position, []).append(thing)
    return uses


def _touched(event: Event, uses: _Uses) -> Iterator[Thing]:
    match event:
        case Kernel():
            uses.written.update(uses.of(b) for b in event.writes)
            for buffer in event.parameters:
                uses.laid_out.add(uses.of(buffer))
                yield uses.of(buffer)
        case Extern():
            if event.overwrites is not None:
                uses.written.add(event.overwrites)
                uses.laid_out.add(event.overwrites)
            for thing in _in_tree((event.result, event.args, event.kwargs), uses):
                uses.escaping.add(thing)
                yield thing
        case _:
            for buffer in event:
                yield uses.of(buffer)


def _in_tree(tree: Any, uses: _Uses) -> Iterator[Thing]:
    for leaf in leaves(tree):
        match leaf:
            case View():
                if not leaf.is_whole:
                    uses.laid_out.add(uses.of(leaf.buffer))
                yield uses.of(leaf.buffer)
            case Buffer():
                yield uses.of(leaf)
            case HostValue():
                yield leaf


class _Emitter:
    """Instructions so far, and the host names of what is alive."""

    def __init__(self, uses: _Uses, kernel_numbers: dict[Kernel, int]) -> None:
        self.instructions: list[ir.Instruction] = []
        self.input_names: tuple[str, ...] = ()
        self.constants: dict[int, torch.Tensor | RowLoop] = {}
        self.live: dict[str, Any] = {}
        self._uses, self._kernel_numbers = uses, kernel_numbers
        self._names: dict[Thing, str] = {}
        self._sizes: dict[Symbol, str] = {}
        self._used_sizes: set[Symbol] = set()
        self._inputs: set[Thing] = set()
        self._spare: list[Buffer] = []  # dead, its storage still held under its name
        self._made_as: dict[str, Buffer] = {}  # the tensor a name holds has this buffer's layout
        self._originals: dict[Thing, str] = {}  # written inputs, and the name that keeps the caller's tensor
        self._buffers, self._hosts = count(), count()

    # names

    def inputs(self, program: Program) -> None:
        """Name the inputs and check the layout of those that kernels address."""
        names: list[str] = []
        for thing in program.inputs:
            match thing:
                case Buffer():
                    names.append(f"a{len(names)}")
                case Symbol() if thing not in self._sizes:
                    names.append(f"s{len(self._sizes)}")
                    self._sizes[thing] = names[-1]
                case _:
                    names.append(f"x{next(self._hosts)}")
            if not isinstance(thing, Symbol):
                self._names[thing] = names[-1]
        self.input_names, self._inputs = tuple(names), set(self._names)
        for symbol in program.symbol_sources:
            self._sizes.setdefault(symbol, f"s{len(self._sizes)}")
        for thing in program.inputs:
            if isinstance(thing, Buffer) and thing in self._uses.laid_out:
                self._check_input(thing)
        self.release(-1)

    def binds(self, program: Program) -> Iterator[ir.Bind]:
        """Where each size that was used comes from, unless it is an input itself."""
        for symbol, (source, dim) in program.symbol_sources.items():
            if symbol in self._used_sizes and self._sizes[symbol] not in self.input_names:
                if source not in self._inputs:
                    raise VerifyError(f"a size is taken from {source.name}, which is no input")
                yield ir.Bind(self._sizes[symbol], self._names[source], dim)

    def _name(self, thing: Thing) -> str:
        if isinstance(thing, Buffer):
            thing = self._uses.of(thing)
        if thing in self._names:
            return self._names[thing]
        if isinstance(thing, Buffer) and product(thing.shape) is Poly.ZERO:
            self._allocate([thing])  # nothing to compute, so no kernel made it
            return self._names[thing]
        raise VerifyError(f"{thing.name} is read before anything writes it")

    def _size(self, poly: Poly | Symbol) -> str:
        poly = Poly.of(poly)
        for symbol in poly.symbols():
            if symbol not in self._sizes:
                raise VerifyError(f"no input gives the size {symbol}")
            self._used_sizes.add(symbol)
        return size_text(poly, self._sizes)

    def _layout(self, of: Buffer | View) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Shape and strides."""
        return tuple(map(self._size, of.shape)), tuple(map(self._size, of.strides))

    # instructions

    def event(self, event: Event) -> None:
        """One launch, call or copy with the allocations before it."""
        match event:
            case Kernel():
                self._allocate([b for b in event.parameters if self._uses.of(b) not in self._names])
                number = self._kernel_numbers[event]
                self.instructions.append(launch_of(event, number, self._name, self._size))
            case Extern():
                self._drop_spare()  # the operator may allocate
                self._call(event)
            case _:
                target, source = event
                self.instructions.append(ir.Copy(self._name(target), self._name(source)))

    def release(self, position: int) -> None:
        """Let go of what was used here for the last time."""
        names: list[str] = []
        for thing in self._uses.dying.get(position, ()):
            if isinstance(thing, Buffer) and thing not in self._inputs and thing not in self._uses.escaping:
                self._spare.append(thing)
            elif thing not in self._originals:
                names.append(self._names[thing])
        self._free(names)

    def write_back(self) -> None:
        """Inputs that had to be replaced by a copy receive what was written to it."""
        self.instructions.extend(ir.WriteBack(original, self._names[b]) for b, original in self._originals.items())

    def _check_input(self, buffer: Buffer) -> None:
        if all(size is Poly.ONE for size in buffer.shape):
            return
        original = None
        if buffer in self._uses.written:
            original = self._originals[buffer] = f"w{len(self._originals)}"
        self.instructions.append(ir.Check(self._names[buffer], *self._layout(buffer), None, original))

    def _allocate(self, buffers: list[Buffer]) -> None:
        wanted = [b for b in buffers if not self._take_spare(b)]
        if wanted:
            self._drop_spare()
        for buffer in wanted:
            name = self._names[buffer] = f"b{next(self._buffers)}"
            self._made_as[name] = buffer
            self.instructions.append(ir.Allocate(name, *self._layout(buffer), buffer.dtype.value, buffer.device))

    def _take_spare(self, buffer: Buffer) -> bool:
        """Put the buffer where a dead one of its size was, if there is one; one that is seen needs its very layout."""
        for spare in self._spare:
            made_as = self._made_as[self._names[spare]]  # the dead one itself may have taken another's place
            if _same_layout(buffer, made_as) or (buffer not in self._uses.escaping and _same_bytes(buffer, spare)):
                self._spare.remove(spare)
                self._names[buffer] = self._names[spare]
                return True
        return False

    def _drop_spare(self) -> None:
        self._free([self._names[b] for b in self._spare])
        self._spare.clear()

    def _free(self, names: list[str]) -> None:
        if names:
            self.instructions.append(ir.Free(tuple(names)))

    def _call(self, extern: Extern) -> None:
        target = callable_name(extern.target) or self._keep_alive(extern.target)
        result, args, kwargs = extern.result, self.tree(tuple(extern.args)), self.tree(dict(extern.kwargs))
        made = isinstance(result, Buffer) and extern.overwrites is None
        name = f"b{next(self._buffers)}" if made else f"x{next(self._hosts)}"
        self.instructions.append(ir.Call(name, target, args, kwargs))
        if extern.overwrites is not None:
            return
        self._names[result] = name
        if isinstance(result, Buffer) and result in self._uses.laid_out:
            self.instructions.append(ir.Check(name, *self._layout(result), result.dtype.value))

    # trees

    def tree(self, tree: Any) -> ir.Tree:
        """An argument or output tree with names instead of buffers."""
        if type(tree) in _PLAIN:
            return tree
        match tree:
            case View():
                return self._view(tree)
            case Buffer() | HostValue():
                return ir.Ref(self._name(tree))
            case Poly() | Symbol():
                constant = Poly.of(tree).constant
                return ir.SizeOf(self._size(tree)) if constant is None else constant
            case torch.Tensor() | RowLoop():
                return self._constant(tree)
            case list():
                return [self.tree(x) for x in tree]
            case tuple() if type(tree) in (tuple, torch.Size):
                return tuple(self.tree(x) for x in tree)
            case dict():
                return {self.tree(k): self.tree(v) for k, v in tree.items()}
            case slice():
                return slice(self.tree(tree.start), self.tree(tree.stop), self.tree(tree.step))
            case torch.dtype() | torch.layout() | torch.memory_format() | torch.device():
                return ir.TorchValue(type(tree).__name__, str(tree).removeprefix("torch."))
        return self._keep_alive(tree)

    def _view(self, view: View) -> ir.Ref:
        name = self._name(view.buffer)
        if view.is_whole:
            return ir.Ref(name)
        return ir.Ref(name, *self._layout(view), self._size(view.offset))

    def _constant(self, tensor: torch.Tensor | RowLoop) -> ir.Constant:
        number = next((n for n, known in self.constants.items() if known is tensor), len(self.constants))
        self.constants[number] = tensor
        return ir.Constant(number)

    def _keep_alive(self, value: Any) -> ir.Live:
        name = next((n for n, known in self.live.items() if known is value), f"l{len(self.live)}")
        self.live[name] = value
        return ir.Live(name)


def _same_layout(a: Buffer, b: Buffer) -> bool:
    return (a.shape, a.strides, a.dtype, a.device) == (b.shape, b.strides, b.dtype, b.device)


def _same_bytes(a: Buffer, b: Buffer) -> bool:
    # Only dense buffers: there the number of elements is the extent of the storage, at any size.
    sizes = [product(x.shape) * x.dtype.bytes for x in (a, b)]
    return a.device == b.device and _is_dense(a) and _is_dense(b) and sizes[0] is sizes[1]


def _is_dense(buffer: Buffer) -> bool:
    last = sum(((size - 1) * stride for size, stride in zip(buffer.shape, buffer.strides, strict=True)), Poly.ZERO)
    return last + 1 is product(buffer.shape)
