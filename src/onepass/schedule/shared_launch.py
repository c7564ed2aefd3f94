"""Kernels that share nothing but a launch become one: ranges of one grid, each with its own grid and body.

Kernels with equal bodies are one range (`one_body.py`): its programs find their part in a table. A launch has as many
warps as the kernel with most, and each of its programs the registers of the largest body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..ir.kernel import GridAxis, Kernel, ScheduledGroup, Share, StoreElement, walk
from ..ir.poly import Axis, Poly
from ..ir.program import Origin
from ..ir.schedule import Factor, Schedule
from ..ir.target import Target
from .complete import entry_name
from .one_body import Different, alike, one_body

MOST_SIZES = 16  # of a launch: more are arguments that nobody would read
# Parts of a GPU's launch up to which each has a body of its own, as its arguments are few: a table is copied there.
FEW_PARTS, MOST_POINTERS = 4, 48
_NAME = re.compile(r"_(?:partial|chain|finish\d*|visits\d+_\d+)$")


def share_launch(groups: Sequence[ScheduledGroup]) -> ScheduledGroup:
    """The kernels of groups that do not wait for each other: first their first ones, then what finishes those."""
    steps = max(len(g.kernels) for g in groups)
    kernels = [_shared([g.kernels[k] for g in groups if len(g.kernels) > k]) for k in range(steps)]
    name = _NAME.sub("", groups[0].kernels[0].name)
    named = tuple(replace(k, name=f"{name}{''.join(_NAME.findall(k.name))}") for k in kernels)
    return ScheduledGroup(named, tuple(b for g in groups for b in g.workspace))


def _shared(kernels: list[Kernel]) -> Kernel:
    """Several kernels, with all decided that an emitter prints, as one launch."""
    if len(kernels) == 1:
        return kernels[0]
    shares: list[Share] = []
    found = classes(kernels)
    few = FEW_PARTS if sum(len(k.parameters) for same in found for k in same[:FEW_PARTS]) <= MOST_POINTERS else 1
    for same in found:
        shares += _ranges(same, shares[-1].end if shares else Poly.ZERO, few if kernels[0].warps else 1)
    whole = _launch(kernels, _with_tables(shares))
    return replace(
        whole,
        entry=entry_name(walk(whole.body)),
        warps=max(k.warps for k in kernels),
        stages=max(k.stages for k in kernels),
        raises=any(k.raises for k in kernels),
        denormals=any(k.denormals for k in kernels),
        asserts=any(k.asserts for k in kernels),
        multiples=(),
        like=None,
    )


def unshared(kernels: Sequence[Kernel], target: Target) -> str | None:
    """Why kernels do not share a launch; None if they may."""
    if any(k.numbers for k in kernels if k.warps):
        return "a kernel is handed numbers of another device"
    if any(isinstance(s, StoreElement) and s.staged is not None for k in kernels for s in walk(k.body)):
        return "results of a kernel go past the caches"
    if len({s for k in kernels for s in k.symbols}) > MOST_SIZES:
        return f"more than {MOST_SIZES} sizes that are known at run time"
    bodies = [same[0] for same in classes(kernels)]
    if (count := sum(len(walk(k.body)) for k in bodies)) > target.operations_per_kernel:
        return f"{count} operations in {len(bodies)} bodies, limit {target.operations_per_kernel}"
    return None


def classes(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels that have one body, each class in their order."""
    found: list[list[Kernel]] = []
    for k in kernels:
        same = next((c for c in found if alike(c[0], k)), None)
        if same is None:
            found.append([k])
        else:
            same.append(k)
    return found


def _ranges(kernels: list[Kernel], first: Poly, few: int) -> Iterator[Share]:
    """The programs of kernels with equal bodies, of which a `few` have one each."""
    if len(kernels) > few:
        try:
            yield one_body(kernels, first)
            return
        except Different:
            pass
    for k in kernels:
        share = Share(first, k.grid, k.body, k.flat, k.locals)
        yield share
        first = share.end


