"""Definitions and programs as text without names: equal where the same is computed on tensors of the same layout.

Buffers are numbered as they are met. Such a text is a key: what is known of one layer of a model holds for the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from .callables import callable_name
from .expr import Const, Expr, Index, Indirect, Load, Part, Pointwise, Random, Reduce, Scan, postorder
from .plan import Store
from .poly import PLACE, Atom, Axis, Division, Poly, Symbol
from .program import Argument, Buffer, Define, Extern, Program, View

_LITERALS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
Say = Callable[[Expr], str]  # the name of a value


class Unwritable(Exception):
    """The program holds something that has no such text."""


@dataclass(frozen=True, slots=True)
class Form:
    """A definition without names. The text numbers `buffers`: the one it defines, then those it reads.

    `places`: of the reductions of a program that were put into it, in order; the text numbers these, too.
    """

    text: str
    buffers: tuple[Buffer, ...]
    places: tuple[str, ...]


@lru_cache(maxsize=16384)
def form(define: Define | Store) -> Form:
    """What a definition or a store computes."""
    buffers = {define.buffer: 0}
    names: dict[Expr, str] = {}
    lines: list[str] = []
    for e in postorder([define.value]):
        own = _own(e, lambda b: buffers.setdefault(b, len(buffers)), names.__getitem__)
        names[e] = f"v{len(names)}"
        lines.append(f"{own} {','.join(names[c] for c in e.children)}")
    text = "\n".join((*map(_layout, buffers), _axes(define.axes), *lines))
    places = sorted(set(PLACE.findall(text)))
    if places:
        text = PLACE.sub(lambda found: f".{places.index(found[0])}", text)
    return Form(sys.intern(text), tuple(buffers), tuple(places))


def structure(program: Program) -> str:
    """The text of a program of definitions and library calls; `Unwritable` where it has none."""
    writer = _Writer()
    for s in program.statements:
        match s:
            case Define():
                found = form(s)
                writer.lines.append(f"{[writer.buffer(b) for b in found.buffers]} {found.text}")
            case Extern(target=target, result=Buffer() as result) if callable_name(target) is not None:
                arguments = f"{writer.tree(s.args)} {writer.tree(s.kwargs)}"
                writer.lines.append(f"{writer.buffer(result)} = {callable_name(target)} {arguments}")
            case _:
                raise Unwritable
    writer.lines.append(f"return {writer.tree(program.outputs)}")
    return "\n".join(writer.lines)


class _Writer:
    """Lines so far, and the numbers of buffers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.buffers: dict[Buffer, str] = {}

    def buffer(self, buffer: Buffer) -> str:
        if buffer not in self.buffers:
            self.buffers[buffer] = f"b{len(self.buffers)}"
            self.lines.append(f"{self.buffers[buffer]}: {_layout(buffer)}")
        return self.buffers[buffer]

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


def _own(e: Expr, number: Callable[[Buffer], int], say: Say) -> str:
    """What a value is beside its operands."""
    kind = f"{type(e).__name__} {e.dtype.value}"
    match e:
        case Const():
            return f"{kind} {e.payload}"
        case Load():
            return f"{kind} b{number(e.buffer)} {_polys(e.index, say)}"
        case Index():
            return f"{kind} {_polys([e.poly], say)}"
        case Pointwise():
            return f"{kind} {e.op}"
        case Reduce():
            return f"{kind} {e.monoid} {_axes(e.over)}"
        case Scan():
            return f"{kind} {e.monoid} {_axes([e.over])} {_polys([e.at], say)} {e.reverse}"
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
    return f"({', '.join(_plain(p) or _poly(p, say) for p in polys)})"


@lru_cache(maxsize=16384)
def _plain(poly: Poly) -> str:
    """The text of a poly in which no value is an index; else nothing."""
    return "" if poly.indirects() else _poly(poly, repr)


def _poly(poly: Poly, say: Say) -> str:
    return " + ".join("*".join([*(_atom(a, say) for a in atoms), str(c)]) for atoms, c in poly.terms) or "0"


def _atom(atom: Atom, say: Say) -> str:
    match atom:
        case Axis():
            return atom.name
        case Symbol():
            return f"{atom.name}={atom.hint}>={atom.lower}"
        case Division():
            return f"({_poly(atom.numerator, say)} {atom.sign} {_poly(atom.denominator, say)})"
        case Indirect():
            return f"[{say(atom.value)}]"
    raise AssertionError(type(atom))
