"""Integer index algebra: polynomials over axes, size symbols, quotients and remainders.

Sizes, strides, offsets and index maps are all `Poly`, kept in a canonical form, so that equal maps
are identical objects. Views only rewrite polys.

    i, j = Axis("i", Poly.of(8)), Axis("j", Poly.of(4))
    flat = i * 4 + j          # Poly
    flat // 4, flat % 4       # simplify to i and j, because 0 <= j < 4
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, TypeAlias

from .interning import Interned, digest

Monomial: TypeAlias = "tuple[Atom, ...]"
PolyLike: TypeAlias = "Poly | Atom | int"


PLACE = re.compile(r"\.\d{9}")  # of a reduction in its program, in the names of the axes it binds


class _Arithmetic(metaclass=Interned):
    """+, -, *, // and % between atoms, polys and integers; the result is a `Poly`."""

    __slots__ = ()

    def poly(self) -> Poly:
        """This as a polynomial."""
        raise NotImplementedError

    def __add__(self, other: PolyLike) -> Poly:
        left, right = self.poly(), Poly.of(other)
        if not right.terms:
            return left
        return _add(left, right) if left.terms else right

    __radd__ = __add__

    def __neg__(self) -> Poly:
        return self * -1

    def __sub__(self, other: PolyLike) -> Poly:
        return self + Poly.of(other) * -1

    def __rsub__(self, other: PolyLike) -> Poly:
        return Poly.of(other) - self

    def __mul__(self, other: PolyLike) -> Poly:
        return _multiply(self.poly(), Poly.of(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: PolyLike) -> Poly:
        return _divide(self.poly(), Poly.of(other))[0]

    def __mod__(self, other: PolyLike) -> Poly:
        return _divide(self.poly(), Poly.of(other))[1]


class Atom(_Arithmetic):
    """A factor of a monomial. `key` orders atoms and prints them; `form` is a number that no place is in."""

    __slots__ = ("__weakref__", "form", "key")
    key: str
    form: int

    def __repr__(self) -> str:
        return self.key

    def poly(self) -> Poly:
        return Poly((((self,), 1),))

    @property
    def axes(self) -> frozenset[Axis]:
        """Every axis this atom depends on, at any depth."""
        return frozenset()


class Axis(Atom):
    """A named iteration variable: 0 <= axis < extent. Identity is name and extent."""

    __slots__ = ("extent", "name")

    def __init__(self, name: str, extent: Poly) -> None:
        self.name, self.extent = name, extent
        self.key, self.form = name, hash((1, digest(PLACE.sub("", name)), extent.form))

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset((self,))


class Symbol(Atom):
    """A size known at run time; `lower` is a guaranteed lower bound.

    `hint` is the size's value when the graph was traced: profit may ask for it, legality never does.
    """

    __slots__ = ("hint", "lower", "name")

    def __init__(self, name: str, lower: int = 0, hint: int | None = None) -> None:
        self.name, self.lower, self.hint = name, lower, hint
        self.key, self.form = name, digest(name)


class Division(Atom):
    """One of the two results of a division that did not simplify; denominator > 0."""

    __slots__ = ("denominator", "numerator")
    sign: ClassVar[str]
    number: ClassVar[int]

    def __init__(self, numerator: Poly, denominator: Poly) -> None:
        self.numerator, self.denominator = numerator, denominator
        self.key = f"({numerator} {self.sign} {denominator})"
        self.form = hash((self.number, numerator.form, denominator.form))

    @property
    def axes(self) -> frozenset[Axis]:
        return self.numerator.axes | self.denominator.axes


class Quotient(Division):
    """floor(numerator / denominator)."""

    __slots__ = ()
    sign, number = "//", 2


class Remainder(Division):
    """numerator mod denominator (Python's sign rule)."""

    __slots__ = ()
    sign, number = "%", 3


class Poly(_Arithmetic):
    """A canonical polynomial: sorted ((monomial, coefficient), ...), no zero coefficients; `form` as of atoms."""

    __slots__ = ("__weakref__", "_axes", "_is_plain", "_text", "form", "terms")
    form: int
    ZERO: ClassVar[Poly]
    ONE: ClassVar[Poly]

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self.form = hash(tuple((c, *(a.form for a in m)) for m, c in terms))
        self._text: str | None = None
        self._axes: frozenset[Axis] | None = None
        self._is_plain: bool | None = None

    def poly(self) -> Poly:
        return self

    @staticmethod
    def of(value: PolyLike) -> Poly:
        return value.poly() if isinstance(value, Poly | Atom) else _constant(int(value))

    def __repr__(self) -> str:
        if self._text is None:
            text = sum_text(self, lambda atom: atom.key)
            self._text = f"({text})" if len(self.terms) > 1 else text
        return self._text

    @property
    def constant(self) -> int | None:
        """The value, if this is a number."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    @property
    def single(self) -> Atom | None:
        """The atom, if this is exactly one atom."""
        one = len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1
        return self.terms[0][0][0] if one else None

    @property
    def axis(self) -> Axis | None:
        """The axis, if this is exactly one axis."""
        atom = self.single
        return atom if isinstance(atom, Axis) else None

    @property
    def offset(self) -> int:
        """The constant term."""
        return next((c for m, c in self.terms if not m), 0)

    def atoms(self) -> set[Atom]:
        """Atoms of this poly itself, not those inside quotients."""
        return {a for m, _ in self.terms for a in m}

    def inner_atoms(self) -> Iterator[Atom]:
        """Atoms at any depth, those inside quotients and remainders included, in printing order."""
        for monomial, _ in self.terms:
            for atom in monomial:
                yield atom
                if isinstance(atom, Division):
                    yield from atom.numerator.inner_atoms()
                    yield from atom.denominator.inner_atoms()

    @property
    def axes(self) -> frozenset[Axis]:
        """Every axis this poly depends on, at any depth."""
        if self._axes is None:
            self._axes = frozenset().union(*(atom.axes for atom in self.atoms()))
        return self._axes

    @property
    def is_plain(self) -> bool:
        """Whether no value is an index, at any depth."""
        if self._is_plain is None:
            self._is_plain = not self.indirects()
        return self._is_plain

    def symbols(self) -> set[Symbol]:
        """Every size symbol at any depth, axes' extents excluded."""
        return {atom for atom in self.inner_atoms() if isinstance(atom, Symbol)}

    def names(self) -> set[str]:
        """Every name this poly mentions, at any depth: of axes and of sizes."""
        return {atom.name for atom in self.inner_atoms() if isinstance(atom, Axis | Symbol)}

    def indirects(self) -> list[Atom]:
        """Data-dependent atoms (`ir/expr.py: Indirect`) at any depth, in printing order."""
        return list(dict.fromkeys(a for a in self.inner_atoms() if not isinstance(a, Axis | Symbol | Division)))

    def coefficient(self, axis: Axis) -> Poly | None:
        """c with self = c*axis + rest, rest free of the axis; None if not affine in it."""
        return _coefficient(self, axis) if axis in self.axes else Poly.ZERO

    def substitute(self, mapping: Mapping[Any, Poly]) -> Poly:
        """Replace atoms (axes, symbols, indirects) by polys, simplifying again."""
        return transform(self, lambda a: mapping.get(a))

    def evaluate(self, values: Mapping[Atom, Any]) -> int:
        """The number, given one for each axis and symbol; given tensors, a tensor."""
        total = 0
        for monomial, c in self.terms:
            for atom in monomial:
                if isinstance(atom, Division):
                    above, below = atom.numerator.evaluate(values), atom.denominator.evaluate(values)
                    c = c * (above // below if isinstance(atom, Quotient) else above % below)
                else:
                    c = c * values[atom]
            total = total + c
        return total


@lru_cache(maxsize=65536)
def _coefficient(poly: Poly, axis: Axis) -> Poly | None:
    terms: dict[Monomial, int] = {}
    for monomial, c in poly.terms:
        if axis in monomial:
            rest = list(monomial)
            rest.remove(axis)
            if any(axis in a.axes for a in rest):
                return None
            terms[tuple(rest)] = terms.get(tuple(rest), 0) + c
        elif any(axis in a.axes for a in monomial):
            return None
    return _from_terms(terms)


def transform(poly: Poly, replace: Callable[[Atom], Poly | None]) -> Poly:
    """Rebuild a poly with atoms replaced; quotients and remainders are rebuilt around their parts."""
    total = Poly.ZERO
    changed = False
    for monomial, coefficient in poly.terms:
        factor = Poly.of(coefficient)
        for atom in monomial:
            new = replace(atom)
            if new is None and isinstance(atom, Division):
                numerator = transform(atom.numerator, replace)
                denominator = transform(atom.denominator, replace)
                if numerator is not atom.numerator or denominator is not atom.denominator:
                    pair = _divide(numerator, denominator)
                    new = pair[0] if isinstance(atom, Quotient) else pair[1]
            changed |= new is not None
            factor = factor * (atom if new is None else new)
        total = total + factor
    return total if changed else poly


@lru_cache(maxsize=4096)
def _constant(value: int) -> Poly:
    return Poly((((), value),)) if value else Poly(())


Poly.ZERO = _constant(0)
Poly.ONE = _constant(1)


def _order(item: tuple[Monomial, int]) -> tuple[int, list[str]]:
    return (-len(item[0]), [a.key for a in item[0]])


def _from_terms(terms: Mapping[Monomial, int]) -> Poly:
    items = [(m, c) for m, c in terms.items() if c]
    if len(items) > 1:
        items.sort(key=_order)
    return Poly(tuple(items))


@lru_cache(maxsize=65536)
def _add(a: Poly, b: Poly) -> Poly:
    terms = dict(a.terms)
    for m, c in b.terms:
        terms[m] = terms.get(m, 0) + c
    return _recombine(_from_terms(terms))


@lru_cache(maxsize=65536)
def _multiply(a: Poly, b: Poly) -> Poly:
    terms: dict[Monomial, int] = {}
    for m, c in a.terms:
        for n, d in b.terms:
            product = tuple(sorted(m + n, key=lambda x: x.key)) if m and n else m + n
            terms[product] = terms.get(product, 0) + c * d
    return _recombine(_from_terms(terms))


def _recombine(poly: Poly) -> Poly:
    """d*(x // d) + x % d -> x, for whatever multiplies both."""
    for monomial, c in poly.terms:
        for atom in monomial:
            if not isinstance(atom, Remainder):
                continue
            rest = list(monomial)
            rest.remove(atom)
            scale = Poly(((tuple(rest), c),))
            other = (atom.numerator // atom.denominator) * scale * atom.denominator
            have = dict(poly.terms)
            if all(have.get(m) == k for m, k in other.terms):
                for m, _ in other.terms:
                    del have[m]
                del have[monomial]
                return _from_terms(have) + atom.numerator * scale
    return poly


@lru_cache(maxsize=65536)
def _divide(a: Poly, d: Poly) -> tuple[Poly, Poly]:
    """(a // d, a % d), simplified with what the axes' ranges prove."""
    if d is Poly.ONE:
        return a, Poly.ZERO
    if a is d:
        return Poly.ONE, Poly.ZERO
    ca, cd = a.constant, d.constant
    if ca is not None and cd:
        return Poly.of(ca // cd), Poly.of(ca % cd)
    whole: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    lead = d.terms[0] if len(d.terms) == 1 else None
    for monomial, c in a.terms:
        if lead is not None and c % lead[1] == 0 and (others := _without(monomial, lead[0])) is not None:
            whole[others] = c // lead[1]
        else:
            rest[monomial] = c
    quotient, remainder = _from_terms(whole), _from_terms(rest)
    if cd and (number := remainder.constant) is not None:
        return quotient + number // cd, Poly.of(number % cd)
    if not remainder.terms:
        return quotient, Poly.ZERO
    if in_range(remainder, d):
        return quotient, remainder
    if in_range(remainder + d, d):
        return quotient - 1, remainder + d
    if (both := _divide_polynomial(remainder, d)) is not None:
        return quotient + both[0], both[1]
    if (split := _split_scaled(remainder, d)) is not None:
        return quotient + split[0], split[1]
    match remainder.terms:
        case (((Quotient() as inner,), 1),):  # (x // a) // b == x // (a*b)
            outer = inner.numerator // (inner.denominator * d)
            return quotient + outer, Remainder(remainder, d).poly()
        case (((Remainder() as inner,), 1),):
            whole_times, left = _divide(inner.denominator, d)
            if not left.terms:  # (x % (b*d)) // d == (x // d) % b; and % d == x % d
                return quotient + (inner.numerator // d) % whole_times, inner.numerator % d
    return quotient + Quotient(remainder, d), Remainder(remainder, d).poly()


def _divide_polynomial(a: Poly, d: Poly) -> tuple[Poly, Poly] | None:
    """Exact symbolic case a = q*d + r with d of several terms: try q from leading terms."""
    if len(d.terms) < 2:
        return None
    lead_monomial, lead_c = d.terms[0]
    q, rest = Poly.ZERO, a
    for _ in range(8):
        if in_range(rest, d):
            return q, rest
        step = next(
            (
                Poly(((others, c // lead_c),))
                for m, c in rest.terms
                if c % lead_c == 0 and (others := _without(m, lead_monomial)) is not None
            ),
            None,
        )
        if step is None:
            return None
        q, rest = q + step, rest - step * d
    return None


def _split_scaled(a: Poly, d: Poly) -> tuple[Poly, Poly] | None:
    """(g*x + y) // (g*e) with 0 <= y < g is x // e; the remainder is g*(x % e) + y."""
    cd = d.constant
    if cd is None:
        return None
    for g in sorted({abs(c) for m, c in a.terms if m and 1 < abs(c) < cd and cd % c == 0}, reverse=True):
        high = _from_terms({m: c // g for m, c in a.terms if c % g == 0})
        low = _from_terms({m: c for m, c in a.terms if c % g})
        if low is not a and high.terms and in_range(low, Poly.of(g)):
            q, r = _divide(high, Poly.of(cd // g))
            return q, r * g + low
    return None


def _without(monomial: Monomial, factor: Monomial) -> Monomial | None:
    """The monomial divided by another; None where that is no factor of it."""
    have = list(monomial)
    for atom in factor:
        if atom not in have:
            return None
        have.remove(atom)
    return tuple(have)


def upper_bound(poly: Poly) -> Poly | None:
    """A poly in size symbols alone that is >= every value of `poly`; None if unknown."""
    return _bound(poly, upper=True)


def lower_bound(poly: Poly) -> Poly | None:
    """A poly in size symbols alone that is <= every value of `poly`; None if unknown."""
    return _bound(poly, upper=False)


@lru_cache(maxsize=65536)
def _bound(poly: Poly, upper: bool) -> Poly | None:
    total = Poly.ZERO
    for monomial, c in poly.terms:
        product = Poly.of(c)
        for atom in monomial:
            extreme = _atom_bound(atom, upper == (c > 0))
            if extreme is None:
                return None
            product = product * extreme
        total = total + product
    return total


def _atom_bound(atom: Atom, upper: bool) -> Poly | None:
    # Bounds multiply termwise because every atom is known to be >= 0 here.
    match atom:
        case Symbol():
            return atom.poly()
        case Axis():
            return atom.extent - 1 if upper else Poly.ZERO
        case Remainder():
            if not upper:
                return Poly.ZERO
            low, high = lower_bound(atom.numerator), upper_bound(atom.numerator)
            if low is not None and high is not None and nonnegative(low) and nonnegative(atom.denominator - 1 - high):
                return high
            return atom.denominator - 1
        case Quotient():
            low = lower_bound(atom.numerator)
            if low is None or not nonnegative(low):
                return None
            if not upper:
                return low // atom.denominator if atom.denominator.constant else Poly.ZERO
            high = upper_bound(atom.numerator)
            return None if high is None else high // atom.denominator
    return None


@lru_cache(maxsize=65536)
def nonnegative(poly: Poly) -> bool:
    """Provably >= 0 for every legal value of axes and symbols."""
    if poly.axes:
        low = lower_bound(poly)
        return low is not None and nonnegative(low)
    constant = poly.constant
    if constant is not None:
        return constant >= 0
    shifted = poly.substitute({s: s + s.lower for s in poly.symbols() if s.lower})
    return all(c >= 0 and all(isinstance(a, Symbol) or _nonnegative_atom(a) for a in m) for m, c in shifted.terms)


def _nonnegative_atom(atom: Atom) -> bool:
    match atom:
        case Remainder():
            return True
        case Quotient():
            return nonnegative(atom.numerator)
    return isinstance(atom, Symbol | Axis)


def in_range(index: Poly, extent: Poly) -> bool:
    """Provably 0 <= index < extent."""
    low, high = lower_bound(index), upper_bound(index)
    return low is not None and high is not None and nonnegative(low) and nonnegative(extent - 1 - high)


def is_far(poly: Poly) -> bool:
    """Whether values of a poly may need more than 32 bits. What is inside a remainder is not looked at."""
    most = _magnitude(poly)
    return most is None or most >= 1 << 31


@lru_cache(maxsize=65536)
def _magnitude(poly: Poly) -> int | None:
    """No value of a poly is larger, its sign aside; None where that depends on sizes or data."""
    total = 0
    for monomial, c in poly.terms:
        sizes = [_atom_magnitude(a) for a in monomial]
        if None in sizes:
            return None
        total += abs(c) * prod(size for size in sizes if size is not None)
    return total


def _atom_magnitude(atom: Atom) -> int | None:
    match atom:
        case Axis():
            return None if atom.extent.constant is None else max(0, atom.extent.constant - 1)
        case Remainder():
            return None if atom.denominator.constant is None else abs(atom.denominator.constant) - 1
        case Quotient():
            return _magnitude(atom.numerator)
    return None


def product(values: Iterable[PolyLike]) -> Poly:
    """The product of polys; 1 for none."""
    total = Poly.ONE
    for value in values:
        total = total * value
    return total


def sum_text(
    poly: Poly, atom: Callable[[Atom], str], number: Callable[[int], str] = str, space: str = " ", times: str = "*"
) -> str:
    """The terms of a poly, with `space` around their signs and `times` between factors."""
    parts: list[str] = []
    for monomial, c in poly.terms:
        factors = [atom(a) for a in monomial]
        if abs(c) != 1 or not factors:
            factors.append(number(abs(c)))
        sign = ("-" if c < 0 else "") if not parts else f"{space}{'-' if c < 0 else '+'}{space}"
        parts.append(sign + times.join(factors))
    return "".join(parts) or "0"
