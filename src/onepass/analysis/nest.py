"""The nest of a group: its stores over class axes. Words, and what every later stage asks of it.

A class is one loop axis shared by all stores and reductions aligned with it; outer classes are those every
store and every reduction has; an inner class is swept inside a program. `unify` makes nests, `legality` decides
what programs own, `collapse` merges neighbouring classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ..ir.expr import Expr, Index, Load, Part, Random, Reduce, Scan, postorder, rebind
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer
from .access import flat_offset
from .inline import reductions, scans

COLUMN_ELEMENTS = 8192  # of a tile whose rows lie side by side in memory
LINE_LANES = 32  # the least of a contiguous axis: narrower tiles share cache lines


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group cannot be one kernel."""

    reason: str


@dataclass(frozen=True, slots=True)
class NestStore:
    """A store in class axes. `region` bounds the classes it does not cover whole: axis -> [low, high)."""

    buffer: Buffer
    index: tuple[Poly, ...]
    value: Expr
    domain: frozenset[Axis]
    region: tuple[tuple[Axis, Poly, Poly], ...] = ()


@dataclass(frozen=True, slots=True)
class Nest:
    """A group ready to be scheduled. `classes` are ordered outermost first (by the largest store)."""

    stores: tuple[NestStore, ...]
    classes: tuple[Axis, ...]
    bound: dict[Axis, Axis] = field(default_factory=dict)  # reduction axis -> its class
    outer: tuple[Axis, ...] = ()
    split: Axis | None = None  # a reduced class that programs share out, partials finished by a second kernel

    @property
    def values(self) -> list[Expr]:
        """The values of all stores."""
        return [s.value for s in self.stores]

    @property
    def reductions(self) -> list[Reduce]:
        """The reductions that the stores need, producers first."""
        return reductions(self.values)

    @property
    def scans(self) -> list[Scan]:
        """The scans that the stores need, producers first; each runs over a class, in order."""
        return scans(self.values)

    def with_values(self, change: Callable[[Expr], Expr]) -> Nest:
        """The nest with another value for every store."""
        return replace(self, stores=tuple(replace(s, value=change(s.value)) for s in self.stores))

    def domain_of(self, reduce: Reduce) -> frozenset[Axis]:
        """The classes a reduction iterates: free and bound."""
        return reduce.axes | {self.bound[a] for a in reduce.over}

    def free(self, reduce: Reduce) -> frozenset[Axis]:
        """The classes a reduction has a result for each position of."""
        return frozenset(self.bound.get(a, a) for a in reduce.axes)

    def sweeps(self, reduce: Reduce, axis: Axis) -> bool:
        """Whether a reduction runs over a class."""
        return any(self.bound[a] is axis for a in reduce.over)

    def carried(self, reduce: Reduce) -> tuple[Axis, ...]:
        """The classes inside a program that a reduction over the split class has a state for each position of."""
        return tuple(c for c in self.classes if c in reduce.axes and c not in self.outer)


def direct_reductions(values: Iterable[Expr]) -> list[Reduce]:
    """Reductions read by the values themselves, not those inside other reductions."""
    found: dict[Reduce, None] = {}
    for e in postorder(list(values), into_reductions=False):
        if isinstance(e, Part) and isinstance(e.source, Reduce):
            found[e.source] = None
    return list(found)


def opened(nest: Nest) -> list[Expr]:
    """The stores' values with reduction axes renamed to their classes: what sweeps share becomes equal.

    For counting only: a class may be bound by one reduction and free around it.
    """
    mapping = {a: c.poly() for a, c in nest.bound.items()}
    over = {a: (c,) for a, c in nest.bound.items()}
    memo: dict[Expr, Expr] = {}
    return [rebind(value, mapping, over, memo) for value in nest.values]


def accesses(nest: Nest) -> Iterable[tuple[Buffer, Poly]]:
    """Every buffer that a store or a load touches, and at which offset."""
    for s in nest.stores:
        yield s.buffer, flat_offset(s.buffer, s.index)
    for e in postorder(nest.values):
        if isinstance(e, Load):
            yield e.buffer, flat_offset(e.buffer, e.index)


def offsets(nest: Nest) -> Iterable[Poly]:
    """The offset of every store and load, and every position used as a number."""
    yield from (offset for _, offset in accesses(nest))
    for e in postorder(nest.values):
        match e:
            case Index(poly=position) | Random(index=position):
                yield position


def aligned_along(nest: Nest, vector: Axis, vector_bytes: int) -> bool:
    """Whether all rows that are contiguous along a class start where whole vectors do; else elements load alone."""
    for buffer, offset in accesses(nest):
        own = {a for a in offset.axes if nest.bound.get(a, a) is vector and offset.coefficient(a) is Poly.ONE}
        if own and any(c * buffer.dtype.bytes % vector_bytes for m, c in offset.terms if not own & set(m)):
            return False
    return True


def swept_again(nest: Nest, vector: Axis) -> int:
    """Bytes of a row that is read before and after a reduction over it; what all rows share is there anyway."""
    bound = frozenset((vector, *(a for a, c in nest.bound.items() if c is vector)))
    outer = frozenset(nest.outer)

    def rows(values: Iterable[Expr]) -> set[Buffer]:
        loads = (e for e in values if isinstance(e, Load))
        return {e.buffer for e in loads if e.axes & bound and (e.axes & outer or not outer)}

    total = 0
    for store in nest.stores:
        if vector not in store.domain:
            continue
        inside = reductions([store.value])
        before = rows(postorder([v for r in inside for v in r.inputs]))
        after = rows(postorder([store.value], into_reductions=False))
        total = max(total, sum(b.dtype.bytes for b in before & after))
    return total * (vector.extent.constant or 0)
