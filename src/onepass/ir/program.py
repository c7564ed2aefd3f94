"""The program: buffers and the statements that define them, in order.

`Define` is a computation the compiler understands; `Extern` is a call that runs as eager would.
Lowering makes a Program, the planner reads it. Statements have identity and carry their origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .buffer import Buffer as Buffer
from .expr import Expr, rendered
from .orders import NO_ORDERS, Orders
from .poly import Axis, Poly, Symbol


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a statement came from: the FX node, its operation, and the user's line."""

    node: str
    op: str
    line: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class HostValue:
    """Something on the host that kernels do not read: a tuple, an object, an unsupported tensor."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class View:
    """`buffer` seen through (shape, strides, offset): made on the host, no kernel."""

    buffer: Buffer
    shape: tuple[Poly, ...]
    strides: tuple[Poly, ...]
    offset: Poly

    @property
    def is_whole(self) -> bool:
        b = self.buffer
        return self.shape == b.shape and self.strides == b.strides and self.offset is Poly.ZERO


# What an Extern's argument tree holds at its leaves: a View, a HostValue, a Poly (a size), or a literal.
Argument: TypeAlias = Any
Result: TypeAlias = Buffer | HostValue


@dataclass(frozen=True, slots=True, eq=False)
class Define:
    """buffer[axes] = value, for every point. `value` may hold one reduction at its root."""

    buffer: Buffer
    axes: tuple[Axis, ...]  # one per dimension of extent other than 1, named "d<dimension>"
    value: Expr
    origin: Origin
    orders: Orders = NO_ORDERS

    @property
    def dimensions(self) -> tuple[Axis, ...]:
        """One axis per dimension of the buffer, those of extent 1 included."""
        named = {a.name: a for a in self.axes}
        return tuple(named.get(f"d{k}", Axis(f"d{k}", size)) for k, size in enumerate(self.buffer.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Extern:
    """result = target(*args, **kwargs), as eager does it. `why` says why it is not a Define."""

    result: Result
    target: Callable[..., Any]
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    origin: Origin
    why: str
    ordered: bool = False  # keeps program order with other ordered externs (side effects, RNG)
    contraction: Define | None = None  # the same result as a sum of products, for kernels that can do it
    overwrites: Buffer | None = None  # the result is that tensor, of which the call changes a part
    orders: Orders = NO_ORDERS

    @property
    def is_collective(self) -> bool:
        """Whether it starts an exchange with other processes."""
        return getattr(self.target, "namespace", "") == "_c10d_functional" and not self.is_wait

    @property
    def is_wait(self) -> bool:
        """Whether it waits for an exchange that was started: it has no place among other calls."""
        return getattr(getattr(self.target, "_schema", None), "name", "") == "_c10d_functional::wait_tensor"


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """At the end of the program, the input `target` holds `source`."""

    target: Buffer
    source: Buffer
    origin: Origin


Statement: TypeAlias = Define | Extern | Update


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Inputs in call order (a Symbol is an integer argument), statements in order, outputs as returned."""

    inputs: tuple[Buffer | HostValue | Symbol, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[Argument, ...]  # View | HostValue | Poly | literal (None, float)
    symbol_sources: dict[Symbol, tuple[Buffer, int]] = field(default_factory=dict)  # a size of an input
    kept: dict[Buffer, Origin] = field(default_factory=dict)  # values that must be in memory, and who asked for it

    def defines(self) -> list[Define]:
        return [s for s in self.statements if isinstance(s, Define)]

    def externs(self) -> list[Extern]:
        return [s for s in self.statements if isinstance(s, Extern)]

    def __repr__(self) -> str:
        inputs = ", ".join(map(_input, self.inputs))
        lines = [f"program({inputs}):"]
        lines += [f"  {s} = size {dim} of {buffer}" for s, (buffer, dim) in self.symbol_sources.items()]
        lines += [f"  {print_statement(s)}" for s in self.statements]
        lines.append(f"  return {', '.join(_argument(o) for o in self.outputs)}")
        return "\n".join(lines)


def leaves(tree: Argument) -> Iterator[Argument]:
    """The leaves of an argument tree of tuples, lists, dicts and slices."""
    if isinstance(tree, slice):
        tree = (tree.start, tree.stop, tree.step)
    elif isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        yield tree
        return
    for item in tree:
        yield from leaves(item)


def held(tree: Argument) -> Iterator[Buffer | HostValue]:
    """The buffers and host values in a tree of arguments or outputs."""
    for leaf in leaves(tree):
        if isinstance(leaf, View | Buffer | HostValue):
            yield leaf.buffer if isinstance(leaf, View) else leaf


def buffers_in(tree: Argument) -> Iterator[Buffer]:
    """The buffers in a tree of arguments or outputs."""
    return (value for value in held(tree) if isinstance(value, Buffer))


def contiguous_strides(shape: tuple[Poly, ...]) -> tuple[Poly, ...]:
    """Row-major strides."""
    strides: list[Poly] = []
    step = Poly.ONE
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def print_statement(statement: Statement) -> str:
    """One statement, on one line."""
    origin = statement.origin
    note = "  ".join(t for t in (origin.op, origin.line) if t)
    match statement:
        case Define():
            axes = ", ".join(f"{a.name}:{a.extent}" for a in statement.axes)
            lines, value = rendered(statement.value)
            shared = "".join(f"{line}; " for line in lines)
            text = f"{statement.buffer.name}: {statement.buffer.dtype!r}[{axes}] = {shared}{value}"
        case Extern():
            args = [_argument(a) for a in statement.args]
            args += [f"{k}={_argument(a)}" for k, a in statement.kwargs.items()]
            text = f"{statement.result} = extern {origin.op}({', '.join(args)})"
            note = f"{note}  why: {statement.why}"
        case Update():
            text = f"update {statement.target} <- {statement.source}"
    return f"{text}    # {note}" if note else text


def _argument(value: object) -> str:
    match value:
        case View():
            if value.is_whole:
                return value.buffer.name
            shape = ", ".join(map(repr, value.shape))
            strides = ", ".join(map(repr, value.strides))
            return f"{value.buffer.name}.view(({shape}), ({strides}), {value.offset})"
        case tuple() | list():
            return f"[{', '.join(_argument(v) for v in value)}]"
        case HostValue() | Poly() | int() | float() | str() | None:
            return f"{value!r}"
    return type(value).__name__ if not type(value).__module__.startswith("torch") else str(value).split("\n")[0]


def _input(value: Buffer | HostValue | Symbol) -> str:
    if isinstance(value, Buffer):
        return f"{value.name}: {value.dtype!r}[{', '.join(map(repr, value.shape))}]"
    return repr(value)
