"""Which matrix products run inside kernels, with what around them: the first tier of planning.

A product goes to the library unless something around it makes a kernel of it pay: a second product that reads what
the first one made (the matrix between them is then never stored), reductions of its rows, or point-wise work.
Each region is tried whole; the answer keeps its number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from ..analysis.access import flat_offset, numel, storage_bytes
from ..analysis.answers import Answer, Answers
from ..analysis.contraction import DIFFERENT_AXES, MOST_HELD, Contraction, contract
from ..analysis.inline import Inliner, Memo, loaded, reductions
from ..analysis.library_price import multiply_rate, product_us
from ..analysis.nest import Refusal, opened
from ..analysis.operands import operands, uncast
from ..analysis.passes import passes, visited
from ..analysis.price import MATRIX_ROWS
from ..ir.expr import Load, postorder
from ..ir.limits import FOLLOWERS, NO_LIMITS, OPERANDS, PRODUCTS, Limits
from ..ir.options import Options
from ..ir.plan import Decision, Store
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, Define, Extern, Program, Statement
from ..ir.target import Target
from ..ir.time import total_us
from .beside import join_beside
from .close_calls import AROUND, CloseCalls, Judge, Times
from .contraction_rows import Followers, try_rows, waits
from .contraction_states import try_tiles
from .library_attention import CLOSE, Offer, offered
from .parts import Parts
from .plan import Choose, Chosen
from .reading import MOST_MEMBERS, UNPACKED_ROWS, Reading
from .regions import Region, Regions

BETWEEN = "another step lies between its operations"
MOST_RESULTS = 3  # of point-wise work on one product
NEARLY = 1.1  # storing what could be computed inside takes memory, and a stored mask bounds no sweep
T = TypeVar("T")
ChooseProducts: TypeAlias = Callable[[Sequence[Contraction], Target, float], Chosen]


def choose_contractions(
    program: Program,
    target: Target,
    options: Options,
    choose: Choose,
    choose_products: ChooseProducts,
    answers: Answers,
    judge: Judge | None = None,
    limits: Limits = NO_LIMITS,
) -> Regions:
    """Decide on every matrix product of a program.

    `choose`, `choose_products`: the fastest kernels of a group without and with products. `answers`: what is known of
    the program. `judge`: measures close calls. `limits`: of what has spilled.
    """
    if not target.products_per_us or not options.fuse:
        return Regions(program, (), ())
    chooser = Chooser(program, target, choose, choose_products, answers, judge, options.precision == "fused", limits)
    for extern in reversed(chooser.products):
        chooser.try_chain(extern)
    for extern in chooser.products:
        try_tiles(chooser, extern)
        try_rows(chooser, extern)
    for extern in chooser.products:
        chooser.try_alone(extern)
    join_beside(chooser)
    chosen = {d for r in chooser.regions for d in r.members}
    statements = tuple(s for found in program.statements for s in chooser.instead(found, chosen))
    return Regions(replace(program, statements=statements), tuple(chooser.regions), tuple(chooser.decisions))


class Chooser(Reading):
    """One pass over a program's products."""

    def __init__(
        self,
        program: Program,
        target: Target,
        choose: Choose,
        choose_products: ChooseProducts,
        answers: Answers,
        judge: Judge | None = None,
        calls: bool = True,
        limits: Limits = NO_LIMITS,
    ) -> None:
        """`judge` measures close calls. `calls`: attention may be the library's, which rounds where it likes."""
        self.choose, self.choose_products = choose, choose_products
        self.target, self.close_calls, self.parts = target, CloseCalls(judge, limits.doubted), Parts(program)
        self.limits = limits
        self.offers = calls and target.attention
        self.answers, self.memo = answers, Memo()
        self.decisions: list[Decision] = []
        self.products = [s for s in program.externs() if self._takes(s)]
        super().__init__(program, self.products)
        self.reaches_short = self._lead_to_short()
        self.taken: set[Define] = set()
        self.regions: list[Region] = []

    def instead(self, statement: Statement, chosen: set[Define]) -> Iterable[Statement]:
        """What becomes of a statement: a definition inside a kernel, a call that stands for many, or itself."""
        define = statement.contraction if isinstance(statement, Extern) else statement
        if not isinstance(define, Define) or define not in self.calls:
            return [define if isinstance(define, Define) and define in chosen else statement]
        call = self.calls[define]
        return [call] if define.buffer is call.result else []

    def _takes(self, extern: Extern) -> bool:
        """Whether an extern is a product of matrices that the chip's matrix units take."""
        if extern.contraction is None:
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

    # --- a product that reads another ---

    def try_chain(self, extern: Extern) -> None:
        """A region from one product to a later one, through whatever is computed in between."""
        last = extern.contraction
        if last is None or last in self.taken or last not in self.reaches_short:
            return
        short = (d for d in self._between(last, None) if _is_short(d))  # longer ones could not be computed again
        found = sorted(short, key=self.order.__getitem__, reverse=True)  # the nearest first
        # All at once; where that is no kernel, what depends on one of them, the others read from memory.
        for firsts in [found, *([first] for first in found if len(found) > 1)]:
            if not firsts:
                continue
            core, names = {last, *self._between(last, firsts)}, (firsts[0].origin.node, last.origin.node)
            tails = self._tails(last) if self.given_up(core) < FOLLOWERS else [()]
            regions = [members for tail in tails if (members := self._grown(core, tail, last))]
            offer = self._offer(regions, *names) if self.offers and regions else None
            if any(self._consider(members, *names, "chain", offer) for members in regions):
                return

    def _offer(self, regions: list[tuple[Define, ...]], first: str, last: str) -> Offer | None:
        """The library's attention in the place of a region, if it is nothing else."""
        found = offered(self, [r for r in regions if not self.links.is_cyclic(r, self.again(r))])
        if isinstance(found, Refusal):
            self.decisions.append(Decision(first, last, "library", False, found.reason))
        return found if isinstance(found, Offer) else None

    def _between(self, last: Define, chosen: list[Define] | None) -> Iterable[Define]:
        """The products that this one is made of; with some of them chosen, those and all that depends on them."""
        depends: dict[Define, bool] = {}
        stack = [(d, False) for d in self.sources(last)]
        while stack:
            d, ready = stack.pop()
            if d in depends and not ready:
                continue
            if d.buffer in self.product_of:
                depends[d] = d not in self.taken and (chosen is None or d in chosen)
            elif ready:
                depends[d] = any(depends.get(s, False) for s in self.sources(d))
            else:
                depends[d] = False
                stack.append((d, True))
                stack.extend((s, False) for s in self.sources(d) if s not in depends)
        return [d for d, yes in depends.items() if yes and (chosen is not None or d.buffer in self.product_of)]

    def _lead_to_short(self) -> set[Define]:
        """What is made of a short product with no other product in between."""
        found: set[Define] = set()
        for d in self.order:
            if any(s in found if s.buffer not in self.product_of else _is_short(s) for s in self.sources(d)):
                found.add(d)
        return found

    # --- what follows a product ---

    def _tails(self, last: Define) -> list[tuple[Define, ...]]:
        """Point-wise work on the result that nobody else reads, longest first; none at the end."""
        chain: list[Define] = []
        current = last
        while current.buffer not in self.elsewhere and len(chain) < MOST_MEMBERS:
            users = self.readers.get(current.buffer, [])
            if len(set(users)) != 1 or users[0] in self.taken or users[0].buffer in self.product_of:
                break
            user = users[0]
            if reductions([user.value]) or numel(user.axes) != numel(last.axes):
                break
            chain.append(user)
            current = user
        return [tuple(chain[:k]) for k in range(len(chain), 0, -1)] + [()]

    def _spreads(self, last: Define) -> list[tuple[Define, ...]]:
        """Point-wise work on the result, whoever else reads what it passes, longest first: several may be stored.

        Where columns of the result meet each other (a packed gate), only their one result.
        """
        chain = self._tails(last)[0]
        parted = self._part_size((last, *chain)[-1])
        size = parted or numel(last.axes)
        found: dict[Define, None] = dict.fromkeys(chain if parted else ())
        start = (last, *found)
        made, followers = {d.buffer for d in start}, Followers(self, start[-1])
        for d in followers:
            if len(found) == MOST_MEMBERS:
                break
            fits = self.is_point_wise(d) and d not in self.taken and numel(d.axes) == size
            if fits and not waits(self, d, made):
                found[d] = None
                made.add(d.buffer)
                followers.add(d)
        spread = tuple(found)
        prefixes = [spread[:k] for k in range(len(spread), 0, -1)]
        if parted:
            return [p for p in prefixes if len(p) > len(chain) and self.stored((last, *p)) == [p[-1]]]
        return [p for p in prefixes if len(self.stored((last, *p))) <= MOST_RESULTS]

    def _part_size(self, last: Define) -> int:
        """How many positions the readers of a result have that read each of its elements once at most; 0: others."""
        readers = self.readers_of(last)
        sizes = {numel(d.axes) for d in readers}
        if last.buffer in self.elsewhere or len(sizes) != 1 or (size := sizes.pop()) >= numel(last.axes):
            return 0
        places: set[Poly] = set()
        for d in readers:
            own = {a: Axis(f"d{k}", a.extent) for k, a in enumerate(d.dimensions)}
            for e in postorder([d.value]):
                if isinstance(e, Load) and e.buffer is last.buffer:
                    offset = flat_offset(e.buffer, e.index).substitute({a: new.poly() for a, new in own.items()})
                    if not own or offset.coefficient(own[d.dimensions[-1]]) is not Poly.ONE:
                        return 0
                    places.add(offset)
        return size if len(places) * size <= numel(last.axes) else 0

    def try_alone(self, extern: Extern) -> None:
        """One product with the point-wise work that follows it."""
        last = extern.contraction
        if last is None or last in self.taken:
            return
        for tail in dict.fromkeys((*self._spreads(last), *self._tails(last))):
            end = tail[-1] if tail else last
            most = max(storage_bytes(d.buffer) for d in self.stored((last, *tail)))
            members = self._grown({last}, tail, None if tail else last, most)
            if not members or not (tail or self.again(members)):
                continue
            if not all(self.shares_matrix(d, last) for d in members if d.buffer in self.product_of):
                self.decisions.append(Decision(last.origin.node, end.origin.node, "product", False, DIFFERENT_AXES))
                continue
            if self._consider(members, last.origin.node, end.origin.node, "product"):
                return
        self._note_packed(last)

    def _grown(
        self, core: set[Define], tail: tuple[Define, ...], last: Define | None, most: int = 0
    ) -> tuple[Define, ...]:
        """Core and tail in order, with what only they want; () if somebody else wants what is larger than the result
        and than `most` bytes.

        Beside the tail that is any point-wise value, since it is computed once for each element of the result; what
        is made of the core (the sum of the weights) in any case. Without a `last` product others may join, too.
        """
        members, late = {*core, *tail}, set(tail)
        result = tail[-1] if tail else last
        assert result is not None
        most = max(most, storage_bytes(result.buffer))
        waiting = [d for m in sorted(members, key=self.order.__getitem__) for d in self._neighbours(m)]
        while waiting and len(members) <= MOST_MEMBERS:
            d = waiting.pop()
            if d in members or d in self.taken:
                continue
            made = any(s in members and s not in late and s is not last for s in self.sources(d))
            if d.buffer in self.product_of:
                belongs = last is None and self.only_for(d, late)
            elif self.only_for(d, members):
                belongs = made or (self.only_for(d, late) and not reductions([d.value]))
            else:
                belongs = made and self._aside(d, members, most)
            if belongs:
                members.add(d)
                late |= {d} if not made and d.buffer not in self.product_of else set()
                waiting += self._neighbours(d)
        if any(storage_bytes(d.buffer) > most for d in self.stored(members)):
            return ()
        return tuple(sorted(members, key=self.order.__getitem__))

    def _aside(self, define: Define, members: set[Define], most: int) -> bool:
        """Whether others want what members make, and it can be stored beside a result of `most` bytes."""
        sources = self.sources(define)
        if not all(s in members for s in sources):
            return False
        if any(storage_bytes(s.buffer) > most for s in sources):
            return True
        return storage_bytes(define.buffer) <= most and not reductions([define.value])

    def _neighbours(self, define: Define) -> list[Define]:
        return [*self.sources(define), *self.readers.get(define.buffer, ())]

    # --- the answer ---

    def _consider(
        self, members: tuple[Define, ...], first: str, last: str, kind: str, offer: Offer | None = None
    ) -> bool:
        """One kernel of the members, or the library's; of the values they read, as many are computed again as pays."""
        ways = [again for again in self.ways_again(members) if again or len(members) > 1]  # else a bare product
        if len(ways) > 1:
            us = {again: self._with_rest_us(members, again, ways[0]) for again in ways}
            ways = sorted(ways, key=lambda again: us[again] * (1 if again == ways[0] else NEARLY))
        return any(self._try(members, again, first, last, kind, offer) for again in ways)

    def _with_rest_us(self, members: tuple[Define, ...], again: tuple[Define, ...], most: tuple[Define, ...]) -> float:
        """Predicted time of a region that computes `again`, and of a kernel that stores the rest of `most` for it."""
        found = Refusal(BETWEEN) if self.links.is_cyclic(members, again) else self.contracted(members, again)
        if isinstance(found, Refusal):
            return math.inf
        rest = {d for d in most if d not in again}
        wanted = {s for d in (*members, *again) for s in self.sources(d) if s in rest}
        made = sum(self.kernel_us(tuple(d for d in most if d in rest and d in self.chain(w))) for w in wanted)
        return total_us(self.kernel([found], members, again).times) + made

    def _try(
        self,
        members: tuple[Define, ...],
        again: tuple[Define, ...],
        first: str,
        last: str,
        kind: str,
        offer: Offer | None,
    ) -> bool:
        found = Refusal(BETWEEN) if self.links.is_cyclic(members, again) else self.contracted(members, again)
        if isinstance(found, Refusal):
            self.decisions.append(Decision(first, last, kind, False, found.reason))
            return False
        spared = self._done_anyway(members, kind)
        bound, apart = self.bound(found), self.apart(members, again) - spared
        if offer is not None and self._call(offer, members, bound, apart, first, last):
            return True
        if bound >= apart:
            reason = f"at least {bound:.1f} us in one kernel, predicted {apart:.1f} us {AROUND}"
            self.decisions.append(Decision(first, last, kind, False, reason, apart - bound))
            return False
        chosen = self.kernel([found], members, again, apart)
        together = total_us(chosen.times)
        if offer is not None and self._call(offer, members, together, apart, first, last):
            return True
        reason = f"predicted {together:.1f} us in one kernel, {apart:.1f} us {AROUND}"
        decision = Decision(first, last, kind, together < apart, reason, apart - together)
        region = Region(members, again, predicted_us=together, schedule=chosen.schedule)
        return self.answer(region, self.settle(decision, Times(together, apart, spared), region))

    def settle(self, decision: Decision, times: Times, region: Region, apart: tuple[Region, ...] = ()) -> Decision:
        """The decision on a region as measuring has it, if it is close. `apart`: the kernels without this region."""

        def question() -> tuple[Regions, Regions]:
            wanted = [d.buffer for d in self.stored(region.members)]
            given = {*self.stored((*region.members, *region.again))} & {*region.again}
            return self.parts.both_ways(region, apart, wanted, given)

        return self.close_calls.settle(decision, times, question)

    def _call(self, offer: Offer, members: tuple[Define, ...], own: float, apart: float, first: str, last: str) -> bool:
        """The library's attention in the place of a kernel that takes `own` microseconds, where it is faster by more
        than a little."""
        library = offer.with_rest(members, self.target)
        reason = (
            f"predicted {library:.1f} us by the library's attention, {own:.1f} us in one kernel, "
            f"{apart:.1f} us by the library's products and kernels around them"
        )
        cyclic = self.links.is_cyclic(offer.members, self.again(offer.members))
        accepted = library < CLOSE * min(own, apart) and not cyclic
        moved = 2 * sum(storage_bytes(d.buffer) for d in offer.members if d is not offer.result) if accepted else 0
        self.decisions.append(Decision(first, last, "library", accepted, reason, own - library, moved))
        if accepted:
            self.forget_unread(offer.members, self.again(offer.members))
            self.taken.update(offer.members)
            self.links.join(offer.members, ())
            self.elsewhere |= offer.reads
            self.calls |= dict.fromkeys(offer.members, offer.extern(reason))
            self.products = [s for s in self.products if s.contraction not in self.calls]
            self.cheap.clear()
            self.memories.clear()
            self.chains.clear()  # they end at what the library makes
        return accepted

    def answer(self, region: Region, decision: Decision) -> bool:
        """Keep a decision on a region; one that is accepted is a kernel."""
        stored = self.stored(region.members)
        moved = 2 * sum(storage_bytes(d.buffer) for d in region.members if d not in stored)
        self.decisions.append(replace(decision, bytes_saved=moved if decision.accepted else 0))
        if decision.accepted:
            self.taken.update(region.members)
            self.links.join(region.members, region.again)
            self.elsewhere |= {b for d in region.again for b in loaded(d.value)} - {d.buffer for d in region.again}
            self.forget_unread(region.members, region.again)
            self.regions.append(region)
        return decision.accepted

    def contracted(self, members: tuple[Define, ...], again: tuple[Define, ...]) -> Contraction | Refusal:
        """A region as one nest of products, or the nest of an equal one."""
        return self.nest(members, again).value

    def nest(self, members: tuple[Define, ...], again: tuple[Define, ...]) -> Answer[Contraction | Refusal]:
        """The same, and which buffers of it are those of this region."""
        return self.ask("nest", members, again, contract)

    def ask(
        self,
        about: Hashable,
        members: tuple[Define, ...],
        again: tuple[Define, ...],
        answer: Callable[[list[Store]], T],
    ) -> Answer[T]:
        """What is found of the stores of a region, or was found of those of an equal one."""
        stored, inside = self.stored(members), (*members, *again)

        def stores() -> list[Store]:
            inliner = Inliner({d.buffer: d for d in inside}, (d.buffer for d in stored), self.memo)
            return [Store(d.buffer, d.dimensions, inliner.value(d.buffer)) for d in stored]

        products = tuple(d.buffer in self.product_of for d in members)
        return self.answers.ask((about, products), inside, {*stored}, lambda: answer(stores()))

    def _done_anyway(self, members: tuple[Define, ...], kind: str) -> float:
        """Of the time without a kernel of the product: what the kernels that read its results do in passing."""
        own, ends = set(members), self.stored(members)
        outside = {d: self.readers_of(d) - own for d in ends}
        passed = [d for d in ends if any(r.buffer not in self.product_of for r in outside[d])]
        if kind != "product" or not passed or all(d.buffer in self.product_of for d in ends):
            return 0.0
        moved = 0
        for d in passed:
            read = any(r.buffer in self.product_of for r in outside[d])
            wanted = d.buffer in self.elsewhere or d.buffer in self.product_of or read
            moved += storage_bytes(d.buffer) * (1 if wanted else 2)  # not read by it, and not even written
        return self.target.launch_us + moved / self.target.memory_bytes_per_us

    def again(self, members: Iterable[Define], operands: bool = True) -> tuple[Define, ...]:
        """Cheap point-wise values that the members read: computed again here, back to what must be read.

        An operand that is not computed again is at least widened and repeated here; none is without `operands`.
        """
        own = set(members)
        found: dict[Define, None] = {}
        computes = operands and self.given_up(members) < OPERANDS
        for d, reader in {s: m for m in members for s in self.sources(m)}.items():
            made = d in own or (d in self.taken and bool(self.memory(d)))  # by another kernel, beside its products
            if made or not self.is_point_wise(d):
                continue
            operand = self.is_operand(d, own) and bool(self.memory(d))
            wanted = (computes or not operand) and (self.is_cheap(d) or self.is_unpacked_once(d, reader))
            again = self.chain(d) if wanted else self.moves(d) if operand else ()
            found |= dict.fromkeys(c for c in again if c not in own)
        return tuple(sorted(found, key=self.order.__getitem__))

    def ways_again(self, members: tuple[Define, ...]) -> Iterable[tuple[Define, ...]]:
        """What members compute again: all that is cheap; nothing that many positions share; no operands, which only
        grow; of the rest positions alone."""
        cheap, others = self.again(members), self.again(members, operands=False)
        moved = {c for d in cheap if self.is_operand(d, {*members}) for c in self.moves(d)}
        positions = tuple(d for d in cheap if d in moved or not self.memory(d))
        return dict.fromkeys((cheap, self.without_shared(cheap, members), others, positions))

    def given_up(self, members: Iterable[Define]) -> int:
        """What a kernel of some products must do without (`Limits`)."""
        return self.limits.given_up(d for d in members if d.buffer in self.product_of)

    def _note_packed(self, product: Define) -> None:
        """Say of a product why weights are unpacked before it."""
        for d in self.sources(product):
            if self.is_point_wise(d) and not self.is_cheap(d) and self.is_packed(d):
                tiles = -(-self.positions_beside(d, product) // UNPACKED_ROWS)
                reason = f"each of {tiles} tiles would compute {d.origin.node} again"
                self.decisions.append(Decision(d.origin.node, product.origin.node, "product", False, reason))

    def kernel(
        self,
        found: Sequence[Contraction],
        members: tuple[Define, ...],
        again: tuple[Define, ...],
        limit_us: float = math.inf,
    ) -> Chosen:
        """The fastest kernels of a region: how the first runs, and the time of each launch."""
        about = "kernel", len(found), bool(found[0].entering)
        return self.ask(about, members, again, lambda _: self.choose_products(found, self.target, limit_us)).value

    def kernel_us(self, defines: tuple[Define, ...]) -> float:
        """Predicted time of one kernel without products; without end where there is none."""
        chosen = self.ask("kernel", defines, (), lambda stores: self.choose(stores, self.target, 0.0)).value
        return math.inf if isinstance(chosen, Refusal) else total_us(chosen.times)

    def bound(self, c: Contraction) -> float:
        """A time that no kernel of the contraction beats: its bytes, and products of the tiles that masks leave."""
        values = opened(c.nest)
        products = 0.0
        for r in reductions(values):
            if (sides := operands(r)) is not None:
                products += numel((*r.axes, *r.over)) / multiply_rate(sides[0].dtype, self.target)
        buffers = {e.buffer for e in postorder(values) if isinstance(e, Load)} | {s.buffer for s in c.nest.stores}
        memory = sum(map(storage_bytes, buffers)) / self.target.memory_bytes_per_us
        again = len(passes(c)) if c.reduces_columns and not c.held else 1
        return self.target.launch_us + max(
            again * products * visited(c, MATRIX_ROWS) / self.target.rates.matrix, memory
        )

    def apart(self, members: tuple[Define, ...], again: tuple[Define, ...]) -> float:
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


def _is_short(define: Define) -> bool:
    """Whether a product's sums are short enough to be computed inside a sweep."""
    lengths = [a.extent.constant for r in reductions([define.value]) for a in r.over]
    return all(n is not None and n <= MOST_HELD for n in lengths)
