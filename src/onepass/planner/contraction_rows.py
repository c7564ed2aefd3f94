"""Matrix products whose rows are reduced: what joins such a region, and whether one kernel of it pays.

From a product on, every reader joins that keeps its rows apart: point-wise work, reductions of its columns, a value
picked from every row, and what is made of these. The predicted time decides, and the answer says what it is made of.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from ..analysis.access import estimate, numel, storage_bytes
from ..analysis.inline import loaded, reductions
from ..analysis.nest import Refusal, opened
from ..analysis.operands import operands
from ..analysis.passes import passes
from ..analysis.row_rates import product_time
from ..analysis.rows import RowContraction, contract_rows
from ..ir.expr import Expr, Load, Pointwise, Reduce, postorder
from ..ir.limits import FOLLOWERS
from ..ir.monoids import MONOIDS
from ..ir.ops import OPS
from ..ir.plan import Decision, Store
from ..ir.program import Buffer, Define, Extern
from ..ir.target import Target
from .close_calls import Times
from .cost import predict_us
from .regions import Region

if TYPE_CHECKING:
    from .contractions import Chooser

SWEPT_MEMORY = 0.85  # of the bandwidth, where a pipeline starts again for every tile of columns
MOST_MEMBERS, MOST_SEEN = 48, 256


def try_rows(chooser: Chooser, extern: Extern) -> None:
    """One product with reductions of its rows, and what else keeps rows apart."""
    product = extern.contraction
    if product is None or product in chooser.taken or chooser.given_up([product]) >= FOLLOWERS:
        return
    for members, again in _choices(chooser, product):
        if _try(chooser, members, again, product):
            return


def row_time(chooser: Chooser, product: Define) -> float:
    """The least predicted time of one kernel that reduces a product's rows; without end where there is none."""
    rate = chooser.rate([product.value])
    found = [_priced(chooser, members, again, rate) for members, again in _choices(chooser, product)]
    return min((p[0] for p in found if not isinstance(p, Refusal)), default=math.inf)


# --- the region ---


class Followers:
    """Definitions that read a product, or what was added since: each once, in the program's order."""

    def __init__(self, chooser: Chooser, product: Define) -> None:
        self.chooser = chooser
        self.seen: set[Define] = set()
        self._waiting: list[tuple[int, Define]] = []
        self.add(product)

    def add(self, define: Define) -> None:
        """Its readers follow, too."""
        for d in self.chooser.readers.get(define.buffer, ()):
            if d not in self.seen:
                self.seen.add(d)
                heapq.heappush(self._waiting, (self.chooser.order[d], d))

    def __iter__(self) -> Iterator[Define]:
        while self._waiting:
            yield heapq.heappop(self._waiting)[1]


def _region(chooser: Chooser, product: Define, column: int) -> tuple[Define, ...]:
    """The product and all that follows from its rows, in order; () if nothing reduces them."""
    columns: dict[Buffer, int | None] = {product.buffer: column}  # which dimension is the columns; None: none is
    members, reduces = {product: None}, False
    rows = numel(product.axes) // max(1, estimate(product.dimensions[column].extent))
    followers = Followers(chooser, product)
    for d in followers:
        if len(members) >= MOST_MEMBERS:
            break
        if d in chooser.taken or d.buffer in chooser.product_of or waits(chooser, d, columns.keys()):
            continue
        kind = _kind(d, columns, rows)
        if kind is None:
            continue
        columns[d.buffer] = kind if kind >= 0 else None
        members[d] = None
        reduces |= bool(reductions([d.value])) and kind < 0
        followers.add(d)
    return tuple(members) if reduces else ()


def waits(chooser: Chooser, define: Define, region: Collection[Buffer]) -> bool:
    """Whether a value needs something from outside that itself needs the region: they cannot be one kernel."""
    links = chooser.links
    inside = links.makers(region)
    return links.waits(links.makers(loaded(define.value)) - inside, inside, MOST_SEEN)


def joined(chooser: Chooser, members: tuple[Define, ...], product: Define) -> tuple[Define, ...]:
    """The members, and other products of that size with point-wise work on them that only the members read."""
    found, size = set(members), numel(product.axes)
    waiting = [s for m in members for s in chooser.sources(m)]
    while waiting and len(found) < MOST_MEMBERS:
        d = waiting.pop()
        reduces = d.buffer not in chooser.product_of and reductions([d.value])
        if d in found or d in chooser.taken or reduces or numel(d.axes) != size or not chooser.only_for(d, found):
            continue
        if waits(chooser, d, {m.buffer for m in found}):
            continue
        found.add(d)
        waiting += chooser.sources(d)
    return tuple(sorted(found, key=chooser.order.__getitem__))


