"""Triton text of comparisons of positions: in as many bits as offsets have, rows and columns each on their side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir.dtypes import DType
from ..ir.expr import Const
from ..ir.kernel import Let, Operand
from ..ir.poly import Poly, is_far
from .triton_ops import triton_pointwise

if TYPE_CHECKING:
    from .triton import TritonEmitter

_NONE: frozenset[str] = frozenset()


def compared(emitter: TritonEmitter, s: Let) -> str | None:
    """A comparison of two positions; None if a side is something else."""
    places = [place for a in s.args if (place := _place(a)) is not None]
    if len(places) != 2:
        return None
    sides = _sides(emitter, *places)
    text = triton_pointwise(s.op, [emitter.poly(p) for p in sides], [DType.I64] * 2, DType.BOOL)
    return text if any(p.names() for p in sides) else f"tl.full([], {text}, tl.int1)"


def _place(value: Operand) -> Poly | None:
    """An operand as an index expression, if it is one."""
    match value:
        case Poly():
            return value
        case Const() if value.dtype is DType.I64 and not is_far(Poly.of(int(value.value))):
            return Poly.of(int(value.value))
    return None


def _sides(emitter: TritonEmitter, left: Poly, right: Poly) -> list[Poly]:
    """Two positions to compare. Where one varies along several tile axes, the last of them, and what changes with
    the loop, goes to the right: otherwise registers would hold a tile of all axes through the loop.
    """
    if all(len(emitter.poly_dims(p) or _NONE) < 2 for p in (left, right)):
        return [left, right]
    moving = left - right
    last = max(emitter.poly_dims(moving) or _NONE, key=lambda name: emitter.tiles[name].dim, default="")
    names = {last, *emitter.counters}
    along = Poly(tuple((m, c) for m, c in moving.terms if any(a.poly().names() & names for a in m)))
    rest = emitter.poly_dims(moving - along) or _NONE
    apart = emitter.poly_dims(along) == frozenset((last,)) and last not in rest
    return [moving - along, -along] if apart else [left, right]
