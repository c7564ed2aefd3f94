"""Values left between groups are computed again in their readers where that is cheaper than moving them.

The value takes along what it is made of, back to inputs, stored values and reductions; a reduction it needs is stored
instead, which is small. Both ways are priced and the cheaper one stays.
"""

from __future__ import annotations

from ..analysis.access import loads_bytes, storage_bytes
from ..analysis.inline import is_pointwise, loads_of
from ..analysis.reach import reached
from ..ir.plan import Decision
from ..ir.program import Buffer, Define
from .cost import Cost
from .priced_groups import PricedGroups

MOST_READERS = 4


def recompute(groups: PricedGroups) -> bool:
    """Try every value that travels only from one group to a few others, the latest first; whether any was."""
    graph, done = groups.graph, False
    for define in reversed(list(groups.program.defines())):
        number = graph.node_of.get(define.buffer)
        closed = number in groups.closed | groups.asked
        if closed or number not in graph.members or define not in graph.members[number]:
            continue
        users = sorted(u for u in graph.consumers.get(define.buffer, set()) if u != number)
        if define.buffer in graph.required:  # what is made of positions alone may be stored and computed again
            users = (
                [u for u in users if u in graph.members] if not _read(groups, _chain(groups, define, number)) else []
            )
        if not users or len(users) > MOST_READERS or any(u not in graph.members or u in groups.closed for u in users):
            continue
        if is_pointwise(define.value):
            done |= _try(groups, define, number, users)
    return done


def _chain(groups: PricedGroups, define: Define, number: int) -> list[Define]:
    """The define and what it is made of inside its group, as far as nothing of it is stored or reduced."""
    graph = groups.graph
    own = {d.buffer: d for d in graph.members[number]}
    stored = {d.buffer for d in graph.stored(graph.members[number], frozenset((number,)))}
    free = {b: d for b, d in own.items() if b not in stored and is_pointwise(d.value)}
    chain = reached([define], lambda d: (free[b] for b in graph.reads[d] if b in free))
    return sorted(chain, key=graph.order)


def _read(groups: PricedGroups, chain: list[Define]) -> set[Buffer]:
    """What a chain reads from memory."""
    return {b for d in chain for b in groups.graph.reads[d]} - {d.buffer for d in chain}


def _try(groups: PricedGroups, define: Define, number: int, users: list[int]) -> bool:
    graph = groups.graph
    chain = _chain(groups, define, number)
    before = [cost for n in (number, *users) if (cost := groups.cost(n)) is not None]
    crowded = any(len(graph.members[u]) + len(chain) > groups.most_members(number, u) for u in users)
    if crowded or len(before) <= len(users):
        return False
    reader = graph.members[users[0]][-1].origin.node
    if (moved := _most_saved(groups, define, number, chain, users)) is not None and moved <= 0:
        reason = f"computed again in {len(users)} kernels: {-moved} bytes more"
        groups.decisions.append(Decision(define.origin.node, reader, "recompute", False, reason, 0.0, moved))
        return False
    undo_members = {u: graph.members[u] for u in users}
    touched = {b for d in chain for b in (d.buffer, *graph.reads[d])}
    undo_consumers = {b: set(graph.consumers.get(b, ())) for b in touched}
    _absorb(groups, define, chain, users)
    priced = [groups.price(graph.members[n], frozenset((n,))) for n in (number, *users)]
    after = [cost for cost in priced if isinstance(cost, Cost)]
    gain, moved = 0.0, 0
    if possible := len(after) == len(priced):
        gain = sum(old.time_us - new.time_us for old, new in zip(before, after, strict=True))
        moved = sum(old.moved - new.moved for old, new in zip(before, after, strict=True))
    accepted = gain > 0
    if possible:
        reason = (
            f"computed again in {len(users)} kernels: {moved} bytes fewer"
            if accepted
            else f"recomputing would cost {-gain:.1f} us"
        )
        groups.decisions.append(Decision(define.origin.node, reader, "recompute", accepted, reason, gain, moved))
    if not accepted:
        graph.members.update(undo_members)
        graph.consumers.update(undo_consumers)
        return False
    groups.costs.update(zip((number, *users), after, strict=True))
    for u in users:
        graph.renew_edges(u)
    if not graph.stored(graph.members[number], frozenset((number,))):
        graph.remove(number)
    return True


def _most_saved(groups: PricedGroups, define: Define, number: int, chain: list[Define], users: list[int]) -> int | None:
    """How many bytes fewer could travel at most; None where the group that has the value now would disappear."""
    graph = groups.graph
    members, made = graph.members[number], {d.buffer for d in chain}
    required = define.buffer in graph.required
    if graph.stored(members, frozenset((number,))) == [define] and not required:
        return None
    needed = {b: _bytes(chain, b) for d in chain for b in graph.reads[d] if b not in made}
    saved = 0 if required else storage_bytes(define.buffer)
    for u in users:
        known = {b for d in graph.members[u] for b in (d.buffer, *graph.reads[d])}
        saved += _bytes(graph.members[u], define.buffer) - sum(n for b, n in needed.items() if b not in known)
    if not any(define.buffer in graph.reads[d] for d in members):
        elsewhere = {b for d in members if d not in chain for b in graph.reads[d]}
        saved += sum(n for b, n in needed.items() if b not in elsewhere)
    return saved


def _bytes(defines: list[Define], buffer: Buffer) -> int:
    """Bytes of a buffer that definitions read."""
    return loads_bytes(e for d in defines for e in loads_of([d.value]).get(buffer, ()))


def _absorb(groups: PricedGroups, define: Define, chain: list[Define], users: list[int]) -> None:
    """The readers compute the chain themselves: they read what it reads, and no longer its result."""
    graph = groups.graph
    made: set[Buffer] = {d.buffer for d in chain}
    graph.consumers[define.buffer].difference_update(users)
    for u in users:
        new = [d for d in chain if d not in graph.members[u]]
        graph.members[u] = sorted([*new, *graph.members[u]], key=graph.order)
        for buffer in {b for d in chain for b in graph.reads[d]} - made:
            graph.consumers.setdefault(buffer, set()).add(u)
