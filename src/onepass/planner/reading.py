"""Who reads what in a program, and which values are cheap enough to be computed where they are read.

Products are those of its matrix products that a kernel could compute; all other definitions are point-wise or reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ..analysis.access import load_bytes, numel, storage_bytes, work_of
from ..analysis.contraction import MOST_HELD
from ..analysis.inline import is_pointwise, loaded, loads_of, reductions
from ..analysis.reach import in_order, reached
from ..ir.expr import Expr, Load, Pointwise, postorder
from ..ir.ops import CASTS
from ..ir.program import Buffer, Define, Extern, Program, Update, buffers_in
from .links import Links

MOST_MEMBERS = 48
UNPACKED_ROWS = 32  # up to here weights are unpacked by the product's own kernel (16 rows gained, 128 lost)
# Per element, of what is computed again beside a product: from memory; from positions, or one row for many.
CHEAP_COST, PLACE_COST = 4.0, 24.0
# A value may be stored where so many positions at least would each compute an element of it, at this cost.
SHARED, HEAVY = 4, 8.0


class Reading:
    """The definitions and products of one program, by what they read and who reads them."""

    def __init__(self, program: Program, products: Sequence[Extern]) -> None:
        self.calls: dict[Define, Extern] = {}  # what a call of the library's attention computes
        self.define_of: dict[Buffer, Define] = {d.buffer: d for d in program.defines()}
        self.product_of: dict[Buffer, Define] = {
            s.contraction.buffer: s.contraction for s in products if s.contraction is not None
        }
        self.readers: dict[Buffer, list[Define]] = {}
        self.kept = program.kept.keys()  # in memory, whoever computes with them
        self.elsewhere: set[Buffer] = {*buffers_in(program.outputs), *self.kept}
        self.order = {}
        self.links = Links(program)
        for number, s in enumerate(program.statements):
            match s:
                case Define():
                    self._reads(s)
                    self.order[s] = number
                case Extern() if s.contraction is not None and s.contraction.buffer in self.product_of:
                    self._reads(s.contraction)
                    self.order[s.contraction] = number
                case Extern():
                    self.elsewhere.update(buffers_in((s.args, s.kwargs)))
                case Update():
                    self.elsewhere.add(s.source)
        self.cheap: dict[Define, bool] = {}
        self.chains: dict[Define, dict[Define, None]] = {}
        self.memories: dict[Define, set[Load]] = {}
        # Definitions that kernels of products compute, or that are asked to have one of their own.
        self.taken = {d for d in program.defines() if d.orders.no_fuse}
        self._sources: dict[Define, tuple[Define, ...]] = {}
        self._above: dict[Define, dict[Define, None]] = {}

    def _reads(self, define: Define) -> None:
        for buffer in loaded(define.value):
            self.readers.setdefault(buffer, []).append(define)

    def forget_unread(self, members: Iterable[Define], again: Iterable[Define]) -> None:
        """Values that members compute again and nobody else reads are not made: they read nothing any more."""
        inside = {*members, *again}
        for d in reversed(self.ordered(again)):
            if d.buffer not in self.elsewhere and self.readers_of(d) <= inside:
                for buffer in loaded(d.value):
                    self.readers[buffer] = [r for r in self.readers[buffer] if r is not d]

    def ordered(self, defines: Iterable[Define]) -> tuple[Define, ...]:
        """Definitions and products in the program's order."""
        return tuple(sorted(defines, key=self.order.__getitem__))

    def sources(self, define: Define) -> tuple[Define, ...]:
        """The definitions and products that a definition reads."""
        if define not in self._sources:
            found = (self.define_of.get(b) or self.product_of.get(b) for b in loaded(define.value))
            self._sources[define] = tuple(d for d in found if d is not None)
        return self._sources[define]

    def only_for(self, define: Define, group: set[Define]) -> bool:
        readers = self.readers_of(define)
        return define.buffer not in self.elsewhere and bool(readers) and readers <= group

    def readers_of(self, define: Define) -> set[Define]:
        return set(self.readers.get(define.buffer, ()))

    def stored(self, members: Iterable[Define]) -> list[Define]:
        """Members that others want."""
        own = set(members)
        return [d for d in members if d.buffer in self.elsewhere or not self.readers_of(d) or self.readers_of(d) - own]

    def shares_matrix(self, define: Define, product: Define) -> bool:
        """Whether two products read a common matrix: else their sums run over different axes."""
        return not {*loaded(define.value)}.isdisjoint(loaded(product.value))

    def is_operand(self, define: Define, members: set[Define]) -> bool:
        return any(r in members and r.buffer in self.product_of for r in self.readers.get(define.buffer, ()))

    def is_point_wise(self, define: Define) -> bool:
        made = define.buffer in self.product_of or define in self.calls
        return not made and is_pointwise(define.value)

    def chain(self, define: Define) -> dict[Define, None]:
        """A point-wise value and those it is made of, back to what must be read."""
        if define not in self.chains:
            self.chains[define] = reached([define], self._made_again, MOST_MEMBERS)
        return self.chains[define]

    def _made_again(self, define: Define) -> Iterable[Define]:
        return (s for s in self.sources(define) if self.is_point_wise(s) and s.buffer not in self.kept)

    def moves(self, define: Define) -> dict[Define, None]:
        """A value that only repeats a smaller one, or widens it, and the values of this kind that it is made of.

        Copies of equal size between two such values belong to them; a copy of a value that was not widened does not.
        """
        found: list[Define] = []
        grown = 0
        while self.is_point_wise(define) and (factor := _growth(define)) >= 1.0 and len(found) < MOST_MEMBERS:
            found.append(define)
            grown = len(found) if factor > 1.0 else grown
            sources = self.sources(define)
            if not sources:
                break
            (define,) = sources
        return dict.fromkeys(found[:grown])

    # --- around products ---

    def products_above(self, last: Define) -> list[Define]:
        """The products that a product is made of, through values that are none."""
        return [d for d in self._made_of(last) if d.buffer in self.product_of and d not in self.taken]

    def between(self, last: Define, chosen: Iterable[Define]) -> list[Define]:
        """Some of the products that a product is made of, and all that depends on them."""
        depends = set(chosen) - self.taken
        for d in self._made_of(last):
            if d.buffer not in self.product_of and not depends.isdisjoint(self.sources(d)):
                depends.add(d)
        return [d for d in self._made_of(last) if d in depends]

    def _made_of(self, last: Define) -> dict[Define, None]:
        """All that a product is made of, back to other products, sources first."""
        if last not in self._above:
            above = in_order(self.sources(last), lambda d: () if d.buffer in self.product_of else self.sources(d))
            self._above[last] = above
        return self._above[last]

    def tails(self, last: Define) -> list[tuple[Define, ...]]:
        """Point-wise work on a product's result that nobody else reads, longest first; none at the end."""
        chain: list[Define] = []
        current = last
        while current.buffer not in self.elsewhere and len(chain) < MOST_MEMBERS:
            users = self.readers.get(current.buffer, [])
            if len(set(users)) != 1 or users[0] in self.taken or users[0].buffer in self.product_of:
                break
            (current, *_) = users
            if not is_pointwise(current.value) or numel(current.axes) != numel(last.axes):
                break
            chain.append(current)
        return [tuple(chain[:k]) for k in range(len(chain), -1, -1)]

    # --- values that could be computed again ---

    def memory(self, define: Define) -> set[Load]:
        """What a point-wise value reads, with all it is made of."""
        if define not in self.memories:
            chain = self.chain(define)
            made = {d.buffer for d in chain}
            loads = (e for d in chain for e in _loads(d.value) if e.buffer not in made)
            self.memories[define] = set(loads)
        return self.memories[define]

    def is_cheap(self, define: Define) -> bool:
        """Whether computing it from memory, or from positions alone, for every step beats reading it."""
        if define not in self.cheap:
            chain, shape = self.chain(define), define.buffer.shape
            points = max(1, numel(define.axes))
            cost = sum(_cost(d.value) * min(1.0, numel(d.axes) / points) for d in chain)
            moved, own = sum(load_bytes(e) for e in self.memory(define)), storage_bytes(define.buffer)
            row = len(shape) < 2 or any(n.constant == 1 for n in shape[-2:])
            most, wider = (PLACE_COST if row or 16 * moved <= own else CHEAP_COST), 8 if row else 2
            self.cheap[define] = len(chain) <= MOST_MEMBERS and cost <= most and moved <= wider * own
        return self.cheap[define]

    def without_shared(self, again: Iterable[Define], members: Iterable[Define]) -> tuple[Define, ...]:
        """What members still compute of `again` where values that many of their positions share are stored."""
        points = max(numel(m.axes) for m in members)
        work = {d: sum(_cost(c.value) for c in self.chain(d)) for d in again}  # of each position
        left = {d for d in again if SHARED * numel(d.axes) > points or work[d] < HEAVY}
        found = reached(members, lambda d: (s for s in self.sources(d) if s in left))
        return tuple(d for d in again if d in found)

    def is_unpacked_once(self, define: Define, product: Define) -> bool:
        """Whether one tile of a product computes it, from memory that holds much less: packed weights."""
        packed = product.buffer in self.product_of and self.is_packed(define)
        return packed and self.positions_beside(define, product) <= UNPACKED_ROWS

    def is_packed(self, define: Define) -> bool:
        """Whether it is at least twice as large as what it is made of, with an eighth for scales beside that."""
        read, own = [load_bytes(e) for e in self.memory(define)], storage_bytes(define.buffer)
        small = 2 * max(read, default=0) <= own and 8 * sum(read) <= 5 * own
        return small and len(self.chain(define)) <= MOST_MEMBERS

    def positions_beside(self, define: Define, product: Define) -> int:
        """Positions of a product along which what it reads does not vary."""
        along = {a for e in loads_of([product.value])[define.buffer] for a in e.axes}
        return numel([a for a in product.axes if a not in along])


def is_short(product: Define) -> bool:
    """Whether a product's sums are short enough to be computed inside a sweep."""
    lengths = [a.extent.constant for r in reductions([product.value]) for a in r.over]
    return all(n is not None and n <= MOST_HELD for n in lengths)


@lru_cache(maxsize=8192)
def _loads(value: Expr) -> tuple[Load, ...]:
    return tuple(e for e in postorder([value]) if isinstance(e, Load))


@lru_cache(maxsize=8192)
def _cost(value: Expr) -> float:
    """Work of one element; conversions to compute in float32 and back cancel where values are put together."""
    return sum(work_of(e) for e in postorder([value]) if not (isinstance(e, Pointwise) and e.op in CASTS))


def _growth(define: Define) -> float:
    """Bytes of a value that only moves another one for each byte of the other one; 0 where it does more than that."""
    value = define.value
    while isinstance(value, Pointwise) and value.op in CASTS:
        value = value.args[0]
    if not isinstance(value, Load) or not all(p.is_plain for p in value.index):
        return 0.0
    return storage_bytes(define.buffer) / max(1, load_bytes(value))
