"""Inlining: the value of a buffer with every virtual producer substituted into it.

In: defines of one group. Out: for a stored buffer, one expression whose loads are all real memory.
Invariant: reduction axes are renamed per define, so no substitution can capture a bound axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..ir.expr import Expr, Load, Part, Pointwise, Reduce, postorder, rewrite, substitute_axes
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, Define


def rename_bound(define: Define) -> Expr:
    """The define's value with reduction axes named after its buffer."""
    bound = {a for e in postorder([define.value]) if isinstance(e, Reduce) for a in e.over}
    if not bound:
        return define.value
    names = {a: Axis(f"{define.buffer.name}.{a.name}", a.extent) for a in bound}

    def rename(e: Expr) -> Expr | None:
        if isinstance(e, Reduce):
            return Reduce(e.monoid, e.inputs, tuple(names.get(a, a) for a in e.over))
        return None

    return rewrite(define.value, rename, {a: n.poly() for a, n in names.items()})


class Inliner:
    """Inlined values of the defines in one kernel.

    `stored` buffers are written by this kernel: their readers inside it see the rounded value.
    """

    def __init__(self, defines: Mapping[Buffer, Define], stored: Iterable[Buffer] = ()) -> None:
        self.defines = defines
        self.stored = frozenset(stored)
        self._values: dict[Buffer, Expr] = {}
        self._reduces: dict[Reduce, Reduce] = {}

    def value(self, buffer: Buffer) -> Expr:
        """The value of a buffer over its define's own axes."""
        if buffer not in self._values:
            for needed in self._pending(buffer):
                self._values[needed] = self._expand(self.defines[needed])
        return self._values[buffer]

    def _pending(self, buffer: Buffer) -> list[Buffer]:
        """Producers not yet expanded, in dependency order; iterative, since chains may be long."""
        order: dict[Buffer, None] = {}
        stack: list[tuple[Buffer, bool]] = [(buffer, False)]
        while stack:
            current, ready = stack.pop()
            if ready:
                order[current] = None
            elif current not in order and current not in self._values:
                stack.append((current, True))
                stack.extend((b, False) for b in loaded(self.defines[current].value) if b in self.defines)
        return list(order)

    def _expand(self, define: Define) -> Expr:
        def inline(e: Expr) -> Expr | None:
            if isinstance(e, Reduce):
                return self._shared(e)
            if not isinstance(e, Load) or e.buffer not in self.defines:
                return None
            producer = self.defines[e.buffer]
            value = substitute_axes(self._values[e.buffer], dict(zip(producer.dimensions, e.index, strict=True)))
            return exact(value) if e.buffer in self.stored else value

        return rewrite(rename_bound(define), inline)

    def _shared(self, reduce: Reduce) -> Reduce:
        """The first reduction met that computes the same: it differs in nothing but its axes' names."""
        names = {a: Axis(f"r{k}", a.extent) for k, a in enumerate(reduce.over)}
        mapping = {a: n.poly() for a, n in names.items()}
        inputs = tuple(rewrite(i, lambda e: None, mapping) for i in reduce.inputs)
        return self._reduces.setdefault(Reduce(reduce.monoid, inputs, tuple(names.values())), reduce)


def exact(value: Expr) -> Expr:
    """A value whose final 16-bit rounding may not be undone: readers see what is stored."""
    if isinstance(value, Pointwise) and value.op == "narrow":
        return Pointwise("cast", value.args, value.dtype)
    return value


def loaded(value: Expr) -> tuple[Buffer, ...]:
    """Buffers an expression reads, in order of first appearance."""
    return tuple(dict.fromkeys(e.buffer for e in postorder([value]) if isinstance(e, Load)))


def identity_index(index: tuple[Poly, ...], axes: tuple[Axis, ...]) -> bool:
    """Whether `index` reads a buffer exactly at a consumer's own axes."""
    return len(index) == len(axes) and all(
        p.axis is a or (p is Poly.ZERO and a.extent.constant == 1) for p, a in zip(index, axes, strict=True)
    )


def reductions(values: Iterable[Expr]) -> list[Reduce]:
    """Reductions a set of values needs, producers first."""
    found: dict[Reduce, None] = {}
    for e in postorder(list(values)):
        if isinstance(e, Part) and isinstance(e.source, Reduce):
            found[e.source] = None
    return list(found)
