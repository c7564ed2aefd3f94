"""Element-wise results are laid out as eager lays them out, not as torch's fake tensors promise.

Eager orders dimensions by the strides of the operands as they are. Fake tensors convert operands to the
type of the computation first, which writes expanded dimensions out, and take a contiguous 4-d tensor with
dimensions of size 1 for channels-last. Where the two differ, the operation is traced on operands without
dimensions of size 1 and with broadcast ones in place of expanded: views, no copy. Only for known sizes;
copysign and the logical operations are not helped, for there fake tensors expand before they convert.
Eager orders the result of an index like an element-wise one, fake tensors without a look at the indices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ir.callables import operators
from .registry import RULES
from .torch_private import OpOverload, disable_proxy_modes_tracing, statically_known_true

aten = torch.ops.aten
Sizes = tuple[int, ...]
# Eager hands these operands to its iterator in another order than the schema has them.
_OTHER_ORDER = operators("threshold_backward")


def layout_decompositions() -> dict[Any, Callable[..., Any]]:
    """A decomposition for every element-wise operation of several tensors, for indices and for `roll`."""
    iterations = {op: functools.partial(_as_eager, op) for op in RULES if _is_iteration(op)}
    return iterations | {aten.index.Tensor: _index, aten.roll.default: _roll}


def _is_iteration(op: Any) -> bool:
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op in _OTHER_ORDER:
        return False
    tensors = sum("Tensor" in str(argument.type) for argument in op._schema.arguments)
    return torch.Tag.pointwise in op.tags and tensors > 1


def _as_eager(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The operation between views, where it would be laid out otherwise; else it stays as it is."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim]
    if len(tensors) < 2 or not all(map(_is_static, tensors)) or not any(map(_is_odd, tensors)):
        return NotImplemented
    with disable_proxy_modes_tracing():
        promised = op(*args, **kwargs)
        shape = tuple(promised.shape)
        spread = [_spread(x, shape) for x in tensors]
        free = [dim for dim in range(len(shape)) if any(strides[dim] for strides in spread)]
        bare = [_bare(x, shape, free) for x in tensors]
    if len({x.dtype for x in tensors}) > 1 or promised.is_floating_point() > tensors[0].is_floating_point():
        return NotImplemented  # eager converts operands as well
    plain = all(tuple(x.shape) == shape and x.is_contiguous() for x in tensors)
    order = list(range(len(shape))) if plain else _order(shape, spread)
    wanted = _strides(shape, order)
    if promised.stride() == wanted or promised.numel() == 1:
        return NotImplemented
    if all(x.shape == y.shape for x, y in zip(tensors, bare, strict=True)):
        return NotImplemented  # neither of the two causes
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: _bare(x, shape, free), (args, kwargs))
    with disable_proxy_modes_tracing():
        helped = op(*args, **kwargs).view(shape)
    longer = [dim for dim in range(len(shape)) if shape[dim] > 1]
    if any(helped.stride(dim) != wanted[dim] for dim in longer):
        return NotImplemented  # of no use here; an output is laid out right all the same, see `eager_strides`
    return op(*args, **kwargs).view(shape)


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """The same values with eager's order of dimensions in memory."""
    with disable_proxy_modes_tracing():
        order = _index_order(x, indices)
    if order is None:
        return NotImplemented
    found = aten._unsafe_index.Tensor(x, indices).permute(order).clone(memory_format=torch.contiguous_format)
    return found.permute(sorted(range(len(order)), key=order.__getitem__))


def _roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """On CPUs eager joins two slices for each dimension, in their memory format, which fake tensors do not know of."""
    if x.is_cuda or not dims or not _is_static(x) or x.is_contiguous() or not x.numel():
        return NotImplemented
    (shift, *shifts), (dim, *dims) = shifts, dims
    size = x.shape[dim]
    start = -shift % size
    joined = torch.cat((x.narrow(dim, start, size - start), x.narrow(dim, 0, start)), dim)
    return joined.roll(shifts, dims) if dims else joined


