"""One step of a loop as a graph of its own, and its results as linear maps of a result of the step before.

`linear` follows a value through sums, differences, products and quotients by what does not depend on the state:
(1 - z) * h + z * x is a * h + b with a = 1 - z and b = z * x. A value that is no such map has none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .equal_steps import Before, Loop, Operand, Same, value_of

MAPPED = "steps_"  # the name of a module that is a part of a step, for all steps
Term: TypeAlias = Node | float | None  # None is nothing: a sum without that term


class NotOneStep(Exception):
    """A loop stays as it is."""


# --- operations ---

_NAMES: dict[object, str] = {}
for _name, _targets in {
    "add": (operator.add, operator.iadd, torch.add, "add", "__add__", "__radd__"),
    "sub": (operator.sub, operator.isub, torch.sub, "sub", "__sub__"),
    "mul": (operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "__mul__", "__rmul__"),
    "div": (operator.truediv, operator.itruediv, torch.div, "div", "__truediv__"),
    "neg": (operator.neg, torch.neg, "neg"),
    "lerp": (torch.lerp, "lerp"),
    "addcmul": (torch.addcmul, "addcmul"),
    "same": ("to", "float", "double", "type", "contiguous", "clone", torch.clone),
}.items():
    _NAMES |= dict.fromkeys(_targets, _name)
# An operation on its own operand, and what it is where nobody else reads that.
_PLAIN = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}  # fmt: skip


def functional(loop: Loop, number: int) -> object:
    """The operation of a node of a step, without effect; `NotOneStep` where it has one."""
    node = loop.steps[0][number]
    if node.op not in ("call_function", "call_method"):
        raise NotOneStep
    if node.target in _PLAIN:
        own = loop.operands[number][0]
        if not isinstance(own, Same) or any(len(step[own.number].users) > 1 for step in loop.steps):
            raise NotOneStep
        if _NAMES.get(loop.steps[0][own.number].target) not in ("add", "sub", "mul", "div"):
            raise NotOneStep  # a view, which others may see
        return _PLAIN[node.target]
    if changes(node) or not isinstance(value_of(node), Tensor | tuple | list):
        raise NotOneStep
    return node.target


def changes(node: Node) -> bool:
    """Whether an operation may write into what it is given."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module" and not str(node.target).startswith(MAPPED)
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    by_name = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name[3:4] != "n")
    known = node.target in _CHANGING or node.target in _PLAIN
    return by_name or known or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


_CHANGING = {
    operator.setitem, operator.delitem, operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imod,
    operator.ilshift, operator.irshift, operator.imatmul, operator.ifloordiv,
}  # fmt: skip


# --- a part of a step ---


@dataclass
class Stage:
    """A part of a step that needs no state that is not known yet: `module` computes it for one step."""

    loop: Loop
    ready: Callable[[Operand, Stage], bool]  # whether an operand is known
    graph: Graph = field(default_factory=Graph)
    given: dict[Operand, Node] = field(default_factory=dict)
    made: dict[int, Node] = field(default_factory=dict)
    results: list[Node] = field(default_factory=list)

    def operand(self, source: Operand) -> Node:
        """What a node of the step reads: made here, else given from outside."""
        if isinstance(source, Same) and source.number in self.made:
            return self.made[source.number]
        if not self.ready(source, self):
            raise NotOneStep
        if source not in self.given:
            with self.graph.inserting_before(None):
                self.given[source] = self.graph.placeholder(f"x{len(self.given)}")
        return self.given[source]

    def make(self, number: int) -> None:
        """Compute a node of the step."""
        sources = iter([self.operand(s) for s in self.loop.operands[number]])
        node = self.loop.steps[0][number]
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: next(sources))
        self.made[number] = self.graph.create_node(node.op, functional(self.loop, number), args, kwargs)

    def call(self, function: Callable[..., Any], *args: Any) -> Node:
        return self.graph.call_function(function, args)

    def give(self, value: Node) -> int:
        """One more result; its number."""
        if value not in self.results:
            self.results.append(value)
        return self.results.index(value)

    @property
    def sources(self) -> list[Operand]:
        """What is given, in the order of the graph's inputs."""
        return list(reversed(self.given))

    def module(self) -> GraphModule:
        self.graph.output(tuple(self.results))
        return GraphModule(torch.nn.Module(), self.graph)


