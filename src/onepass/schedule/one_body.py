"""Kernels that differ in buffers and numbers alone get one body, and each what it has in their place.

The statements of all are walked together. Where they name different buffers, the first one's stands in the body; where
their indices and limits have different numbers, a symbol does. With one kernel's buffers and numbers in their places
the body is that kernel's own again, so nothing has to be proved. 64 updates of 64 sizes are one body.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ..ir.kernel import GridAxis, Kernel, Local, Parts, Share, Statement
from ..ir.poly import Atom, Axis, Division, Poly, Symbol, product
from ..ir.program import Buffer
from ..ir.source import MULTIPLE

_FREE = ((), 0)  # the key of a poly's constant term
_Term = tuple[tuple[Atom, ...], Poly]  # what is alike in a term, and its coefficient


class Different(Exception):
    """Kernels that differ in more."""


def one_body(kernels: Sequence[Kernel], first: Poly) -> Share:
    """The programs of kernels, from `first` on, with one body; `Different` where they have none."""
    merger = _Merger({s for k in kernels for s in k.symbols})
    grid = merger.grid([k.grid for k in kernels])
    body: tuple[Statement, ...] = merger.merge([k.body for k in kernels])
    own: tuple[Local, ...] = merger.merge([k.locals for k in kernels])
    if any(k.descriptors for k in kernels):
        raise Different
    firsts = [first]
    for k in kernels:
        firsts.append(firsts[-1] + product(g.extent for g in k.grid))
    numbers = tuple((symbol, found) for found, symbol in merger.numbers.items())
    parts = Parts(len(kernels), firsts[-1], tuple(firsts[:-1]), tuple(merger.buffers.values()), numbers)
    return Share(first, grid, body, locals=own, parts=parts)


def alike(one: Kernel, other: Kernel) -> bool:
    """Whether two kernels have one body in which as much is known of the numbers: multiples stay multiples."""
    if one.like is not None and one.like is other.like:
        return True
    try:
        parts = one_body((one, other), Poly.ZERO).parts
    except Different:
        return False
    assert parts is not None
    return not one.warps or all(len({_even(p) for p in found}) == 1 for _, found in parts.numbers)


def _even(number: Poly) -> bool:
    return number.constant is not None and number.constant % MULTIPLE == 0


class _Merger:
    """Walks the same place in several kernels at once. `sizes`: symbols of the launch, which may differ."""

    def __init__(self, sizes: set[Symbol]) -> None:
        self.sizes = sizes
        self.buffers: dict[Buffer, tuple[Buffer, ...]] = {}
        self.numbers: dict[tuple[Poly, ...], Symbol] = {}

    def grid(self, found: Sequence[tuple[GridAxis, ...]]) -> tuple[GridAxis, ...]:
        """Positions of a program. How many there are of the first axis nobody asks."""
        if len({len(g) for g in found}) > 1:
            raise Different
        first = [self.axis([g[0].axis for g in found]) for _ in found[0][:1]]
        return (*(GridAxis(a, a.extent) for a in first), *self.merge([g[1:] for g in found]))

    def merge(self, found: Sequence[Any]) -> Any:
        """What stands in the body where the kernels have these."""
        first = found[0]
        if isinstance(first, Buffer):
            return self.buffer(tuple(found))
        if any(type(x) is not type(first) for x in found):
            raise Different
        if isinstance(first, Poly):
            return self.poly(found)
        if isinstance(first, Axis):
            return self.axis(found)
        if isinstance(first, tuple):
            if len({len(x) for x in found}) > 1:
                raise Different
            return tuple(self.merge(each) for each in zip(*found, strict=True))
        if is_dataclass(first) and not isinstance(first, type):
            names = [f.name for f in fields(first)]
            return type(first)(**{name: self.merge([getattr(x, name) for x in found]) for name in names})
        if any(x != first for x in found):
            raise Different
        return first

    def buffer(self, found: tuple[Buffer, ...]) -> Buffer:
        if len({(b.dtype, b.device) for b in found}) > 1 or self.buffers.setdefault(found[0], found) != found:
            raise Different
        return found[0]

    def axis(self, found: Sequence[Axis]) -> Axis:
        """An axis of the largest extent: what holds for all its positions holds for those of each."""
        if all(a is found[0] for a in found):
            return found[0]
        if len({a.name for a in found}) > 1:
            raise Different
        extents = [a.extent.constant for a in found]
        largest = max((n for n in extents if n is not None), default=0)
        return Axis(found[0].name, Poly.of(largest) if None not in extents else self.poly([a.extent for a in found]))

    # --- numbers ---

    def poly(self, found: Sequence[Poly]) -> Poly:
        """A poly with a symbol for every coefficient that differs. Neighbours in memory stay neighbours."""
        if all(p is found[0] for p in found) and not found[0].symbols() & self.sizes:
            return found[0]
        each = [self.terms(p) for p in found]
        total = Poly.ZERO
        for key in dict.fromkeys(key for terms in each for key in terms):
            having = [terms.get(key, ((), Poly.ZERO)) for terms in each]
            coefficients = tuple(c for _, c in having)
            if key != _FREE and len({c if c.constant in (0, 1) else None for c in coefficients}) > 1:
                raise Different
            factor = self.number(coefficients)
            for atoms in zip(*(a for a, _ in having), strict=True):
                factor = factor * self.atom(atoms)
            total = total + factor
        return total

    def terms(self, poly: Poly) -> dict[Hashable, _Term]:
        """The terms of a poly by what they are of, sizes being numbers."""
        own: dict[tuple[Atom, ...], Poly] = {}
        for monomial, c in poly.terms:
            rest = tuple(a for a in monomial if not (isinstance(a, Symbol) and a in self.sizes))
            sizes = tuple(a for a in monomial if isinstance(a, Symbol) and a in self.sizes)
            own[rest] = own.get(rest, Poly.ZERO) + Poly(((sizes, c),))
        result: dict[Hashable, _Term] = {}
        for atoms, coefficient in own.items():
            kinds, again = tuple(map(_kind, atoms)), 0
            while (kinds, again) in result:
                again += 1
            result[kinds, again] = atoms, coefficient
        return result

    def atom(self, found: Sequence[Atom]) -> Atom:
        first = found[0]
        if isinstance(first, Axis):
            return self.axis([a for a in found if isinstance(a, Axis)])
        if isinstance(first, Division):
            pairs = [a for a in found if isinstance(a, Division)]
            divisor = self.poly([a.denominator for a in pairs])
            return type(first)(self.poly([a.numerator for a in pairs]), divisor)
        if any(a is not first for a in found):
            raise Different
        return first

    def number(self, found: tuple[Poly, ...]) -> Poly:
        if all(p is found[0] for p in found) and found[0].constant is not None:
            return found[0]
        constants = [p.constant for p in found]
        if any(n is not None and n < 0 for n in constants):
            if any(n is None or n > 0 for n in constants):
                raise Different
            return -self.number(tuple(-p for p in found))
        least = min(0 if n is None else n for n in constants)
        name = f"own{len(self.numbers)}"
        return self.numbers.setdefault(
            found, Symbol(name, least, max((n for n in constants if n), default=None))
        ).poly()


def _kind(atom: Atom) -> Hashable:
    """What an atom is, its numbers left out."""
    match atom:
        case Division():
            return atom.sign, tuple(_kind(a) for a in atom.numerator.inner_atoms() if not isinstance(a, Division))
        case Axis() | Symbol():
            return atom.name
    return atom.key