def _with_tables(shares: list[Share]) -> list[Share]:
    """Every part's words have a place in the launch's table: addresses first."""
    at = 0
    tables = [s.parts for s in shares]
    for k, parts in enumerate(tables):
        if parts is not None:
            tables[k] = replace(parts, buffers_at=at)
            at += parts.count * len(parts.buffers)
    for k, parts in enumerate(tables):
        if parts is not None:
            tables[k] = replace(parts, numbers_at=at)
            at += parts.count * (1 + len(parts.numbers))
    return [replace(s, parts=parts) for s, parts in zip(shares, tables, strict=True)]


def joined(kernels: Sequence[Kernel]) -> Kernel:
    """The kernels as one launch; their names differ, and they agree on warps and stages."""
    shares: list[Share] = []
    for k in kernels:
        shares.append(Share(shares[-1].end if shares else Poly.ZERO, k.grid, k.body, k.flat))
    return replace(_launch(kernels, shares), locals=tuple(local for k in kernels for local in k.locals))


def _launch(kernels: Sequence[Kernel], shares: list[Share]) -> Kernel:
    total = shares[-1].end
    return replace(
        kernels[0],
        reads=tuple(dict.fromkeys(b for k in kernels for b in k.reads)),
        writes=tuple(dict.fromkeys(b for k in kernels for b in k.writes)),
        symbols=tuple(dict.fromkeys(s for k in kernels for s in k.symbols)),
        grid=(GridAxis(Axis("program", total), total),),
        body=tuple(shares),
        locals=(),
        origins=_origins(kernels),
        schedule=replace(kernels[0].schedule, shares=tuple(k.schedule for k in kernels)),
        work=sum((k.work for k in kernels[1:]), kernels[0].work),
        descriptors=tuple(dict.fromkeys(d for k in kernels for d in k.descriptors)),
        wide=any(k.wide for k in kernels),
        flat=False,
        streams=any(k.streams for k in kernels) and all(k.streams for k in kernels if k.descriptors),
    )


def _origins(kernels: Sequence[Kernel]) -> tuple[Origin, ...]:
    """The operations of kernels; of those that do the same the first one's."""
    alike: dict[tuple[tuple[str, str], ...], Kernel] = {}
    for k in kernels:
        alike.setdefault(tuple((o.op, o.line) for o in k.origins), k)
    return tuple(dict.fromkeys(o for k in alike.values() for o in k.origins))


# --- schedules of kernels that are to have one body ---


def largest(schedules: Sequence[Schedule]) -> Schedule:
    """The schedule with the most lanes in a tile of those that have the same kinds of axes."""
    return max(
        schedules, key=lambda s: (s.warps, sum(f.tile * f.turns for _, f in s.axes), sum(f.chunk for _, f in s.axes))
    )


def kinds(schedule: Schedule) -> tuple[object, ...]:
    """How axes run, sizes of tiles left out: kernels with equal kinds may have one schedule."""
    places = {axis: k for k, (axis, _) in enumerate(schedule.axes)}
    order = tuple(places[a] for a in schedule.order)
    split = None if schedule.split is None else places[schedule.split]
    return (
        tuple((f.grid, f.loop, f.role, f.tile > 1, f.chunk > 0) for _, f in schedule.axes),
        order,
        split,
        schedule.way,
    )


def like(schedule: Schedule, other: Schedule) -> Schedule:
    """A schedule with the tiles of another one of equal kinds."""
    axes = tuple((a, _fitted(f, o)) for (a, f), (_, o) in zip(schedule.axes, other.axes, strict=True))
    return replace(other, axes=axes, order=schedule.order, split=schedule.split)


def _fitted(own: Factor, other: Factor) -> Factor:
    return replace(other, turns=own.turns) if not (other.loop or other.grid) else other
