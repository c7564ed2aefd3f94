"""A group of the plan without one of its operations: the same schedule, a cheap stand-in in the operation's place.

The stand-in adds the operands, each converted to the result's type; a reduction gives the element at position 0. What
reads the result, and what the operation reads, stays. Where the kernel would read less without the operation, or a
stand-in is not cheaper, there is none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..analysis.access import numel, operation_cost
from ..analysis.inline import Inliner
from ..errors import VerifyError
from ..explain.measure import bytes_read
from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, pointwise, postorder, substitute_axes
from ..ir.plan import Group, Store
from ..ir.poly import Poly
from ..ir.program import Define

WORTH = 2.0  # operations per element of the result, from which on what a stand-in saves can be measured
READING = "the kernel reads what it reads for this operation alone"


def stand_in(define: Define) -> Expr | None:
    """A cheap value of the same type that depends on the same operands; None where there is none that is cheaper."""
    bound = {a for e in postorder([define.value]) for a in getattr(e, "over", ())}
    opened_value = [e for e in postorder([define.value]) if isinstance(e, Load) and not e.children]
    if not opened_value or any(isinstance(e, Load) and e.children for e in postorder([define.value])):
        return None  # nothing flows, or through an index
    start = dict.fromkeys(bound, Poly.ZERO)
    operands = [_converted(substitute_axes(e, start), define.buffer.dtype) for e in dict.fromkeys(opened_value)]
    value = operands[0]
    for operand in operands[1:]:
        value = pointwise("bitor" if value.dtype is DType.BOOL else "add", value, operand)
    saved = operation_cost([define.value]) - operation_cost([value])
    return value if saved >= WORTH * numel(define.buffer.shape) else None


def _converted(value: Expr, dtype: DType) -> Expr:
    return value if value.dtype is dtype else pointwise("cast", value, dtype=dtype)


def without(group: Group, removed: Collection[Define]) -> Group | str:
    """The group with stand-ins for some of its operations, or why there is no such group."""
    defines = {m.buffer: m for m in group.members}
    for m in removed:
        value = stand_in(m)
        if value is None:
            return "no stand-in is cheaper"
        defines[m.buffer] = replace(m, value=value)
    try:
        inliner = Inliner(defines, [s.buffer for s in group.stores])
        stores = [Store(s.buffer, defines[s.buffer].dimensions, inliner.value(s.buffer)) for s in group.stores]
    except (KeyError, VerifyError):
        return "it cannot be taken out of its kernel"
    if bytes_read([s.value for s in stores]) != bytes_read([s.value for s in group.stores]):
        return READING
    return replace(group, stores=tuple(stores))


def dearest(group: Group, most: int) -> list[Define]:
    """The operations that have a cheaper stand-in, those with the most work first."""
    found = [(operation_cost([m.value]), m) for m in group.members if stand_in(m) is not None]
    return [m for _, m in sorted(found, key=lambda pair: -pair[0])[:most]]
