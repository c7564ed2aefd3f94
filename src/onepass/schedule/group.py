"""`schedule_group`: a group becomes one kernel, or two where a reduction is split over programs (`split.py`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from ..analysis.access import numel
from ..analysis.contraction import Contraction
from ..analysis.contractions import contractions
from ..analysis.legality import ways
from ..analysis.nest import Nest, Refusal
from ..analysis.price import price, price_together
from ..errors import VerifyError
from ..ir.kernel import ScheduledGroup
from ..ir.plan import Chosen, Group, Shared, Store
from ..ir.program import Origin
from ..ir.schedule import Schedule
from ..ir.target import Target
from . import product_schedules
from .complete import completed
from .neighbours import STEPS, moved, moved_chunk, step_text
from .product_kernels import schedule_products
from .product_schedules import candidates
from .shared_launch import kinds, largest, like, unshared
from .split import chunk_size, scheduled_part, split, unfinished
from .walk import nest_kernel, ruled

T = TypeVar("T")
NEAR = 1.1  # times its bound, where no other way is looked for
SHORT_US, FAR_ABOVE = 8.0, 1.25  # a time like a launch's, and times a bound, up to which no neighbours are looked at
GAIN = 0.9  # of the time so far that a neighbour must be below
MOST_CANDIDATES = 6  # that are built for a group with products
PREFERRED = 0.95  # of the price of an earlier candidate that a later one must be below: the rules were measured, too
FAR = 1.15  # times the time without a kernel, where no other candidate is looked at


def schedule_group(group: Group, target: Target, name: str) -> ScheduledGroup:
    """The kernels of a group, in launch order, with everything decided that an emitter prints."""
    if group.products:
        contracted, schedules = _contracted(group, target)
        scheduled = schedule_products(contracted, target, name, group.origins, schedules)
    else:
        nests = _ways(group.stores, target)
        schedule = group.schedule or _ruled(nests[0], target, 0)
        scheduled = build(nests[schedule.way], target, name, group.origins, schedule)
    return replace(scheduled, kernels=tuple(map(completed, scheduled.kernels)))


def _ways(stores: tuple[Store, ...], target: Target) -> list[Nest]:
    return _possible(stores, ways(stores, target))


def _possible(stores: tuple[Store, ...], found: list[T] | Refusal) -> list[T]:
    """What was found of stores that were planned as a kernel."""
    if isinstance(found, Refusal):
        raise VerifyError(f"no kernel stores {', '.join(s.buffer.name for s in stores)}: {found.reason}")
    return found


def _contracted(group: Group, target: Target) -> tuple[list[Contraction], tuple[Schedule, ...]]:
    """The contractions of a group, each with its schedule."""
    assert group.schedule is not None
    found = _possible(group.stores, contractions(group.stores, group.schedule))
    schedules = group.schedule.shares or (group.schedule,)
    if not _fits(schedules, found):
        chosen = choose_products(found, target).schedule
        schedules = chosen.shares or (chosen,)
    return found, schedules


def _fits(schedules: Sequence[Schedule], found: Sequence[Contraction]) -> bool:
    """Whether schedules are of these contractions: other stores than were priced may have other axes."""
    if len(schedules) != len(found):
        return False
    pairs = zip(found, ({axis for axis, _ in s.axes} for s in schedules), strict=True)
    return all({c.rows, c.columns, c.swept} <= axes for c, axes in pairs)


# --- other schedules ---


def neighbours(group: Group, target: Target) -> dict[str, Schedule]:
    """Schedules beside the group's own, by how they differ from it, the most promising first."""
    assert group.schedule is not None
    found = {}
    if group.products:
        contracted, schedules = _contracted(group, target)
        pairs = list(zip(schedules, contracted, strict=True))
        for step in STEPS:
            found[step_text(*step)] = _shared([product_schedules.moved(s, c, target, *step) for s, c in pairs])
    else:
        nest = _ways(group.stores, target)[group.schedule.way]
        found = {step_text(*step): _moved(nest, target, group.schedule, *step) for step in STEPS}
    return {change: s for change, s in found.items() if s != group.schedule}


def _moved(nest: Nest, target: Target, schedule: Schedule, name: str, times: int) -> Schedule:
    if nest.split is not None:
        size = max(1, schedule.factor(nest.split).chunk)
        if name == "chunk" and (other := moved_chunk(size, nest.split, times)) != size:
            return _ruled(nest, target, schedule.way, other)
        nest = scheduled_part(nest, nest.split, size)
    return moved(schedule, nest, target, name, times) if target.warp else schedule


def _shared(schedules: Sequence[Schedule]) -> Schedule:
    """The schedule of contractions that share a launch."""
    return schedules[0] if len(schedules) == 1 else replace(schedules[0], shares=tuple(schedules))


def smaller(group: Group, target: Target, count: int) -> list[Schedule]:
    """The next schedules, each with fewer values per thread: for a group whose first kernel spilled registers."""
    found: list[Schedule] = []
    if group.products:
        contracted, schedules = _contracted(group, target)
        for _ in range(count):
            pairs = zip(schedules, contracted, strict=True)
            schedules = tuple(product_schedules.smaller(s, c, target) for s, c in pairs)
            found.append(_shared(schedules))
        return found
    way = group.schedule.way if group.schedule is not None else 0
    nest = _ways(group.stores, target)[way]
    for k in range(1, count + 1):
        held, each = target.held_elements >> (2 * k - 2), target.thread_elements >> (k + 1)
        less = replace(target, held_elements=held, thread_elements=each, registers=target.registers >> k)
        found.append(_ruled(nest, less, way))
    return found


# --- sharing a launch ---


