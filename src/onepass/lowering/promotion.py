"""Type promotion, as aten does it: tensors with dimensions, then 0-d tensors, then Python numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..ir.dtypes import DType, from_torch
from ..ir.poly import Poly
from .values import HostNumber, Ref


def common_dtype(operands: Iterable[Any]) -> DType:
    """The dtype aten computes a mixture of refs, sizes and numbers in."""
    groups: dict[int, torch.dtype] = {}
    for operand in operands:
        rank, dtype = _rank(operand)
        groups[rank] = torch.promote_types(groups.get(rank, dtype), dtype)
    result, *others = (groups[rank] for rank in sorted(groups))
    for dtype in others:
        if _category(dtype) > _category(result):
            result = torch.promote_types(result, dtype)
    found = from_torch(result)
    assert found is not None
    return found


def _rank(operand: Any) -> tuple[int, torch.dtype]:
    match operand:
        case Ref():
            torch_dtype: Any = operand.dtype.torch
            return (0 if operand.ndim else 1), torch_dtype
        case bool():
            return 2, torch.bool
        case int() | Poly():
            return 2, torch.int64
        case float() | HostNumber():
            return 2, torch.get_default_dtype()
    raise TypeError(f"not an operand: {operand!r}")


def _category(dtype: torch.dtype) -> int:
    return 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1
