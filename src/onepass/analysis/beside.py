"""Groups whose matrix products stand side by side: each store with those it shares reductions with, on its own."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Reduce
from ..ir.plan import Store
from .contraction import Contraction, contract
from .inline import reductions
from .nest import Refusal


def contract_each(stores: Iterable[Store]) -> list[Contraction] | Refusal:
    """The contractions of a group, in the order of their first stores, or why one of them has no program."""
    found: list[Contraction] = []
    for part in _apart(stores):
        contraction = contract(part)
        if isinstance(contraction, Refusal):
            return contraction
        found.append(contraction)
    return found


def _apart(stores: Iterable[Store]) -> list[list[Store]]:
    """Stores in parts that share no reduction."""
    parts: list[tuple[list[Store], set[Reduce]]] = []
    for store in stores:
        own = ([store], set(reductions([store.value])))
        meeting = [p for p in parts if p[1] & own[1]]
        parts = [p for p in parts if p not in meeting]
        for members, reduces in reversed(meeting):
            own = ([*members, *own[0]], reduces | own[1])
        parts.append(own)
    return [members for members, _ in parts]