@dataclass(frozen=True, slots=True)
class Linear:
    """a * h + b."""

    a: Term
    b: Term


def linear(stage: Stage, number: int) -> Linear | None:
    """A result of the step as a linear map of the same result of the step before."""
    state, path = _path(stage.loop, number)
    maps: dict[int, Linear] = {}
    shape = value_of(stage.loop.steps[0][number])
    try:
        for k in path:
            node = stage.loop.steps[0][k]
            given: list[Linear] = []
            for source in stage.loop.operands[k]:
                if source == state:
                    given.append(Linear(1.0, None))
                elif isinstance(source, Same) and source.number in maps:
                    given.append(maps[source.number])
                else:
                    given.append(Linear(None, stage.operand(source)))
            if value_of(node).dtype != shape.dtype:
                return None  # the state is rounded
            functional(stage.loop, k)
            maps[k] = _Rules(stage).of(node, given)
    except NotOneStep:
        return None
    return maps[number]


def _path(loop: Loop, number: int) -> tuple[Before, list[int]]:
    """The state that a result is made from, and the nodes on the way from it, in order."""
    state = next(o for sources in loop.operands for o in sources if isinstance(o, Before) and o.number == number)
    reached: list[int] = []
    for k, sources in enumerate(loop.operands):
        if any(s == state or (isinstance(s, Same) and s.number in reached) for s in sources):
            reached.append(k)
    needed = {number}
    for k in reversed(reached):
        if k in needed:
            needed |= {s.number for s in loop.operands[k] if isinstance(s, Same) and s.number in reached}
    return state, [k for k in reached if k in needed]


class _Rules:
    """Linear maps through operations."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def of(self, node: Node, given: Sequence[Linear]) -> Linear:
        name = _NAMES.get(node.target)
        rest = iter(given)
        args = [next(rest) if isinstance(a, Node) else a for a in node.args]
        if any(isinstance(v, Node) for v in node.kwargs.values()) or (node.kwargs and name != "same"):
            raise NotOneStep
        if name == "same":
            if len(given) != 1:
                raise NotOneStep
            return given[0]
        if name is None or not all(isinstance(a, Linear | int | float) for a in args):
            raise NotOneStep
        maps = [a if isinstance(a, Linear) else Linear(None, float(a)) for a in args]
        match name, maps:
            case "add", (x, y):
                return self.sum(x, y)
            case "sub", (x, y):
                return self.sum(x, self.times(y, -1.0))
            case "mul", (x, y):
                return self.product(x, y)
            case "div", (x, y) if y.a is None:
                return Linear(self.quotient(x.a, y.b), self.quotient(x.b, y.b))
            case "neg", (x,):
                return self.times(x, -1.0)
            case "lerp", (x, y, w) if w.a is None:
                return self.sum(self.times(x, self.add(1.0, self.mul(w.b, -1.0))), self.times(y, w.b))
            case "addcmul", (x, y, z):
                return self.sum(x, self.product(y, z))
        raise NotOneStep

    def sum(self, x: Linear, y: Linear) -> Linear:
        return Linear(self.add(x.a, y.a), self.add(x.b, y.b))

    def product(self, x: Linear, y: Linear) -> Linear:
        if x.a is not None and y.a is not None:
            raise NotOneStep
        return self.times(x, y.b) if y.a is None else self.times(y, x.b)

    def times(self, x: Linear, factor: Term) -> Linear:
        return Linear(self.mul(x.a, factor), self.mul(x.b, factor))

    def add(self, x: Term, y: Term) -> Term:
        if x is None or y is None:
            return y if x is None else x
        return self._of(operator.add, x, y)

    def mul(self, x: Term, y: Term) -> Term:
        if x is None or y is None:
            return None
        if 1.0 in (x, y):
            return y if x == 1.0 else x
        if -1.0 in (x, y):
            other = y if x == -1.0 else x
            return self.stage.call(operator.neg, other) if isinstance(other, Node) else -other
        return self._of(operator.mul, x, y)

    def quotient(self, x: Term, y: Term) -> Term:
        if y is None:
            raise NotOneStep
        return None if x is None else self._of(operator.truediv, x, y)

    def _of(self, function: Callable[..., Any], x: Node | float, y: Node | float) -> Node | float:
        if isinstance(x, Node) or isinstance(y, Node):
            return self.stage.call(function, x, y)
        value: float = function(x, y)
        return value
