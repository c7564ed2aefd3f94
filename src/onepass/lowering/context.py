"""The builder that lowering rules use: reads operands, defines buffers, records externs.

Values of 16-bit floats are computed in float32: read with `widen`, ended with `narrow`, so that a
fused chain is not re-rounded. Operands that must be seen as stored are read with `cast`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..analysis.access import flat_offset
from ..ir.dtypes import DType, from_torch
from ..ir.expr import Const, Expr, Index, Load, Reduce, literal, pointwise, postorder, rewrite
from ..ir.orders import NO_ORDERS
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, Define, HostValue, Origin, Statement, View, contiguous_strides
from .float8 import decode, encode
from .registry import Unsupported
from .symbols import Sizes
from .torch_private import FakeTensor
from .values import HostNumber, Ref, TensorMeta, axes_of, own_point, whole

Scalar = float | int | bool | Poly | HostNumber
Operand = Ref | Scalar


class Context:
    """State of one graph's lowering. `origin`, `orders` and `outs` belong to the node being lowered."""

    def __init__(self, precision: str, wide_statistics: bool) -> None:
        assert precision in ("fused", "eager"), precision
        self.precision, self.wide_statistics = precision, wide_statistics
        self.sizes = Sizes()
        self.statements: list[Statement] = []
        self.origin, self.orders = Origin("", ""), NO_ORDERS
        self.outs: tuple[TensorMeta, ...] = ()
        self._known: dict[tuple[Any, ...], Ref] = {}
        self._defined: set[Buffer] = set()
        self.fresh: set[Buffer] = set()  # buffers with a storage of their own, made by this program
        self.constants: dict[Buffer, Const] = {}  # buffers that are all one number: kernels need not read them
        self.means: dict[Buffer, Reduce] = {}  # buffers that hold a mean, and the sum it divides
        self.offsets: dict[Buffer, Ref] = {}  # buffers that hold positions of maxima, and their places in windows
        self._buffers, self._hosts = itertools.count(), itertools.count()

    @property
    def out(self) -> TensorMeta:
        """What FX says of the node's (first) result."""
        return self.outs[0]

    # reading

    def read(self, operand: Operand, dtype: DType | None = None, *, exact: bool = False) -> Expr:
        """The operand at the axes of the result, converted for computing in `dtype` (the result's).

        The value has type `dtype.compute`. `exact` keeps the rounding to `dtype`, as the operands
        of discontinuous operations need.
        """
        dtype = self.out.dtype if dtype is None else dtype
        if isinstance(operand, Ref):
            value = operand.aligned(self.out.shape)
        elif isinstance(operand, Poly):
            value = self.size(operand, DType.I64)
        elif isinstance(operand, HostNumber):
            value = operand.value
        else:
            rounded = dtype if exact and dtype.is_half else dtype.compute
            return self.convert(literal(operand, rounded), dtype.compute, exact=True)
        return self.computing(value, dtype, exact=exact)

    def computing(self, value: Expr, dtype: DType, *, exact: bool = False) -> Expr:
        """A stored value, converted for computing in `dtype`."""
        if (exact or self.precision == "eager") and dtype.is_half:
            value = self.convert(value, dtype, exact=True)
        return self.convert(value, dtype.compute, exact=exact)

    def convert(self, value: Expr, dtype: DType, *, exact: bool = False) -> Expr:
        """The value as another type: implicitly (`widen`, `narrow`), or exactly as a cast would."""
        if value.dtype is dtype:
            return value
        if value.dtype.is_packed:
            return self.convert(decode(value), dtype, exact=exact)
        if dtype.is_packed:
            return encode(self.convert(value, DType.F32, exact=exact), dtype)
        exact = exact or self.precision == "eager"
        if exact:
            if DType.F32 not in (value.dtype, dtype) and (value.dtype.is_half or dtype.is_half):
                value = pointwise("cast", value, dtype=DType.F32)  # eager converts through float32
            return pointwise("cast", value, dtype=dtype)
        if value.dtype.is_half and dtype.is_float:
            wide = pointwise("widen", value, dtype=DType.F32)
            return self.convert(wide, dtype)
        if dtype.is_half:
            value = pointwise("cast", value, dtype=DType.F32)
            return pointwise("narrow", value, dtype=dtype)
        return pointwise("cast", value, dtype=dtype)

    def stored(self, operand: Operand, dtype: DType | None = None) -> Expr:
        """The operand at the axes of the result, as a value of type `dtype` (the result's) itself: for moving data."""
        dtype = self.out.dtype if dtype is None else dtype
        if isinstance(operand, Ref):
            return self.convert(operand.aligned(self.out.shape), dtype)
        if isinstance(operand, Poly):
            return self.size(operand, dtype)
        if isinstance(operand, HostNumber):
            return self.convert(operand.value, dtype)
        return literal(operand, dtype)

    def size(self, size: Poly, dtype: DType) -> Expr:
        """A size as a value."""
        constant = size.constant
        if constant is not None:
            return literal(constant, dtype)
        return self.convert(Index(size), dtype)

    # defining

    def define(self, value: Expr, meta: TensorMeta | None = None) -> Ref:
        """A buffer that holds `value` (over the canonical axes of its shape); reused if one exists."""
        meta = self.out if meta is None else meta
        value = self._with_constants(self.convert(value, meta.dtype))
        if isinstance(value, Load) and self._is_copy(value, meta):
            return whole(value.buffer)
        key = (value, meta.shape, meta.strides, meta.dtype, meta.device, self.orders)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.define_afresh(value, meta)
            if isinstance(value, Const):
                self.constants[known.buffer] = value
        return known

    def _with_constants(self, value: Expr) -> Expr:
        """The value with loads of constant buffers replaced by the constant."""
        constants = self.constants
        if not any(isinstance(e, Load) and e.buffer in constants for e in postorder([value])):
            return value
        return rewrite(value, lambda e: constants.get(e.buffer) if isinstance(e, Load) else None)

    def define_afresh(self, value: Expr, meta: TensorMeta) -> Ref:
        """A buffer of its own, even if another holds the same value."""
        buffer = self.new_buffer(meta)
        self._defined.add(buffer)
        self.fresh.add(buffer)
        self.statements.append(Define(buffer, axes_of(meta.shape), value, self.origin, self.orders))
        return whole(buffer)

    def _is_copy(self, value: Load, meta: TensorMeta) -> bool:
        """Whether `value` is all of a buffer just like the one to define; defined here, so never mutated."""
        buffer = value.buffer
        like = (buffer.shape, buffer.strides, buffer.device) == (meta.shape, meta.strides, meta.device)
        return like and buffer in self._defined and value.index == own_point(meta.shape)

    def define_internal(self, value: Expr, shape: Sequence[Poly], dtype: DType) -> Ref:
        """An intermediate of a rule that FX does not know of."""
        return self.define(value, TensorMeta(tuple(shape), contiguous_strides(tuple(shape)), dtype, self.out.device))

    def new_buffer(self, meta: TensorMeta, name: str | None = None) -> Buffer:
        return Buffer(name or f"b{next(self._buffers)}", meta.dtype, meta.shape, meta.strides, meta.device)

    def new_host_value(self, name: str | None = None) -> HostValue:
        return HostValue(name or f"h{next(self._hosts)}")

    # views on the host

    def as_view(self, ref: Ref, meta: TensorMeta) -> View:
        """The ref as a strided view with exactly the strides FX promises; copied where it has others."""
        view = strided(ref, meta)
        if view is None:
            copy = self.define(ref.aligned(ref.shape), meta)
            return View(copy.buffer, meta.shape, meta.strides, Poly.ZERO)
        return view

    def copy_of(self, ref: Ref, meta: TensorMeta) -> Ref:
        """A buffer of its own with the ref's values."""
        value = ref.at(tuple(own_point(meta.shape)))
        return self.define_afresh(self.convert(value, meta.dtype), meta)

    # metadata

    def meta(self, value: Any) -> TensorMeta:
        """What FX says of a tensor; `Unsupported` for those kernels do not handle."""
        dtype = from_torch(value.dtype)
        if dtype is None:
            raise Unsupported(f"dtype {value.dtype}")
        if type(value) not in (FakeTensor, torch.Tensor, torch.nn.Parameter):
            raise Unsupported(f"a tensor subclass, {type(value).__name__}")
        if value.layout is not torch.strided or value.is_nested:
            raise Unsupported(f"layout {value.layout}")
        if value.is_conj() or value.is_neg():
            raise Unsupported("a lazy conjugate or negative")
        if value.device.type not in ("cpu", "cuda"):
            raise Unsupported(f"device {value.device}")
        shape, strides = self.sizes.shape(value.shape), self.sizes.strides(value.stride())
        return TensorMeta(shape, strides, dtype, str(value.device))


def strided(ref: Ref, meta: TensorMeta) -> View | None:
    """The ref as a strided view of its buffer with `meta`'s strides, if it is one."""
    position = flat_offset(ref.buffer, ref.index)
    for number, extent in enumerate(ref.shape):
        if extent is not Poly.ONE:
            step = position.coefficient(Axis(f"d{number}", extent))
            if step is None or step.axes or (step is not meta.strides[number] and extent is not Poly.ZERO):
                return None
    start = position.substitute(dict.fromkeys(axes_of(ref.shape), Poly.ZERO))
    return View(ref.buffer, meta.shape, meta.strides, start)
