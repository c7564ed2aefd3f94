"""The roles of classes in a group with matrix products, or why the group has no program."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Reduce
from ..ir.plan import Store
from ..ir.schedule import Schedule
from .contraction import Contraction
from .inline import reductions
from .nest import Refusal
from .rows import arrange
from .tile_states import contract_tiles


def contractions(stores: Iterable[Store], schedule: Schedule) -> list[Contraction] | Refusal:
    """The contractions of a group that runs by a schedule of theirs."""
    if schedule.shares:
        return side_by_side(stores)
    found = contract_tiles(stores) if schedule.states else arrange(stores)
    return found if isinstance(found, Refusal) else [found]


def side_by_side(stores: Iterable[Store]) -> list[Contraction] | Refusal:
    """Contractions that only share a launch, in the order of their first stores."""
    found: list[Contraction] = []
    for part in _apart(stores):
        contraction = arrange(part)
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
