"""States that programs carry from row to row: whether they fit, and whether a row is held whole or in pieces.

A norm's backward reduces each row and sums columns over rows. A program takes many rows, one after another, and
carries the columns' states. On a GPU these are registers: a row is held whole beside them, or, where it is longer,
only what was loaded of it is, and everything else is computed again after each of its reductions, piece by piece. Where
not even that fits, a row is loaded again too: it comes from a cache then.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.dtypes import DType
from ..ir.expr import Load, Random, Reduce, postorder
from ..ir.poly import Axis, Poly
from ..ir.target import Target
from .access import estimate, numel, tile_elements
from .nest import Nest, aligned_along, offsets, opened

CARRIED_ROWS = 8  # the least a program gets: its partial result costs as much
LONG_ROW = 8192  # up to here a row is held whole or not at all
PIECE_LANES = (4096, 2048)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A row in `count` tiles of `lanes`, of which `row_bytes` are its own and `shared_bytes` are the same for all."""

    lanes: int
    count: int
    row_bytes: int
    shared_bytes: int
    kept: bool  # whether what was loaded stays in registers until the row is done


def cannot_carry(nest: Nest, axis: Axis, ends: list[Reduce], target: Target) -> str | None:
    """Why states cannot go from one position of a class to the next: they must fit, and rows must be many."""
    states = {r: numel(nest.carried(r)) for r in ends if nest.carried(r)}
    if not states:
        return None
    inner = frozenset(_row(nest, axis))
    if any(a.extent.constant is None for a in inner) or any(len(r.over) > 1 for r in ends):
        return ": partial results would not fit one program"
    for offset in offsets(nest):
        along = {nest.bound.get(a, a): offset.coefficient(a) for a in offset.axes}
        if along.get(axis) is Poly.ONE and along.keys() & inner:
            return ": rows are not contiguous"
    if target.warp:
        if any(not aligned_along(nest, c, target.vector_bytes) for c in inner):
            return ": rows do not start where whole vectors do"
        fits = fits_whole(nest, axis, target) or row_pieces(nest, axis, target) is not None
    else:  # arrays on a thread's stack; a long sum keeps what its additions lose beside it
        needed = sum(2 * count * sum(d.bytes for d in r.part_dtypes) for r, count in states.items())
        fits = needed <= target.cache_bytes // 2
    if not fits:
        return ": partial results would not fit one program"
    if estimate(axis.extent) < CARRIED_ROWS * target.processors:
        return (
            f": {estimate(axis.extent)} rows are too few to share out, each program with {max(states.values())} states"
        )
    return None


def fits_whole(nest: Nest, axis: Axis, target: Target) -> bool:
    """Whether a program of tiles can hold one position of `axis`, all values of it at once, beside the states."""
    inner = _row(nest, axis)
    values = len(_loads(nest, inner)) + len(nest.reductions)
    return tile_elements(inner) <= target.held_elements * 4 // max(4, values)


def row_pieces(nest: Nest, axis: Axis, target: Target) -> Pieces | None:
    """How a program of tiles works through one position of `axis`; None where its registers cannot hold enough.

    Three quarters of them are for the states and for what was loaded. Random numbers would be drawn again.
    """
    inner = _row(nest, axis)
    if len(inner) != 1 or not target.carried_bytes or any(isinstance(e, Random) for e in postorder(nest.values)):
        return None
    extent = inner[0].extent.constant
    assert extent is not None
    if extent <= LONG_ROW:
        return None
    sizes = [n for n in PIECE_LANES if -(-extent // n) * n * 16 <= extent * 17] or PIECE_LANES[-1:]
    lanes, count = sizes[0], -(-extent // sizes[0])
    ends = [r for r in nest.reductions if nest.sweeps(r, axis) and nest.carried(r)]
    loads = _loads(nest, inner)
    rows = [e for e in loads if axis in e.axes]
    states = lanes * count * sum(d.bytes for r in ends for d in r.part_dtypes)
    # Until the row is done only bfloat16 stays in registers as narrow as it came.
    loaded = lanes * count * sum(2 if e.dtype is DType.BF16 else max(4, e.dtype.bytes) for e in rows)
    kept = states + loaded <= target.registers * 3
    if not kept and states > target.carried_bytes:
        return None
    if not kept:  # little of a piece at once beside the states
        lanes, count = sizes[-1], -(-extent // sizes[-1])
    row_bytes, all_bytes = (sum(e.dtype.bytes for e in es) * lanes * count for es in (rows, loads))
    return Pieces(lanes, count, row_bytes, all_bytes - row_bytes, kept)


def _row(nest: Nest, axis: Axis) -> list[Axis]:
    """The classes inside one position of the split class."""
    return [c for c in nest.classes if c not in nest.outer and c is not axis]


def _loads(nest: Nest, inner: list[Axis]) -> set[Load]:
    return {e for e in postorder(opened(nest)) if isinstance(e, Load) and e.axes & frozenset(inner)}
