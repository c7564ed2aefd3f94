"""`schedule_group`: a group becomes one kernel, or two where a reduction is split over programs (`split.py`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from ..analysis.access import numel
from ..analysis.contraction import Contraction
from ..analysis.contractions import contractions
from ..analysis.legality import ways
from ..analysis.nest import Nest, Refusal
from ..analysis.price import price
from ..errors import VerifyError
from ..ir.choice import AS_RULED, FIRST, Adjustment, Choice
from ..ir.kernel import ScheduledGroup
from ..ir.plan import Chosen, Group, Store
from ..ir.program import Origin
from ..ir.schedule import Schedule
from ..ir.target import Target
from .complete import completed
from .product_kernels import schedule_products
from .product_schedules import candidates, scheduled
from .split import split, unfinished
from .walk import nest_kernel

NEAR = 1.1  # times its bound, where no other way is looked for
SHORT_US, FAR_ABOVE = 8.0, 1.25  # a time like a launch's, and times a bound, up to which no neighbours are looked at
GAIN = 0.9  # of the time so far that a neighbour must be below
MOST_CANDIDATES = 6  # that are built for a group with products
PREFERRED = 0.95  # of the price of an earlier candidate that a later one must be below: the rules were measured, too
FAR = 1.15  # times the time without a kernel, where no other candidate is looked at


def schedule_group(group: Group, target: Target, name: str, choice: Choice = FIRST) -> ScheduledGroup:
    """The kernels of a group, in launch order, with everything decided that an emitter prints."""
    scheduled = _scheduled(group, target, name, choice)
    return replace(scheduled, kernels=tuple(map(completed, scheduled.kernels)))


def _scheduled(group: Group, target: Target, name: str, choice: Choice) -> ScheduledGroup:
    """The kernels as their scheduler leaves them.

    Later candidates keep fewer values per thread: for a group whose first kernel spilled registers. What finishes
    a split is never adjusted.
    """
    if group.products:
        return _with_products(group, target, name, choice)
    found = ways(group.stores, target)
    if isinstance(found, Refusal):
        raise VerifyError(f"group {name} cannot be scheduled: {found.reason}")
    schedule = group.schedule
    if choice.candidate:
        schedule = None
        held = target.held_elements >> (2 * choice.candidate - 2)
        each = target.thread_elements >> (choice.candidate + 1)
        registers = target.registers >> choice.candidate
        target = replace(target, held_elements=held, thread_elements=each, registers=registers)
    nest = found[group.schedule.way if group.schedule is not None else 0]
    return build(nest, target, name, group.origins, choice.adjustment, schedule)


def _with_products(group: Group, target: Target, name: str, choice: Choice) -> ScheduledGroup:
    assert group.schedule is not None
    found = contractions(group.stores, group.schedule)
    if isinstance(found, Refusal):
        raise VerifyError(f"group {name} cannot be scheduled: {found.reason}")
    planned = group.schedule
    if not _fits(planned.shares or (planned,), found):
        planned = choose_products(found, target).schedule
    schedules = planned.shares or (planned,)
    tiles = [scheduled(c, target, choice, s, n) for c, s, n in zip(found, schedules, _others(found), strict=True)]
    return schedule_products(found, target, name, group.origins, tiles)


def _fits(schedules: Sequence[Schedule], found: Sequence[Contraction]) -> bool:
    """Whether schedules are of these contractions: other stores than were priced may have other axes."""
    if len(schedules) != len(found):
        return False
    pairs = zip(found, ({axis for axis, _ in s.axes} for s in schedules), strict=True)
    return all({c.rows, c.columns, c.swept} <= axes for c, axes in pairs)


def _others(contractions: Sequence[Contraction]) -> list[int]:
    """For each of them the elements of the other results."""
    sizes = [numel(c.nest.stores[0].domain) for c in contractions]
    return [sum(sizes) - size for size in sizes]


def choose(stores: Iterable[Store], target: Target, bound_us: float, neighbours: bool = False) -> Chosen | Refusal:
    """How stores run best as one kernel: every way is built and priced, unless one comes near `bound_us`.

    `neighbours`: other sizes of its tiles, too, as long as one of them is faster.
    """
    stores = tuple(stores)
    found = ways(stores, target)
    if isinstance(found, Refusal):
        return found
    best: Chosen | None = None
    for way, each in _candidates(found, target):
        chosen = _priced(stores, target, way, each, AS_RULED)
        if best is None or chosen.time_us < best.time_us:
            best, like = chosen, (way, each)
        if best.time_us <= NEAR * bound_us:
            return best
    assert best is not None
    adjustment = AS_RULED
    while neighbours and best.time_us > max(FAR_ABOVE * bound_us, SHORT_US):
        others = [(_priced(stores, target, *like, a), a) for a in adjustment.neighbours() if not a.stages]
        fastest, moved = min(others, key=lambda o: o[0].time_us)
        if fastest.time_us >= GAIN * best.time_us:
            break
        best, adjustment = fastest, moved
    return best


@lru_cache(maxsize=512)
def _priced(stores: tuple[Store, ...], target: Target, way: int, each: bool, adjustment: Adjustment) -> Chosen:
    """One way to run stores, built for its price."""
    found = ways(stores, target)
    assert not isinstance(found, Refusal)
    built = build(found[way], target, "k", (), adjustment, each=each)
    schedule = replace(built.kernels[0].schedule, way=way)
    return Chosen(schedule, tuple(price(k, target) for k in built.kernels))


def _candidates(found: list[Nest], target: Target) -> Iterator[tuple[int, bool]]:
    """Ways to number programs; of a split over rows, too, a program for each row."""
    for way, nest in enumerate(found):
        yield way, False
        inner = [c for c in nest.classes if c not in nest.outer and c is not nest.split]
        if (
            nest.split is not None
            and inner
            and target.warp
            and not any(map(nest.carried, unfinished(nest, nest.split)))
        ):
            yield way, True


def choose_products(found: Sequence[Contraction], target: Target, limit_us: float = math.inf) -> Chosen:
    """How kernels with products run best: candidates are built and priced, until one is far above `limit_us`.

    Several contractions have nothing in common but their launch.
    """
    sides = [candidates(c, target, n) for c, n in zip(found, _others(found), strict=True)]
    best: Chosen | None = None
    for tiles in itertools.islice(itertools.zip_longest(*sides), MOST_CANDIDATES):
        own = [t or side[-1] for t, side in zip(tiles, sides, strict=True)]
        kernels = schedule_products(found, target, "k", (), own).kernels
        chosen = Chosen(kernels[0].schedule, tuple(price(k, target) for k in kernels))
        if best is None or chosen.time_us < PREFERRED * best.time_us:
            best = chosen
        if best.time_us > FAR * limit_us:
            break
    assert best is not None
    return best


def build(
    nest: Nest,
    target: Target,
    name: str,
    origins: tuple[Origin, ...],
    adjustment: Adjustment = AS_RULED,
    schedule: Schedule | None = None,
    each: bool = False,
) -> ScheduledGroup:
    """The kernels of a nest. `schedule`: of the first of them, else the rules of the target say; adjusted.

    `each`: every position of a split has a program.
    """
    if nest.split is None:
        return ScheduledGroup((nest_kernel(nest, target, name, origins, schedule, adjustment=adjustment),))
    return split(nest, nest.split, origins, target, name, adjustment, schedule, each)
