"""What values compute, sizes and buffers left out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..ir.expr import Const, Expr, Load, Pointwise, Reduce, postorder


def words(values: Iterable[Expr]) -> tuple[Hashable, ...]:
    """Equal where values do the same to tensors of the same types."""
    found: list[Hashable] = []
    for e in postorder(list(values)):
        match e:
            case Pointwise():
                found.append((e.op, e.dtype))
            case Const():
                found.append(e)
            case Load():
                found.append((e.buffer.dtype, bool(e.axes)))
            case Reduce():
                found.append(e.monoid)
    return tuple(found)
