"""Kernels that share a launch: a program's number says whose it is.

Programs that stay take the tiles of one kernel after another, without a gap: the last, half empty round of one is
filled by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..analysis.access import numel
from ..analysis.contraction import Contraction
from ..ir.choice import Choice
from ..ir.kernel import GridAxis, Kernel, ScheduledGroup, Share
from ..ir.poly import Axis, Poly
from ..ir.program import Origin
from ..ir.target import Target
from .contractions import ContractionScheduler


def schedule_beside(
    contractions: Sequence[Contraction], target: Target, name: str, origins: tuple[Origin, ...], choice: Choice
) -> ScheduledGroup:
    """One kernel of several that have nothing in common but their launch."""
    sizes = [numel(c.nest.stores[0].domain) for c in contractions]
    schedulers: list[ContractionScheduler] = []
    for c, size in zip(contractions, sizes, strict=True):
        company = schedulers[0] if schedulers else None
        schedulers.append(ContractionScheduler(c, target, choice, company=company, others=sum(sizes) - size))
    _agree(schedulers)
    return ScheduledGroup((joined([s.build(name, origins) for s in schedulers]),))


def _agree(schedulers: Sequence[ContractionScheduler]) -> None:
    """What a launch has one of: threads, loads in flight, whether programs stay, the width of offsets."""
    warps, stages = max(s.tiles.warps for s in schedulers), min(s.tiles.stages for s in schedulers)
    resident, wide = all(s.tiles.resident for s in schedulers), any(s.wide for s in schedulers)
    for s in schedulers:
        s.tiles = replace(s.tiles, warps=warps, stages=stages, resident=resident)
        s.wide = wide


def joined(kernels: Sequence[Kernel]) -> Kernel:
    """The kernels as one launch; their names differ, and what a launch has one of does not."""
    shares: list[Share] = []
    for k in kernels:
        shares.append(Share(shares[-1].end if shares else Poly.ZERO, k.grid, k.body, k.flat))
    total = shares[-1].end
    return replace(
        kernels[0],
        reads=tuple(dict.fromkeys(b for k in kernels for b in k.reads)),
        writes=tuple(dict.fromkeys(b for k in kernels for b in k.writes)),
        symbols=tuple(dict.fromkeys(s for k in kernels for s in k.symbols)),
        grid=(GridAxis(Axis("program", total), total),),
        body=tuple(shares),
        locals=tuple(local for k in kernels for local in k.locals),
        schedule=replace(kernels[0].schedule, shares=tuple(k.schedule for k in kernels)),
        work=sum((k.work for k in kernels[1:]), kernels[0].work),
        descriptors=tuple(dict.fromkeys(d for k in kernels for d in k.descriptors)),
        wide=any(k.wide for k in kernels),
        flat=False,
        streams=any(k.streams for k in kernels) and all(k.streams for k in kernels if k.descriptors),
    )
