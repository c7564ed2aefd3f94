"""Inlining: the value of a buffer with every virtual producer substituted into it.

In: defines of one group. Out: for a stored buffer, one expression whose loads are all real memory.
Invariant: reduction axes are renamed per define, so no substitution can capture a bound axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ..errors import VerifyError
from ..ir.expr import Expr, Load, Part, Pointwise, Reduce, Scan, postorder, rebind, rewrite, substitute_axes
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, Define, HostValue, Statement, Update, held
from .one_hot import sum_of_one
from .reach import in_order


def rename_bound(define: Define, places: dict[Expr, int]) -> Expr:
    """The define's value with the axes of its reduction or scan named after the place of that in the program.

    `places` remembers them: equal reductions of several defines stay equal.
    """
    found = [e for e in postorder([define.value]) if isinstance(e, Reduce | Scan)]
    if not found:
        return define.value
    if len(found) > 1:
        raise VerifyError(f"{define.buffer!r} holds more than one reduction or scan")
    place = places.setdefault(found[0], define.buffer.place)
    over = found[0].over if isinstance(found[0], Reduce) else (found[0].over,)
    names = {a: Axis(f"{a.name}.{place:09d}", a.extent) for a in over}
    return rebind(define.value, {a: n.poly() for a, n in names.items()}, {a: (n,) for a, n in names.items()})


@dataclass(slots=True)
class Memo:
    """What the inliners of one planning run share: expansions met before, and the places of reductions."""

    values: dict[tuple[object, ...], Expr] = field(default_factory=dict)
    places: dict[Expr, int] = field(default_factory=dict)


class Inliner:
    """Inlined values of the defines in one kernel.

    `stored` buffers are written by this kernel: their readers inside it see the rounded value.
    """

    def __init__(
        self, defines: Mapping[Buffer, Define], stored: Iterable[Buffer] = (), memo: Memo | None = None
    ) -> None:
        self.defines = defines
        self.stored = frozenset(stored)
        self._memo = Memo() if memo is None else memo
        self._values: dict[Buffer, Expr] = {}

    def value(self, buffer: Buffer) -> Expr:
        """The value of a buffer over its define's own axes."""
        if buffer not in self._values:
            for needed in self._pending(buffer):
                self._values[needed] = self._expand(self.defines[needed])
        return self._values[buffer]

    def _pending(self, buffer: Buffer) -> Iterable[Buffer]:
        """Producers not yet expanded, in dependency order."""
        return in_order([buffer], lambda b: (x for x in self._inlined(b) if x not in self._values))

    def _inlined(self, buffer: Buffer) -> list[Buffer]:
        """What a buffer's define reads of others."""
        return [b for b in loaded(self.defines[buffer].value) if b in self.defines]

    def _expand(self, define: Define) -> Expr:
        key = (define, *((b, self._values[b], b in self.stored) for b in self._inlined(define.buffer)))
        if key not in self._memo.values:
            self._memo.values[key] = self._inline(define)
        return self._memo.values[key]

    def _inline(self, define: Define) -> Expr:
        def inline(e: Expr) -> Expr | None:
            if isinstance(e, Part):
                return sum_of_one(e)
            if not isinstance(e, Load) or e.buffer not in self.defines:
                return None
            producer = self.defines[e.buffer]
            value = substitute_axes(self._values[e.buffer], dict(zip(producer.dimensions, e.index, strict=True)))
            return exact(value) if e.buffer in self.stored else value

        return rewrite(rename_bound(define, self._memo.places), inline)


def exact(value: Expr) -> Expr:
    """A value whose final 16-bit rounding may not be undone: readers see what is stored."""
    if isinstance(value, Pointwise) and value.op == "narrow":
        return Pointwise("cast", value.args, value.dtype)
    return value


@lru_cache(maxsize=8192)
def loaded(value: Expr) -> tuple[Buffer, ...]:
    """Buffers an expression reads, in order of first appearance."""
    return tuple(loads_of([value]))


def read_by(statement: Statement) -> Iterable[Buffer | HostValue]:
    """The buffers and host values that a statement reads."""
    match statement:
        case Define():
            return loaded(statement.value)
        case Update():
            return (statement.source,)
    return held((statement.args, statement.kwargs))


def loads_of(values: Iterable[Expr]) -> dict[Buffer, list[Load]]:
    """What is loaded of each buffer that values read, in order of first appearance."""
    found: dict[Buffer, list[Load]] = {}
    for e in postorder(values):
        if isinstance(e, Load):
            found.setdefault(e.buffer, []).append(e)
    return found


def identity_index(index: tuple[Poly, ...], axes: tuple[Axis, ...]) -> bool:
    """Whether `index` reads a buffer exactly at a consumer's own axes."""
    return len(index) == len(axes) and all(
        p.axis is a or (p is Poly.ZERO and a.extent.constant == 1) for p, a in zip(index, axes, strict=True)
    )


def reductions(values: Iterable[Expr]) -> list[Reduce]:
    """Reductions a set of values needs, producers first."""
    return list(dict.fromkeys(r for v in values for r in _reductions(v)))


def scans(values: Iterable[Expr]) -> list[Scan]:
    """Scans a set of values needs, producers first."""
    return list(dict.fromkeys(s for v in values for s in _scans(v)))


@lru_cache(maxsize=8192)
def _scans(value: Expr) -> tuple[Scan, ...]:
    parts = (e.source for e in postorder([value]) if isinstance(e, Part))
    return tuple(dict.fromkeys(s for s in parts if isinstance(s, Scan)))


def is_pointwise(value: Expr) -> bool:
    """Whether a value is made of one position: nothing is reduced or scanned for it."""
    return not _reductions(value) and not _scans(value)


@lru_cache(maxsize=8192)
def _reductions(value: Expr) -> tuple[Reduce, ...]:
    parts = (e.source for e in postorder([value]) if isinstance(e, Part))
    return tuple(dict.fromkeys(s for s in parts if isinstance(s, Reduce)))