def _kind(define: Define, columns: dict[Buffer, int | None], rows: int) -> int | None:
    """Which dimension of a value made of rows is their columns; -1: it has none; None: it mixes rows."""
    over = {a for r in reductions([define.value]) for a in r.over}
    places = list(define.dimensions)
    found: set[int] = set()
    for e in postorder([define.value]):
        column = columns.get(e.buffer) if isinstance(e, Load) else None
        if not isinstance(e, Load) or column is None:
            continue
        at = e.index[column]
        if at.axis is not None and at.axis in places and at.axis not in over:
            found.add(places.index(at.axis))
        elif at.axis is not None and over == {at.axis}:
            found.add(-1)
        elif at.axes & over or (at.axes and not at.indirects()):
            return None
        else:  # picked from every row
            found.add(-1)
    if len(found) > 1 and -1 in found and over:
        return None
    kind = max(found, default=-1)
    if kind < 0:
        made = not over or found == {-1}
        return -1 if made and numel(define.axes) <= rows else None
    return None if over or len(found - {-1}) > 1 else kind


def _choices(chooser: Chooser, product: Define) -> Iterator[tuple[tuple[Define, ...], tuple[Define, ...]]]:
    """Members of one kernel, with what they read computed again; else with less of it."""
    for column in (-1, -2):
        following = _region(chooser, product, len(product.dimensions) + column)
        for members in dict.fromkeys((joined(chooser, following, product), following)) if following else ():
            cheap = chooser.again(members)
            placed = tuple(d for d in cheap if not chooser.memory(d))
            for again in dict.fromkeys((cheap, placed)):
                yield members, again


def _priced(
    chooser: Chooser, members: tuple[Define, ...], again: tuple[Define, ...], rate: float
) -> tuple[float, str] | Refusal:
    """Predicted time of one kernel, and what it is made of; or why there is none."""

    def price(stores: list[Store]) -> tuple[float, str] | Refusal:
        found = contract_rows(stores)
        return found if isinstance(found, Refusal) else _together(found, rate, chooser.target)

    return chooser.ask(("rows", rate), members, again, price).value


def _try(chooser: Chooser, members: tuple[Define, ...], again: tuple[Define, ...], product: Define) -> bool:
    rate, last = chooser.rate([product.value]), members[-1].origin.node
    found = _priced(chooser, members, again, rate)
    if isinstance(found, Refusal):
        chooser.decisions.append(Decision(product.origin.node, last, "rows", False, found.reason))
        return False
    (together, why), apart = found, _apart(chooser, members, rate)
    reason = f"predicted {together:.1f} us in one kernel ({why}), {apart:.1f} us by the library and one more"
    decision = Decision(product.origin.node, last, "rows", together < apart, reason, apart - together)
    region = Region(members, again, predicted_us=together)
    return chooser.answer(region, chooser.settle(decision, Times(together, apart), region))


# --- its time ---


def _together(c: RowContraction, rate: float, target: Target) -> tuple[float, str]:
    """Predicted time of one kernel, and what it is made of."""
    values = opened(c.nest)
    found = {r for r in reductions(values) if operands(r) is not None}
    units = {e for r in found for e in (r.inputs[0], *r.inputs[0].children)}
    times = 1 if c.held else len(passes(c))  # sweeps that multiply again
    products = product_time(c, rate, target)
    work = times * scalar_work(e for e in postorder(values) if e not in units and e not in found)
    reads = {e.buffer: storage_bytes(e.buffer) for e in postorder(values) if isinstance(e, Load)}
    moved = sum(reads.values()) + sum(storage_bytes(s.buffer) for s in c.nest.stores)
    memory = moved / (1.0 if c.held else SWEPT_MEMORY)
    unit, rest = times * products.time_us, predict_us(int(memory), work, products.launches, target)
    total = max(unit, rest) + 0.1 * min(unit, rest)
    swept = f", {times} times over" if times > 1 else ""
    why = f"products {unit:.1f} us at {100 * products.share:.0f} % of the library's rate{swept}, the rest {rest:.1f} us"
    return total, why


def scalar_work(nodes: Iterable[Expr]) -> float:
    """Scalar operations of point-wise values and reductions at all their points."""
    total = 0.0
    for e in nodes:
        if isinstance(e, Pointwise):
            total += OPS[e.op].cost * numel(e.axes)
        elif isinstance(e, Reduce):
            total += MONOIDS[e.monoid].cost * numel((*e.axes, *e.over))
    return total


def _apart(chooser: Chooser, members: tuple[Define, ...], rate: float) -> float:
    """Predicted time without a kernel of its own."""
    return sum(library_and_one(chooser, members, rate))


def library_and_one(chooser: Chooser, members: tuple[Define, ...], rate: float) -> tuple[float, float]:
    """Predicted time of the library's products, and of one kernel for all that follows."""
    target, total = chooser.target, 0.0
    products = [d for d in members if d.buffer in chooser.product_of]
    for d in products:
        multiplied = sum(numel((*r.axes, *r.over)) for r in reductions([d.value])) / rate
        moved = sum(map(storage_bytes, (d.buffer, *loaded(d.value))))
        total += target.launch_us + max(multiplied, moved / target.memory_bytes_per_us)
    others = [d for d in members if d not in products]
    made = {d.buffer for d in others}
    reads = dict.fromkeys(b for d in others for b in loaded(d.value) if b not in made)
    written = [d.buffer for d in chooser.stored(members) if d not in products]
    moved = sum(map(storage_bytes, (*reads, *written)))
    return total, predict_us(moved, sum(scalar_work(postorder([d.value])) for d in others), 1, target)
