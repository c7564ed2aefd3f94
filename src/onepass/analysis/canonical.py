"""What a value computes, as text that is equal for every spelling of it in real numbers.

    x * rsqrt(mean(x * x) + eps) * w   and   w * (x / sqrt(sum(x ** 2) / n + eps))   have one text

A product is a number and factors with exponents; a sum is products with numbers; both are sorted. Conversions between
float types are dropped, numbers leave sums of a reduction, neighbouring axes that are walked as one are one axis. A
product of sums is not multiplied out. None: the value holds what has no such text (random numbers, indices from data).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TypeAlias

from ..ir.expr import Const, Expr, Index, Load, Part, Pointwise, Reduce, postorder, rebind
from ..ir.ops import CASTS
from ..ir.plan import Store
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer
from .access import estimate, flat_offset
from .collapse import collapse
from .inline import reductions
from .legality import bare

Factors: TypeAlias = dict[str, Fraction]
Product: TypeAlias = tuple[float, Factors]  # a number, and factors with exponents
_ROOTS = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2)}
_TURNED = {"gt": "lt", "ge": "le"}


class _NoText(Exception):
    """The value has no text."""


def canonical(store: Store, names: Mapping[Buffer, str]) -> str | None:
    """The text of a store; `names` are those of the buffers it reads."""
    nest = collapse(bare((store,)))
    (own,) = nest.stores
    place = flat_offset(own.buffer, own.index)
    steps = {c: place.coefficient(c) for c in nest.classes if c in own.domain}
    if any(s is None or s.axes for s in steps.values()):
        return None
    free = sorted(steps, key=lambda c: -estimate(steps[c] or Poly.ZERO))
    renamed = {c: Axis(f"f{k}", c.extent) for k, c in enumerate(free)}
    height: dict[Reduce, int] = {}
    for r in reductions([own.value]):
        # Around the mean of a variance there is a sum of squares.
        height[r] = (2 if r.monoid == "welford" else 1) + max((height[x] for x in reductions(r.inputs)), default=0)
        renamed |= {a: Axis(f"r{height[r]}.{k}", a.extent) for k, a in enumerate(r.over)}
    mapping = {a: new.poly() for a, new in renamed.items()}
    value = rebind(own.value, mapping, {a: (new,) for a, new in renamed.items()})
    try:
        text = _text(_Products(names).of(value))
    except (_NoText, ArithmeticError, ValueError):
        return None
    shape = ", ".join(f"{renamed[c].name}:{c.extent} by {steps[c]}" for c in free)
    return f"{place.substitute(mapping)} of [{shape}] = {text}"


class _Products:
    """Values as products, each found once."""

    def __init__(self, names: Mapping[Buffer, str]) -> None:
        self.names = names
        self.known: dict[Expr, Product] = {}
        self.terms: dict[str, list[Product]] = {}  # of each sum

    def of(self, value: Expr) -> Product:
        for e in postorder([value]):
            if e not in self.known and not isinstance(e, Reduce):
                self.known[e] = self._product(e)
        return self.known[value]

    def _product(self, e: Expr) -> Product:
        match e:
            case Const():
                return _number(e)
            case Index() if not e.poly.indirects():
                return _size(e.poly)
            case Load() if e.buffer in self.names and not any(p.indirects() for p in e.index):
                return 1.0, {f"{self.names[e.buffer]}[{flat_offset(e.buffer, e.index)}]": Fraction(1)}
            case Part():
                return self._reduced(e.source, e.index)
            case Pointwise():
                return self._pointwise(e, [self.known[a] for a in e.args])
        raise _NoText

    def _pointwise(self, e: Pointwise, args: list[Product]) -> Product:
        if e.op in CASTS and e.dtype.is_float and (e.args[0].dtype.is_float or isinstance(e.args[0], Index)):
            return args[0]
        if e.op in ("add", "sub"):
            return self._sum([args[0], args[1] if e.op == "add" else _scaled(args[1], -1.0)])
        if e.op == "neg":
            return _scaled(args[0], -1.0)
        if e.op == "mul":
            return _times(args[0], args[1])
        if e.dtype.is_float:
            if e.op == "div":
                return _times(args[0], _power(args[1], Fraction(-1)))
            if e.op in _ROOTS:
                return _power(args[0], _ROOTS[e.op])
            if e.op == "pow" and not args[1][1]:
                power = Fraction(args[1][0])
                near = power.limit_denominator(64)
                return _power(args[0], near if abs(near - power) < Fraction(1, 10**7) else power)
        texts = [_text(a) for a in args]
        if e.op in _TURNED:
            return _atom(f"{_TURNED[e.op]}<bool>({texts[1]}, {texts[0]})")
        if e.op in ("maximum", "minimum", "eq", "ne", "bitand", "bitor", "bitxor"):
            texts.sort()
        return _atom(f"{e.op}<{'float' if e.dtype.is_float else e.dtype.value}>({', '.join(texts)})")

    def _reduced(self, r: Expr, part: int) -> Product:
        assert isinstance(r, Reduce)
        over = ", ".join(f"{a.name}:{a.extent}" for a in r.over)
        if r.monoid == "welford" and part < 2:  # the mean, or the sum of squares around it
            number, factors = self._summed(self.of(r.inputs[0]), r, over, 1.0)
            for a in r.over:
                number, factors = _times((number, factors), _power(_size(a.extent), Fraction(-1)))
            mean = number, {_inner(text, r): n for text, n in factors.items()}
            if part == 0:
                return mean
            around = self._sum([self.of(r.inputs[0]), _scaled(mean, -1.0)])
            return self._summed(_power(around, Fraction(2)), r, over, 1.0)
        if r.monoid == "sum":
            return self._summed(self.of(r.inputs[0]), r, over, 1.0)
        if r.monoid in ("argmax", "argmin") and part == 0:
            return _atom(f"{r.monoid[3:]}.0[{over}]({_text(self.of(r.inputs[0]))})")
        return _atom(f"{r.monoid}.{part}[{over}]({', '.join(_text(self.of(i)) for i in r.inputs)})")

    def _sum(self, values: list[Product]) -> Product:
        """Sums inside are a part of this one; the number of the first term is 1."""
        found: dict[str, Product] = {}
        for number, factors in (t for v in values for t in self._terms_of(v)):
            text = _text((1.0, factors))
            found[text] = found.get(text, (0.0, factors))[0] + number, factors
        kept = {t: p for t, p in sorted(found.items()) if p[0]}
        if len(kept) < 2:
            return next(iter(kept.values()), (0.0, {}))
        first = next(iter(kept.values()))[0]
        terms = [_scaled(p, 1 / first) for p in kept.values()]
        text = f"({' + '.join(map(_text, terms))})"
        self.terms[text] = terms
        return first, {text: Fraction(1)}

    def _terms_of(self, value: Product) -> list[Product]:
        number, factors = value
        name, power = next(iter(factors.items()), ("", Fraction(0)))
        if len(factors) != 1 or power != 1 or name not in self.terms:
            return [value]
        return [_scaled(t, number) for t in self.terms[name]]

    def _summed(self, value: Product, r: Reduce, over: str, scale: float) -> Product:
        """A sum of products; what does not vary over its axes is multiplied once."""
        number, factors = value
        own = {f: n for f, n in factors.items() if any(a.name in f for a in r.over)}
        outside = {f: n for f, n in factors.items() if f not in own}
        return _times((number * scale, outside), _atom(f"sum[{over}]({_text((1.0, own))})"))


def _size(poly: Poly) -> Product:
    """A position or a size: a number where it is known."""
    return (float(poly.constant), {}) if poly.constant is not None else _atom(f"index({poly})")


def _number(e: Const) -> Product:
    value = float(e.value)
    return (value, {}) if value == value and abs(value) != float("inf") else _atom(repr(value))


def _inner(text: str, r: Reduce) -> str:
    """The text of a sum with the axes of one that is inside of it."""
    for a in r.over:
        height, place = a.name.removeprefix("r").split(".")
        text = text.replace(a.name, f"r{int(height) - 1}.{place}")
    return text


def _atom(text: str) -> Product:
    return 1.0, {text: Fraction(1)}


def _scaled(a: Product, by: float) -> Product:
    return a[0] * by, a[1]


def _times(a: Product, b: Product) -> Product:
    factors = dict(a[1])
    for f, n in b[1].items():
        factors[f] = factors.get(f, Fraction(0)) + n
    return a[0] * b[0], {f: n for f, n in factors.items() if n}


def _power(a: Product, n: Fraction) -> Product:
    """A root is taken of a number and one factor; of anything else as a whole, for the root of a square is no power."""
    number, factors = a
    if n.denominator != 1 and (number < 0 or len(factors) != 1 or set(factors.values()) != {Fraction(1)}):
        return 1.0, {f"({_text(a)})": n}
    if number == 0 and n < 0:
        raise _NoText
    return number ** float(n), {f: m * n for f, m in factors.items() if m * n}


def _text(product: Product) -> str:
    number, factors = product
    powers = [f if n == 1 else f"{f}^{n}" for f, n in sorted(factors.items())]
    text = f"{int(number)}" if number.is_integer() and abs(number) < 2**53 else f"{number:.6g}"
    return "*".join([text, *powers])