def _index_order(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> list[int] | None:
    """Eager's order; None where it is as promised or not known."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        return None
    promised = aten._unsafe_index.Tensor(x, indices)
    shape, kept = tuple(promised.shape), [x.stride(dim) for dim in range(x.ndim) if dim not in given]
    first = given[0] if given[-1] - given[0] < len(given) else 0  # where the dimensions of the indices go
    ones = (1,) * first, (1,) * (len(kept) - first)
    tensors = [index.reshape(ones[0] + index.shape + ones[1]) for index in torch.broadcast_tensors(*tensors)]
    kept[first:first] = [0] * (len(shape) - len(kept))
    try:
        pairs = ((a, b) for index in tensors for a, b in zip(index.stride(), tensors[0].stride(), strict=True))
        if x.device.type != "cpu" and any(_is(a != b) for a, b in pairs):
            tensors = [index.contiguous() for index in tensors]
        order = _order(shape, [tuple(kept), *(_spread(index, shape) for index in tensors)])
        sides = zip(shape, promised.stride(), _strides(shape, order), strict=True)
        return None if all(_is(size <= 1) or _is(a == b) for size, a, b in sides) else order
    except _Undecided:
        return None


class _Undecided(Exception):
    """What is asked depends on the sizes of a call."""


def _is(condition: bool | torch.SymBool) -> bool:
    """Whether it holds for all sizes; raises where it does for some."""
    if not isinstance(condition, torch.SymBool):
        return condition
    holds: bool = statically_known_true(condition)
    if not holds and not statically_known_true(torch.sym_not(condition)):
        raise _Undecided
    return holds


def eager_strides(op: Any, operands: Any, promised: torch.Tensor) -> Sizes | None:
    """Eager's strides of an element-wise result, None where they are as promised or not known."""
    tensors = [x for x in pytree.tree_leaves(operands) if isinstance(x, torch.Tensor) and x.ndim]
    if not _is_iteration(op) or len(tensors) < 2 or not all(map(_is_static, (promised, *tensors))):
        return None
    if len({promised.dtype, *(x.dtype for x in tensors)}) > 1 or promised.numel() <= 1:
        return None  # eager converts operands as well, or strides say nothing
    shape = tuple(promised.shape)
    if all(tuple(x.shape) == shape and x.stride() == tensors[0].stride() for x in tensors):
        return None  # alike: the result is as they are
    found = _strides(shape, _order(shape, [_spread(x, shape) for x in tensors]))
    return None if found == tuple(promised.stride()) else found


def _spread(tensor: torch.Tensor, shape: Sizes) -> Sizes:
    """The strides of an operand along the result's dimensions: 0 where it is missing or broadcast."""
    first: int = len(shape) - tensor.ndim
    own = zip(tensor.shape, tensor.stride(), shape[first:], strict=True)
    return (0,) * first + tuple(0 if _is(size != full) else stride for size, stride, full in own)


def _is_static(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride()))


def _is_odd(tensor: torch.Tensor) -> bool:
    """Has expanded dimensions, or ones of size 1 with strides that are not row-major: both causes need one."""
    strides = tensor.stride()
    if 1 not in tensor.shape and 0 not in strides:
        return False
    return tuple(strides) != _strides(tuple(tensor.shape), range(tensor.ndim))


def _bare(tensor: torch.Tensor, shape: Sizes, free: list[int]) -> torch.Tensor:
    """A view without the result's dimensions of size 1, and of size 1 where it is expanded but others are free."""
    first = len(shape) - tensor.ndim
    for dim in reversed(range(tensor.ndim)):
        if shape[first + dim] == 1:
            tensor = tensor.squeeze(dim)
        elif first + dim in free and tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _strides(shape: Sizes, order: Iterable[int]) -> Sizes:
    """Dense strides, the order from the outermost dimension to the innermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(list(order)):
        strides[dim] = step
        step *= torch.sym_max(shape[dim], 1)
    return tuple(strides)


def _order(shape: Sizes, spread: Sequence[Sizes]) -> list[int]:
    """The order TensorIterator gives the dimensions of a result, outermost first, by its operands' strides."""

    def is_inside(left: int, right: int) -> bool | None:
        """Whether one dimension varies faster than another; None if nothing tells."""
        for strides in spread:
            a, b = strides[left], strides[right]
            if _is(a != 0) and _is(b != 0) and (_is(a != b) or _is(shape[left] > shape[right])):
                return _is(a < b)
        return None

    found = list(reversed(range(len(shape))))  # innermost first; an insertion sort, for some pairs are not ordered
    for i in range(1, len(shape)):
        place = i
        for j in reversed(range(i)):
            inside = is_inside(found[j], found[place])
            if inside:
                break
            if inside is False:
                found[j], found[place], place = found[place], found[j], j
    return found[::-1]