def resembling(group: Group, target: Target, other: Schedule) -> Schedule:
    """The group's schedule with the tiles of another one of the same kind."""
    own = group.schedule
    assert own is not None
    if own.split is not None and other.split is not None:
        nest = _ways(group.stores, target)[own.way]
        assert nest.split is not None
        own = _ruled(nest, target, own.way, other.factor(other.split).chunk)
    return like(own, other)


def share(
    groups: Sequence[Group], target: Target, alone_us: Sequence[float], built: Callable[[Group], ScheduledGroup]
) -> Shared:
    """Groups in one launch, given their times alone.

    Those of one kind have the tiles of the largest; all have as many warps as the group that takes longest.
    """
    found: dict[Hashable, list[Schedule]] = {}
    for g in groups:
        assert g.schedule is not None
        found.setdefault(kinds(g.schedule), []).append(g.schedule)
    most = {kind: largest(same) for kind, same in found.items()}
    wanted = [replace(g, schedule=resembling(g, target, most[kinds(g.schedule)])) for g in groups if g.schedule]
    longest, _ = max(zip(wanted, alone_us, strict=True), key=lambda found: found[1])
    warps = longest.schedule.warps if longest.schedule is not None else 0
    wanted = [replace(g, schedule=replace(g.schedule, warps=warps)) for g in wanted if g.schedule is not None]
    kernels = [built(g).kernels for g in wanted]
    if (reason := unshared([k for own in kernels for k in own], target)) is not None:
        return Shared(refusal=reason)
    steps = [[own[n] for own in kernels if len(own) > n] for n in range(max(map(len, kernels)))]
    launches = sum(map(len, kernels)) - len(steps)
    us = sum(alone_us) - launches * target.launch_us
    if target.warp:
        us = sum(price_together(each, target).total_us for each in steps)
    return Shared(tuple(wanted), us)


# --- the best one ---


def choose(stores: Iterable[Store], target: Target, bound_us: float, others: bool = False) -> Chosen | Refusal:
    """How stores run best as one kernel: every way is built and priced, unless one comes near `bound_us`.

    `others`: neighbours of the best, too, as long as one of them is faster.
    """
    stores = tuple(stores)
    found = ways(stores, target)
    if isinstance(found, Refusal):
        return found
    each = (_priced(stores, target, schedule) for schedule in _candidates(found, target))
    best = _first_best(each, 1.0, lambda time_us: time_us <= NEAR * bound_us)
    while others and best.time_us > max(FAR_ABOVE * bound_us, SHORT_US):
        beside = neighbours(Group(stores, (), best.schedule), target)
        priced = [_priced(stores, target, s) for change, s in beside.items() if "stages" not in change]
        fastest = min(priced, key=lambda c: c.time_us, default=best)
        if fastest.time_us >= GAIN * best.time_us:
            break
        best = fastest
    return best


def choose_products(found: Sequence[Contraction], target: Target, limit_us: float = math.inf) -> Chosen:
    """How kernels with products run best: candidates are built and priced, until one is far above `limit_us`.

    Several contractions have nothing in common but their launch.
    """
    sizes = [numel(c.nest.stores[0].domain) for c in found]
    sides = [candidates(c, target, sum(sizes) - own) for c, own in zip(found, sizes, strict=True)]

    def priced() -> Iterator[Chosen]:
        for schedules in itertools.islice(itertools.zip_longest(*sides), MOST_CANDIDATES):
            own = [s or side[-1] for s, side in zip(schedules, sides, strict=True)]
            yield _chosen(schedule_products(found, target, "k", (), own), target)

    return _first_best(priced(), PREFERRED, lambda time_us: time_us > FAR * limit_us)


def _first_best(found: Iterable[Chosen], preferred: float, ends: Callable[[float], bool]) -> Chosen:
    """The fastest, up to the first best time that `ends` the search; a later one must be below that part of it."""
    best: Chosen | None = None
    for chosen in found:
        if best is None or chosen.time_us < preferred * best.time_us:
            best = chosen
        if ends(best.time_us):
            break
    assert best is not None
    return best


@lru_cache(maxsize=512)
def _priced(stores: tuple[Store, ...], target: Target, schedule: Schedule) -> Chosen:
    """One way to run stores, built for its price."""
    return _chosen(build(_ways(stores, target)[schedule.way], target, "k", (), schedule), target)


def _chosen(built: ScheduledGroup, target: Target) -> Chosen:
    return Chosen(built.main.schedule, tuple(price(k, target) for k in built.kernels))


def _candidates(found: list[Nest], target: Target) -> Iterator[Schedule]:
    """Ways to number programs; of a split over rows, too, a program for each row."""
    for way, nest in enumerate(found):
        yield _ruled(nest, target, way)
        inner = {*nest.classes} - {*nest.outer, nest.split}
        if nest.split is None or not inner or not target.warp or nest.scans:
            continue
        if not any(map(nest.carried, unfinished(nest, nest.split))):
            yield _ruled(nest, target, way, 1)


def _ruled(nest: Nest, target: Target, way: int, chunk: int = 0) -> Schedule:
    """How the first kernel of a nest runs as the rules of the target say. `chunk`: of its split; 0: as they say."""
    if nest.split is not None:
        chunk = chunk or chunk_size(nest, nest.split, target)
        nest = scheduled_part(nest, nest.split, chunk)
    return replace(ruled(nest, target, chunk), way=way)


def build(nest: Nest, target: Target, name: str, origins: tuple[Origin, ...], schedule: Schedule) -> ScheduledGroup:
    """The kernels of a nest. `schedule`: of the first of them."""
    if nest.split is None:
        return ScheduledGroup((nest_kernel(nest, target, name, origins, schedule),))
    return split(nest, nest.split, origins, target, name, schedule)
