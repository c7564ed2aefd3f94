"""The kernels of one group as launches of their own, to be timed: takes a scheduled group, gives a `Trial`.

Integers that stand in are all 0, so what a kernel reads through them is read at position 0. A kernel whose indices
are computed in another way might then leave its buffers and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..analysis.access import estimate
from ..analysis.nest import Refusal
from ..ir.dtypes import DType
from ..ir.expr import Const
from ..ir.kernel import Kernel, Let, LoadElement, Operand, ScheduledGroup, StoreElement, Var, walk
from ..ir.ops import CHECKED
from ..ir.poly import Poly, Symbol
from ..ir.program import Buffer
from ..ir.source import Allocate, Trial
from .host import launch_of

_KEEP_ZERO = ("cast", "neg", "abs", "mul", "add", "sub", "bitand", "bitor", "maximum")


def emit_trial(scheduled: ScheduledGroup, names: dict[Buffer, str] | None = None) -> Trial | Refusal:
    """What to launch, with the sizes that were seen when the graph was traced.

    `names`: of buffers that several trials share; it is extended.
    """
    buffers = list(dict.fromkeys(b for k in scheduled.timed for b in k.parameters))
    if not have_examples(buffers, (s for k in scheduled.timed for s in k.symbols)):
        return Refusal("its sizes are known only at run time")
    if not all(stays_inside(k) for k in scheduled.timed):
        return Refusal("what it reads depends on values")
    names = {} if names is None else names
    for b in buffers:
        names.setdefault(b, f"a{len(names)}")
    stand_ins = tuple(stand_in(b, names[b]) for b in buffers)
    launches = (launch_of(k, n, names.__getitem__, _number) for n, k in enumerate(scheduled.timed))
    return Trial(stand_ins, tuple(launches))


def have_examples(buffers: Iterable[Buffer], symbols: Iterable[Symbol] = ()) -> bool:
    """Whether all sizes were seen when the graph was traced."""
    polys = [p for b in buffers for p in (*b.shape, *b.strides)] + [s.poly() for s in symbols]
    return all(s.hint is not None and s.hint > 1 for p in polys for s in p.symbols())


def stand_in(buffer: Buffer, name: str) -> Allocate:
    """A tensor of a buffer's layout."""
    shape, strides = (tuple(map(_number, sizes)) for sizes in (buffer.shape, buffer.strides))
    return Allocate(name, shape, strides, buffer.dtype.value, buffer.device)


def _number(size: Poly | Symbol) -> str:
    return str(estimate(Poly.of(size)))


def stays_inside(kernel: Kernel) -> bool:
    """Whether every index that depends on values, or is checked, is 0 where all integers that are read are 0, and all
    booleans true."""
    made = {s.var.name: s for s in walk(kernel.body) if isinstance(s, Let | LoadElement)}
    zero: dict[str, bool] = {}

    def is_zero(operand: Operand) -> bool:
        match operand:
            case Const():
                return operand.value == 0
            case Poly():
                return operand is Poly.ZERO
        if operand.name not in zero:
            zero[operand.name] = False
            zero[operand.name] = comes_to_zero(operand)
        return zero[operand.name]

    def comes_to_zero(var: Var) -> bool:
        match made.get(var.name):
            case LoadElement():
                return not var.dtype.is_float and var.dtype is not DType.BOOL
            case Let(op="where", args=(_, first, second)):
                return is_zero(first) and is_zero(second)
            case Let(op=op, args=(index, _)) if op in CHECKED:
                return is_zero(index)
            case Let(op=op, args=args) if op in _KEEP_ZERO:
                return all(is_zero(a) for a in args)
        return False

    sizes = {s.name for s in kernel.symbols}
    at = [s.offset for s in walk(kernel.body) if isinstance(s, LoadElement | StoreElement)]
    used = {s.name for offset in at for s in offset.symbols()} - sizes
    used |= {name for name, s in made.items() if isinstance(s, Let) and s.op in CHECKED}  # asserted, used or not
    return all(name in made and is_zero(made[name].var) for name in used)
