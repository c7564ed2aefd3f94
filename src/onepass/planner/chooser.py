"""What the first tier of planning knows: what is decided on a program's matrix products so far, and what a region of
operations around some of them takes, as one kernel and without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from ..analysis.access import numel, operation_cost, storage_bytes
from ..analysis.answers import Answer
from ..analysis.contraction import Contraction
from ..analysis.inline import Inliner, Memo, loaded, loads_of, reductions
from ..analysis.library_price import multiply_rate, product_us
from ..analysis.nest import Refusal, opened
from ..analysis.operands import operands, uncast
from ..analysis.passes import passes, visited
from ..analysis.price import MATRIX_ROWS
from ..ir.limits import FOLLOWERS, OPERANDS, PRODUCTS
from ..ir.plan import Chosen, Decision, Store
from ..ir.program import Buffer, Define, Extern, Program
from .close_calls import AROUND, CloseCalls, Judge, Times
from .cost import predict_us
from .ordered import Ordered, refuse
from .parts import both_ways
from .reading import Reading
from .regions import Region, Regions
from .setting import Setting

BETWEEN = "another step lies between its operations"
MOMENTS = 1.6  # times the price of kernels whose tiles leave means and variances (seen on one H200)
T = TypeVar("T")
Defines: TypeAlias = tuple[Define, ...]
Read: TypeAlias = Callable[[list[Store]], Contraction | list[Contraction] | Refusal]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of region. `read`: its stores as nests of products. `without`: the predicted time without it, and what is
    spared of what measuring would find; None: nothing would be found. `ways`: how to speak of both. `regions`:
    around a product, the first to be tried first. `rival`: the time of another kind of kernel."""

    name: str
    read: Read
    without: Callable[[Chooser, Defines, Defines], tuple[float, float | None]]
    ways: tuple[str, str] = ("in one kernel", AROUND)
    regions: Callable[[Chooser, Define], Iterable[tuple[Defines, Defines]]] | None = None
    rival: Callable[[Chooser, Defines], float] | None = None


