"""A program as text without names: equal for programs that compute the same on tensors of the same layout.

Buffers are numbered as they are met; the order of operands that commute, which depends on names, does not count.
Such a text is a key: what was measured of one layer of a model holds for the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch

from .callables import callable_name
from .expr import Const, Expr, Index, Load, Part, Pointwise, Random, Reduce, Scan, postorder
from .ops import OPS
from .poly import Atom, Axis, Indirect, Poly, Quotient, Remainder, Symbol
from .program import Argument, Buffer, Define, Extern, Program, View

_LITERALS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
Say = Callable[[Expr], str]  # the name of a value
Call = Callable[[Buffer], str]


class Unwritable(Exception):
    """The program holds something that has no such text."""


def structure(program: Program) -> str:
    """The text of a program of definitions and library calls; `Unwritable` where it has none."""
    writer = _Writer()
    for s in program.statements:
        match s:
            case Define():
                value = writer.expression(s.value)
                writer.lines.append(f"{writer.buffer(s.buffer)}[{_axes(s.axes)}] = {value}")
            case Extern(target=target, result=Buffer() as result) if callable_name(target) is not None:
                arguments = f"{writer.tree(s.args)} {writer.tree(s.kwargs)}"
                writer.lines.append(f"{writer.buffer(result)} = {callable_name(target)} {arguments}")
            case _:
                raise Unwritable
    writer.lines.append(f"return {writer.tree(program.outputs)}")
    return "\n".join(writer.lines)


class _Writer:
    """Lines so far, and the numbers of buffers and values."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.buffers: dict[Buffer, str] = {}
        self.values = 0

    def buffer(self, buffer: Buffer) -> str:
        if buffer not in self.buffers:
            self.buffers[buffer] = f"b{len(self.buffers)}"
            self.lines.append(f"{self.buffers[buffer]}: {_layout(buffer)}")
        return self.buffers[buffer]

    def expression(self, root: Expr) -> str:
        """Write down a value and what it is made of; its name."""
        kinds = _kinds(root, lambda b: self.buffers.get(b) or _layout(b))
        names: dict[Expr, str] = {}
        stack = [(root, False)]
        while stack:
            e, ready = stack.pop()
            children = _operands(e, kinds)
            if not ready and e not in names:
                stack.append((e, True))
                stack.extend((c, False) for c in reversed(children))
            elif e not in names:
                text = f"{_own(e, self.buffer, names.__getitem__)} {[names[c] for c in children]}"
                names[e] = f"v{self.values}"
                self.values += 1
                self.lines.append(f"{names[e]} = {text}")
        return names[root]

    def tree(self, tree: Argument) -> str:
        match tree:
            case View():
                places = f"{_polys(tree.shape)} {_polys(tree.strides)} {_polys([tree.offset])}"
                return f"{self.buffer(tree.buffer)} seen as {places}"
            case Poly():
                return _polys([tree])
            case tuple() | list():
                return f"[{', '.join(self.tree(t) for t in tree)}]"
            case dict():
                return ", ".join(f"{k}={self.tree(v)}" for k, v in sorted(tree.items()))
        if not isinstance(tree, _LITERALS):
            raise Unwritable
        return repr(tree)


def _kinds(root: Expr, call: Call) -> dict[Expr, str]:
    """Of every value a digest that no name has part in."""
    kinds: dict[Expr, str] = {}
    for e in postorder([root]):
        text = f"{_own(e, call, kinds.__getitem__)} {[kinds[c] for c in _operands(e, kinds)]}"
        kinds[e] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return kinds


def _operands(e: Expr, kinds: dict[Expr, str]) -> list[Expr]:
    commutes = isinstance(e, Pointwise) and OPS[e.op].commutative
    return sorted(e.children, key=kinds.__getitem__) if commutes else list(e.children)


def _own(e: Expr, call: Call, say: Say) -> str:
    """What a value is beside its operands."""
    kind = f"{type(e).__name__} {e.dtype.value}"
    match e:
        case Const():
            return f"{kind} {e.payload}"
        case Load():
            return f"{kind} {call(e.buffer)} {_polys(e.index, say)}"
        case Index():
            return f"{kind} {_polys([e.poly], say)}"
        case Pointwise():
            return f"{kind} {e.op}"
        case Reduce():
            return f"{kind} {e.monoid} {_axes(e.over)}"
        case Scan():
            return f"{kind} {e.monoid} {_axes([e.over])} {_polys([e.at], say)}"
        case Part():
            return f"{kind} {e.index}"
        case Random():
            return f"{kind} {e.stream} {_polys([e.index], say)}"
    raise AssertionError(type(e))


def _layout(buffer: Buffer) -> str:
    return f"{buffer.dtype.value} {_polys(buffer.shape)} {_polys(buffer.strides)} {buffer.device}"


def _axes(axes: Iterable[Axis]) -> str:
    return ", ".join(f"{a.name}:{_polys([a.extent])}" for a in axes)


def _polys(polys: Iterable[Poly], say: Say = repr) -> str:
    return f"({', '.join(_poly(p, say) for p in polys)})"


def _poly(poly: Poly, say: Say) -> str:
    return " + ".join(sorted("*".join([*sorted(_atom(a, say) for a in atoms), str(c)]) for atoms, c in poly.terms))


def _atom(atom: Atom, say: Say) -> str:
    match atom:
        case Axis():
            return atom.name
        case Symbol():
            return f"{atom.name}={atom.hint}"
        case Quotient():
            return f"({_poly(atom.numerator, say)} // {_poly(atom.denominator, say)})"
        case Remainder():
            return f"({_poly(atom.numerator, say)} % {_poly(atom.denominator, say)})"
        case Indirect():
            return f"[{say(atom.value)}]"
    raise AssertionError(type(atom))
