"""Large results leave past the caches: written once, they would only push out what is still needed.

A contiguous store of a vector loop becomes a staged one: the loop runs in strips, each strip's tile is
gathered in a small local and written with streaming stores. A line is then not read before it is
overwritten, which saves a third of the traffic of a copy.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.access import storage_bytes
from ..ir.dtypes import DType
from ..ir.kernel import Local, Loop, Statement, StoreElement, rewritten
from ..ir.poly import Axis, Poly
from ..ir.target import Target
from .builder import Builder

LANES = 64


def stream_stores(body: tuple[Statement, ...], builder: Builder, target: Target) -> tuple[Statement, ...]:
    """The statements with large contiguous stores staged."""
    return rewritten(body, lambda s: _staged(s, builder, target) if isinstance(s, Loop) and s.kind != "sweep" else s)


def _staged(loop: Loop, builder: Builder, target: Target) -> Loop:
    stores = [s for s in loop.body if isinstance(s, StoreElement) and _streams(s, loop.axis, target)]
    short = loop.extent.constant is None or loop.extent.constant < LANES
    if not stores or short or (loop.kind == "strip" and loop.lanes < LANES // 2):
        return loop
    lanes = loop.lanes if loop.kind == "strip" else LANES
    lane = loop.lane or Axis(builder.name("lane"), Poly.of(lanes))
    replaced: dict[StoreElement, Statement] = {}
    for s in stores:
        stored = DType.U8 if s.buffer.dtype is DType.BOOL else s.buffer.dtype  # as in memory
        local = Local(builder.name("leaving"), stored, lanes)
        builder.locals.append(local)
        replaced[s] = replace(s, staged=local)
    body = tuple(replaced.get(s, s) if isinstance(s, StoreElement) else s for s in loop.body)
    return replace(loop, kind="strip", lanes=lanes, lane=lane, body=body)


def _streams(store: StoreElement, axis: Axis, target: Target) -> bool:
    constant = all(size.constant is not None for size in store.buffer.shape)
    coefficient = store.offset.coefficient(axis)
    contiguous = coefficient is not None and coefficient.constant == 1
    return store.guard is None and constant and contiguous and storage_bytes(store.buffer) >= target.streamed_bytes