class Chooser(Reading):
    """One pass over a program's products."""

    def __init__(self, program: Program, setting: Setting, judge: Judge | None = None) -> None:
        """`judge` measures close calls."""
        self.setting, self.target, self.limits = setting, setting.target, setting.limits
        self.close_calls, self.memo = CloseCalls(judge, setting.limits.doubted), Memo()
        self.program, self.asked = program, Ordered(program)
        # Attention may be the library's, which rounds where it likes.
        self.offers = setting.options.precision == "fused" and setting.target.attention
        self.decisions: list[Decision] = []
        self.products = [s for s in program.externs() if self._takes(s)]
        super().__init__(program, self.products)
        self._bounds: dict[Contraction, float] = {}  # equal regions have one contraction
        self.regions: list[Region] = []

    def _takes(self, extern: Extern) -> bool:
        """Whether an extern is a product of matrices that the chip's matrix units take."""
        if extern.contraction is None or extern.orders.no_fuse:
            return False
        if self.limits.given_up([extern.contraction]) >= PRODUCTS:
            node = extern.origin.node
            self.decisions.append(Decision(node, node, "product", False, "every kernel that was tried spilled"))
            return False
        sides = [s for r in reductions([extern.contraction.value]) for s in r.inputs[0].children]
        missing = {d for s in sides if (d := uncast(s).dtype).bytes == 1} - {*self.target.byte_products}
        if missing:
            node, reason = extern.origin.node, f"no matrix unit takes {next(iter(missing)).value} there"
            self.decisions.append(Decision(node, node, "product", False, reason))
        return not missing

    def try_regions(self, kind: Kind, product: Define | None) -> bool:
        """Make a kernel of the first region of a kind around a product that is better off as one."""
        if product is None or kind.regions is None or product in self.taken or self.given_up([product]) >= FOLLOWERS:
            return False
        first = product.origin.node
        return any(self.attempt(kind, m, a, (first, m[-1].origin.node)) for m, a in kind.regions(self, product))

    def force(self, read: Sequence[Read], members: Defines) -> None:
        """Make a kernel of a region that is asked to share one: the fastest there is."""
        found: list[Region] = []
        refusal = Refusal("there is no such kernel")
        for again in self.ways_again(members):
            kinds = (self.contracted(way, members, again) for way in read)
            nests = next((k for k in kinds if not isinstance(k, Refusal)), None)
            if nests is None:
                refused = self.contracted(read[0], members, again)
                refusal = refused if isinstance(refused, Refusal) else refusal
                continue
            found.append(Region(members, again, self.kernel(nests, members, again)))
        if not found:
            raise refuse(members, refusal.reason)
        region = min(found, key=lambda r: r.chosen.time_us if r.chosen is not None else math.inf)
        names = members[0].origin.node, members[-1].origin.node
        self.answer([region], Decision(*names, "fuse", True, "asked for: onepass.fuse"), None)

    def attempt(
        self,
        kind: Kind,
        members: Defines,
        again: Defines,
        names: tuple[str, str],
        instead: Callable[[float, float], bool] | None = None,
    ) -> bool:
        """Make a kernel of a region if that is predicted to be faster, or seen to be, and keep the reason.

        `instead`: takes the region's place where that is better still; asked with a time that no kernel of the region
        beats, then with that of the fastest, and with the time without it.
        """
        found = self.contracted(kind.read, members, again)
        if isinstance(found, Refusal):
            return self.refuse(kind, names, found.reason)
        (apart, spared), (one, other) = kind.without(self, members, again), kind.ways
        least = max(map(self.bound, found))
        if instead is not None and instead(least, apart):
            return True
        if least >= apart:
            reason = f"at least {least:.1f} us {one}, predicted {apart:.1f} us {other}"
            return self.refuse(kind, names, reason, apart - least)
        chosen = self.kernel(found, members, again, apart)
        together = chosen.time_us * max(map(_slowed, found))
        if instead is not None and instead(together, apart):
            return True
        reason = f"predicted {together:.1f} us {one}, {apart:.1f} us {other}"
        if together < apart and kind.rival is not None and (rival := kind.rival(self, members)) < together:
            return self.refuse(kind, names, f"{reason}, {rival:.1f} us in one kernel")
        region = Region(members, again, chosen)
        decision = Decision(*names, kind.name, together < apart, reason, apart - together)
        times = None if spared is None else Times(together, apart, spared, kind.ways)
        return self.answer([region], decision, times)

    def refuse(self, kind: Kind, names: tuple[str, str], reason: str, saved_us: float = 0.0) -> bool:
        """Keep why there is no kernel."""
        self.decisions.append(Decision(*names, kind.name, False, reason, saved_us))
        return False

    def answer(self, regions: Sequence[Region], decision: Decision, times: Times | None) -> bool:
        """Keep a decision on regions, measured if times are given and close; those that are accepted are kernels."""
        members = tuple(d for r in regions for d in r.members)
        again = tuple(dict.fromkeys(d for r in regions for d in r.again))
        before = [r for r in self.regions if not {*r.members}.isdisjoint(members)]  # the kernels there were of them
        stored = {*self.stored((*members, *again))}

        def question() -> tuple[Regions, Regions]:
            wanted = [d.buffer for d in self.stored(members)]
            return both_ways(self.program, self.ordered, (regions, before), wanted, stored & {*again})

        if times is not None:
            decision = self.close_calls.settle(decision, times, question)
        inside = (*members, *(d for d in again if d.buffer in self.product_of))
        moved = 2 * sum(storage_bytes(d.buffer) for d in inside if d not in stored)
        self.decisions.append(replace(decision, bytes_saved=moved if decision.accepted else 0))
        if decision.accepted:
            self.regions = [*(r for r in self.regions if r not in before), *regions]
            self.taken.update(inside)
            for region in regions:
                self.links.join(region.members, region.again)
            self.elsewhere |= {b for d in again for b in loaded(d.value)} - {d.buffer for d in again}
            self.forget_unread(members, again)
        return decision.accepted

    def is_possible(self, members: Defines) -> bool:
        """Whether nothing that lies between members, or was asked of them, keeps them from running as one step."""
        again = self.again(members)
        return self.asked.obstacle((*members, *again)) is None and not self.links.is_cyclic(members, again)

    def contracted(self, read: Read, members: Defines, again: Defines) -> list[Contraction] | Refusal:
        """A region as nests of products, or those of an equal one."""
        if (obstacle := self.asked.obstacle((*members, *again))) is not None:
            return Refusal(obstacle)
        if self.links.is_cyclic(members, again):
            return Refusal(BETWEEN)
        found = self.ask(read, members, again, read).value
        return [found] if isinstance(found, Contraction) else found

    def time_us(self, read: Read, members: Defines, again: Defines, limit_us: float = math.inf) -> float:
        """Predicted time of one kernel of a region; without end where there is none."""
        found = self.contracted(read, members, again)
        return math.inf if isinstance(found, Refusal) else self.kernel(found, members, again, limit_us).time_us

    def ask(self, about: Hashable, members: Defines, again: Defines, answer: Callable[[list[Store]], T]) -> Answer[T]:
        """What is found of the stores of a region, or was found of those of an equal one."""
        stored, inside = self.stored(members), (*members, *again)

        def stores() -> list[Store]:
            inliner = Inliner({d.buffer: d for d in inside}, (d.buffer for d in stored), self.memo)
            return [Store(d.buffer, d.dimensions, inliner.value(d.buffer)) for d in stored]

        products = tuple(d.buffer in self.product_of for d in members)
        return self.setting.answers.ask((about, products), inside, {*stored}, lambda: answer(stores()))

    def done_anyway(self, members: Defines) -> float:
        """Of the time without a kernel of the product: what the kernels that read its results do in passing."""
        own, ends = set(members), self.stored(members)
        outside = {d: self.readers_of(d) - own for d in ends}
        passed = [d for d in ends if any(r.buffer not in self.product_of for r in outside[d])]
        if not passed or all(d.buffer in self.product_of for d in ends):
            return 0.0
        moved = 0
        for d in passed:
            read = any(r.buffer in self.product_of for r in outside[d])
            wanted = d.buffer in self.elsewhere or d.buffer in self.product_of or read
            moved += storage_bytes(d.buffer) * (1 if wanted else 2)  # not read by it, and not even written
        return self.target.launch_us + moved / self.target.memory_bytes_per_us

    def again(self, members: Iterable[Define], operands: bool = True) -> Defines:
        """Cheap point-wise values that the members read: computed again here, back to what must be read.

        An operand that is not computed again is at least widened and repeated here; none is without `operands`.
        """
        own = set(members)
        found: dict[Define, None] = {}
        computes = operands and self.given_up(members) < OPERANDS
        for d, reader in {s: m for m in members for s in self.sources(m)}.items():
            # By another kernel, beside its products; or it must be in memory.
            made = d in own or d.buffer in self.kept or (d in self.taken and bool(self.memory(d)))
            if made or not self.is_point_wise(d):
                continue
            operand = self.is_operand(d, own) and bool(self.memory(d))
            wanted = (computes or not operand) and (self.is_cheap(d) or self.is_unpacked_once(d, reader))
            again = self.chain(d) if wanted else self.moves(d) if operand else ()
            found |= dict.fromkeys(c for c in again if c not in own)
        return self.ordered(found)

    def ways_again(self, members: Defines) -> Iterable[Defines]:
        """What members compute again: all that is cheap; nothing that many positions share; no operands, which only
        grow; of the rest positions alone."""
        cheap, others = self.again(members), self.again(members, operands=False)
        moved = {c for d in cheap if self.is_operand(d, {*members}) for c in self.moves(d)}
        positions = tuple(d for d in cheap if d in moved or not self.memory(d))
        return dict.fromkeys((cheap, self.without_shared(cheap, members), others, positions))

    def given_up(self, members: Iterable[Define]) -> int:
        """What a kernel of some products must do without (`Limits`)."""
        return self.limits.given_up(d for d in members if d.buffer in self.product_of)

    def kernel(
        self, found: Sequence[Contraction], members: Defines, again: Defines, limit_us: float = math.inf
    ) -> Chosen:
        """The fastest kernels of a region: how the first runs, and the time of each launch."""
        about = "kernel", len(found), bool(found[0].entering)
        return self.ask(
            about, members, again, lambda _: self.setting.choose_products(found, self.target, limit_us)
        ).value

    def kernel_us(self, defines: Defines) -> float:
        """Predicted time of one kernel without products; without end where there is none."""
        chosen = self.ask(
            "kernel", defines, (), lambda stores: self.setting.choose(stores, self.target, 0.0, False)
        ).value
        return math.inf if isinstance(chosen, Refusal) else chosen.time_us

    def bound(self, c: Contraction) -> float:
        """A time that no kernel of the contraction beats: its bytes, and products of the tiles that masks leave."""
        if c not in self._bounds:
            self._bounds[c] = self._bound(c)
        return self._bounds[c]

    def _bound(self, c: Contraction) -> float:
        values = opened(c.nest)
        products = 0.0
        for r in reductions(values):
            if (sides := operands(r)) is not None:
                products += numel((*r.axes, *r.over)) / multiply_rate(sides[0].dtype, self.target)
        buffers = {*loads_of(values), *(s.buffer for s in c.nest.stores)}
        memory = sum(map(storage_bytes, buffers)) / self.target.memory_bytes_per_us
        again = len(passes(c)) if c.reduces_columns and not c.held else 1
        return self.target.launch_us + max(
            again * products * visited(c, MATRIX_ROWS) / self.target.rates.matrix, memory
        )

    def apart(self, members: Defines, again: Defines) -> float:
        """Predicted time with the products by the library and one kernel for all that lies between two of them."""
        total, stored = 0.0, set(self.stored(members))
        own = {*members, *again}
        chained = any(s in members for d in members if d.buffer in self.product_of for s in self.sources(d))
        seen: set[Buffer] = set()  # products that the one kernel behind them reads
        for d in again:  # what only these products read would have to be stored for them
            read = any(r in members and r.buffer in self.product_of for r in self.readers[d.buffer])
            if read and d.buffer not in self.elsewhere and set(self.readers[d.buffer]) <= own:
                made_of = self.chain(d)
                total += self.kernel_us(tuple(c for c in again if c in made_of))
        for d in members:
            if d.buffer in self.product_of:
                total += product_us(d, self.target)
                continue
            # Where it reads a product it has to read it from memory, and write for the next one.
            first = not seen
            made = sum(storage_bytes(b) for b in loaded(d.value) if b in self.product_of and b not in seen)
            seen |= set() if chained else {b for b in loaded(d.value) if b in self.product_of}
            read_by_product = any(r.buffer in self.product_of for r in self.readers.get(d.buffer, []))
            written = storage_bytes(d.buffer) if read_by_product or d in stored else 0
            if made and first:
                total += self.target.launch_us
            total += (made + written) / self.target.memory_bytes_per_us
        return total

    def library_and_one(self, members: Defines) -> tuple[float, float]:
        """Predicted time of the library's products, and of one kernel for all that follows."""
        others = [d for d in members if d.buffer not in self.product_of]
        made, work = {d.buffer for d in others}, operation_cost(d.value for d in others)
        read = dict.fromkeys(b for d in others for b in loaded(d.value) if b not in made)
        moved = sum(map(storage_bytes, (*read, *(d.buffer for d in self.stored(members) if d in others))))
        library = sum(product_us(d, self.target) for d in members if d not in others)
        return library, predict_us(moved, work, 1, self.target)


def _slowed(c: Contraction) -> float:
    """How many times its price a kernel was seen to take."""
    return MOMENTS if any(r.monoid == "welford" for r in c.entering) else 1.0
