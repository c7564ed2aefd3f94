"""Which steps of a host program a CUDA graph can repeat, and what the others are.

A call of a recorded program is: `before` (sizes, layouts of inputs), `drawn` (seeds and other numbers of the host), one
launch of the graph, `after` (copies into inputs). Kernels take new addresses on every call, so what only they write can
be a new tensor (`fresh`); calls of the library cannot, so what they read and write stays where it is and is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import OnepassError
from ..ir import source as ir
from ..ir.callables import resolve_callable
from ..ir.row_loop import RowLoop

SEED, CONSTANT, LOOP = "onepass.seed.default", "onepass.graph_constant", "onepass.over_rows"
LATER = "recorded after the first calls"
_OWN = (LOOP, "onepass.attention", "operator.getitem")
_ON_HOST = ("operator.", "math.", "builtins.", "torch.sym_")
_UNKNOWN_SIZE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_RANDOM = torch.Tag.nondeterministic_seeded


class NotRecordable(OnepassError):
    """Why a program runs without a graph."""


@dataclass(slots=True)
class Parts:
    """A host program, taken apart. Names are those of the program."""

    device: str = ""
    before: list[ir.Bind | ir.Check] = field(default_factory=list)
    drawn: list[ir.Call | ir.Check] = field(default_factory=list)
    steps: list[ir.Instruction] = field(default_factory=list)
    after: list[ir.Copy | ir.WriteBack] = field(default_factory=list)
    fresh: list[ir.Allocate] = field(default_factory=list)  # made anew by each call
    results: list[ir.Ref] = field(default_factory=list)  # seen by callers, but made where they always are
    constants: set[str] = field(default_factory=set)  # of those drawn: tensors of the graph
    read: list[str] = field(default_factory=list)  # inputs that calls of the library read
    written: set[str] = field(default_factory=set)  # of those: inputs that they write

    @property
    def of_host(self) -> set[str]:
        """Names of what is drawn."""
        return {i.result for i in self.drawn if isinstance(i, ir.Call)}

    @property
    def seeds(self) -> list[str]:
        """Of those, what is random."""
        return [i.result for i in self.drawn if isinstance(i, ir.Call) and i.target == SEED]


def take_apart(host: ir.HostProgram) -> Parts:
    """The parts; `NotRecordable` says what no graph repeats."""
    parts, inputs = Parts(), set(host.inputs)
    called: set[str] = set()  # names that calls of the library take or make
    for instruction in host.instructions:
        _sort(instruction, parts, inputs, host, called)
    launches = [i for i in parts.steps if isinstance(i, ir.STEPS)]
    if len(launches) < 2:
        raise NotRecordable("one launch or none, which a graph does not make faster")
    seen = [r for tree in host.outputs for r in refs(tree)]
    copied = [ir.Ref(c.source) for c in parts.after if isinstance(c, ir.Copy)]
    names = {r.name for r in (*seen, *copied)}
    parts.fresh = [i for i in parts.steps if isinstance(i, ir.Allocate) and i.name in names and i.name not in called]
    made = {i.name for i in parts.fresh} | inputs | parts.of_host
    parts.results = list(dict.fromkeys(r for r in (*seen, *copied) if r.name not in made))
    parts.steps = [s for i in parts.steps if i not in parts.fresh for s in _freed(i, names | inputs | parts.of_host)]
    parts.read = [n for n in host.inputs if n in called and n.startswith("a")]
    return parts


def _freed(instruction: ir.Instruction, kept: set[str]) -> Iterator[ir.Instruction]:
    if isinstance(instruction, ir.Free):
        names = tuple(n for n in instruction.names if n not in kept)
        yield from [replace(instruction, names=names)] if names else []
    else:
        yield instruction


def _sort(instruction: ir.Instruction, parts: Parts, inputs: set[str], host: ir.HostProgram, called: set[str]) -> None:
    match instruction:
        case ir.Bind():
            parts.before.append(instruction)
        case ir.Check(name=name):
            into: list[Any] = parts.before if name in inputs else parts.drawn if name in parts.of_host else parts.steps
            into.append(instruction)
        case ir.WriteBack() | ir.Copy():
            parts.after.append(instruction)
        case ir.Free():
            parts.steps.append(instruction)
        case ir.Allocate() | ir.Launch():
            _one_device(instruction, parts, inputs)
            parts.steps.append(instruction)
        case ir.Call():
            _sort_call(instruction, parts, inputs, host, called)
    if isinstance(instruction, ir.Launch | ir.Call) and any(isinstance(i, ir.Copy) for i in parts.after):
        raise NotRecordable("a step follows the copies into inputs")


def _one_device(instruction: ir.Allocate | ir.Launch, parts: Parts, inputs: set[str]) -> None:
    if isinstance(instruction, ir.Launch) and not instruction.programs:
        raise NotRecordable("a kernel runs on the CPU")
    parts.device = parts.device or instruction.device
    if instruction.device != parts.device:
        raise NotRecordable(f"tensors are on {parts.device} and on {instruction.device}")
    if isinstance(instruction, ir.Launch) and not set(instruction.numbers) <= parts.of_host | inputs:
        raise NotRecordable("a kernel takes a number that a call of the library computes")


def _sort_call(call: ir.Call, parts: Parts, inputs: set[str], host: ir.HostProgram, called: set[str]) -> None:
    taken = {r.name for r in refs((call.args, call.kwargs))}
    on_host = {n for n in inputs if n.startswith("x")} | (parts.of_host - parts.constants)
    if isinstance(call.target, str) and (
        call.target in (SEED, CONSTANT) or (call.target.startswith(_ON_HOST) and taken <= on_host - set(parts.seeds))
    ):
        parts.drawn.append(call)
        if call.target == CONSTANT:
            parts.constants.add(call.result)
        return
    _check_target(call, host)
    if taken & on_host:
        raise NotRecordable(f"{call.target} takes a number of the host")
    parts.written |= _written(call) & inputs
    called |= taken | {call.result}
    parts.steps.append(call)


def _check_target(call: ir.Call, host: ir.HostProgram) -> None:
    name = call.target
    if not isinstance(name, str):
        raise NotRecordable("a call has no name that says what it does")
    if name == LOOP:
        for leaf in _leaves(call.args):
            if isinstance(leaf, ir.Constant) and isinstance(loop := host.constants[leaf.number], RowLoop):
                _check_body(loop)
    if name in _OWN:
        return
    if not name.startswith("aten."):
        raise NotRecordable(f"{name} may do what a graph does not repeat")
    try:
        operator: Any = resolve_callable(name)
    except LookupError as error:
        raise NotRecordable(str(error)) from error
    if any(tag in operator.tags for tag in _UNKNOWN_SIZE):
        raise NotRecordable(f"the host waits for what {name} computes")
    if _RANDOM in operator.tags and _probability(operator, call) != 0:
        raise NotRecordable(f"{name} draws random numbers")


def _check_body(loop: RowLoop) -> None:
    for node in loop.body.graph.nodes:
        if _RANDOM in getattr(node.target, "tags", ()):
            raise NotRecordable(f"{node.target} in a loop over rows draws random numbers")


def _probability(operator: Any, call: ir.Call) -> Any:
    """Of dropout, as an operator takes it; None where it takes none."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = call.args[position] if position < len(call.args) else argument.default_value
            return call.kwargs.get(argument.name, given)
    return None


def _written(call: ir.Call) -> set[str]:
    """Names of what an operator writes."""
    if call.target in _OWN:
        return set()
    found: list[Any] = []
    for position, argument in enumerate(resolve_callable(str(call.target))._schema.arguments):  # type: ignore[attr-defined]
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(call.args[position] if position < len(call.args) else call.kwargs.get(argument.name))
    return {r.name for r in refs(found)}


def _leaves(tree: ir.Tree) -> Iterator[Any]:
    match tree:
        case list() | tuple():
            for part in tree:
                yield from _leaves(part)
        case dict():
            for part in tree.values():
                yield from _leaves(part)
        case _:
            yield tree


def refs(tree: ir.Tree) -> Iterator[ir.Ref]:
    """Every name in a tree, with its view."""
    return (leaf for leaf in _leaves(tree) if isinstance(leaf, ir.Ref))
