"""Attention by the library: what it would take in the place of a kernel, and the call.

Only a region that is attention and nothing else has an offer (`analysis/library_attention.py`); point-wise work on its
result is then one kernel more. What is close to equal stays a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..analysis.access import storage_bytes
from ..analysis.contraction import contract
from ..analysis.inline import loaded
from ..analysis.library_attention import OTHER_SCORES, Attention, find_attention
from ..analysis.library_price import attention_us
from ..analysis.nest import Refusal
from ..ir.callables import attention
from ..ir.plan import Decision
from ..ir.program import Buffer, Define, Extern, Origin
from ..ir.target import Target
from .chooser import Chooser

CLOSE = 0.95  # of a kernel's time: the library must be below


@dataclass(frozen=True, slots=True)
class Offer:
    """A region as the library's attention, and the time of the call alone."""

    members: tuple[Define, ...]
    result: Define
    call: Attention
    time_us: float

    def with_rest(self, members: Sequence[Define], target: Target) -> float:
        """The time with what a larger region computes beyond it."""
        rest = [d for d in members if d not in self.members]
        if not rest:
            return self.time_us
        made = {d.buffer for d in rest}
        moved = {b for d in rest for b in loaded(d.value)} - made | {rest[-1].buffer}
        return self.time_us + target.launch_us + sum(map(storage_bytes, moved)) / target.memory_bytes_per_us

    def extern(self, reason: str) -> Extern:
        """The call in the program."""
        a, made = self.call, self.result
        numbers = (a.scale, a.causal, a.grouped, a.place, made.buffer.shape, made.buffer.strides)
        origin = Origin(made.origin.node, "aten.scaled_dot_product_attention.default", made.origin.line)
        return Extern(
            made.buffer, attention, (a.query, a.key, a.value, *numbers), {}, origin, reason, orders=made.orders
        )

    @property
    def reads(self) -> set[Buffer]:
        return {v.buffer for v in (self.call.query, self.call.key, self.call.value)}


def offered(chooser: Chooser, regions: Sequence[tuple[Define, ...]]) -> Offer | Refusal | None:
    """The library's call for the largest of some regions, each within the one before, that is attention alone.

    None: none of them could be a kernel, either.
    """
    refusal: Refusal | None = None
    for members in regions:
        nest = chooser.ask(contract, members, chooser.again(members), contract)
        if isinstance(nest.value, Refusal):
            continue
        call = find_attention(nest.value)
        if isinstance(call, Refusal):
            refusal = call
            if refusal.reason == OTHER_SCORES:
                break
            continue
        (result,) = chooser.stored(members)
        query, key, value = (replace(v, buffer=nest.own[v.buffer]) for v in (call.query, call.key, call.value))
        call = replace(call, query=query, key=key, value=value)
        return Offer(members, result, call, _time_us(call, storage_bytes(result.buffer), chooser.target))
    return refusal


def call(
    chooser: Chooser, offer: Offer, members: tuple[Define, ...], own: float, apart: float, names: tuple[str, str]
) -> bool:
    """The library's attention in the place of a kernel that takes `own` microseconds, where it is faster by more
    than a little."""
    library = offer.with_rest(members, chooser.target)
    reason = (
        f"predicted {library:.1f} us by the library's attention, {own:.1f} us in one kernel, "
        f"{apart:.1f} us by the library's products and kernels around them"
    )
    cyclic = chooser.links.is_cyclic(offer.members, chooser.again(offer.members))
    accepted = library < CLOSE * min(own, apart) and not cyclic
    moved = 2 * sum(storage_bytes(d.buffer) for d in offer.members if d is not offer.result) if accepted else 0
    chooser.decisions.append(Decision(*names, "library", accepted, reason, own - library, moved))
    if accepted:
        chooser.forget_unread(offer.members, chooser.again(offer.members))
        chooser.taken.update(offer.members)
        chooser.links.join(offer.members, ())
        chooser.elsewhere |= offer.reads
        chooser.calls |= dict.fromkeys(offer.members, offer.extern(reason))
        chooser.products = [s for s in chooser.products if s.contraction not in chooser.calls]
        chooser.cheap.clear()
        chooser.memories.clear()
        chooser.chains.clear()  # they end at what the library makes
    return accepted


def _time_us(call: Attention, result_bytes: int, target: Target) -> float:
    """Predicted time of the library's call, and of a copy where its result has another layout."""
    batches, heads, rows, depth = call.sizes
    copy = 0.0 if call.keeps_layout else target.launch_us + 2 * result_bytes / target.memory_bytes_per_us
    return attention_us(batches, heads, rows, call.keys, depth, call.causal, target) + copy
