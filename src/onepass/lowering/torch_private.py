"""Every private torch name that lowering uses, in one place.

If a torch release moves one of these, this file is the only one to change.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.inductor_prims  # registers prims.fma

try:  # the same without operations AOTAutograd takes apart by itself: 5 ms instead of 180 to collect
    from torch._decomp import _core_aten_decompositions_post_autograd as core_aten_decompositions
except ImportError:
    from torch._decomp import core_aten_decompositions
from torch._decomp import decomposition_table as every_decomposition
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import elementwise_dtypes, suggest_memory_format, type_to_dtype
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import CleanDiv, FloatTrueDiv, FloorDiv, IntTrueDiv, Max, Mod, PythonMod, ToFloat

__all__ = [
    "CleanDiv",
    "FakeTensor",
    "FloatTrueDiv",
    "FloorDiv",
    "HigherOrderOperator",
    "IntTrueDiv",
    "Max",
    "Mod",
    "OpOverload",
    "PythonMod",
    "StorageWeakRef",
    "ToFloat",
    "core_aten_decompositions",
    "disable_proxy_modes_tracing",
    "elementwise_dtypes",
    "every_decomposition",
    "folded_value",
    "free_unbacked_symbols",
    "make_fx",
    "multiply_add_ops",
    "storage_key",
    "suggest_memory_format",
    "symbol_hint",
    "type_to_dtype",
]


def multiply_add_ops() -> tuple[OpOverload, ...]:
    """prims.fma, which newer dynamo writes in place of addcmul; none where torch has no such operation."""
    packet = getattr(torch.ops.prims, "fma", None)
    return () if packet is None else (packet.default,)


def storage_key(tensor: torch.Tensor) -> object:
    """Equal for tensors that share a storage."""
    return StorageWeakRef(tensor.untyped_storage())


def symbol_hint(symbol: Any, shape_env: Any) -> int | None:
    """The value a size symbol had when the graph was traced, if any; asking for it adds no guard."""
    values = getattr(shape_env, "backed_var_to_val", None)
    if values is None:
        values = shape_env.var_to_val
    value = values.get(symbol)
    return int(value) if value is not None and value.is_Integer else None


def folded_value(constant: torch.Tensor) -> float | int | bool | complex | None:
    """The value of a graph's constant that programs are compiled for (one element, on the CPU), else None.

    Graphs are compiled under a fake mode, where a real tensor cannot be read.
    """
    if type(constant) is not torch.Tensor or constant.numel() != 1 or constant.device.type != "cpu":
        return None
    with _disable_current_modes():
        value: float | int | bool | complex = constant.item()
    return value
