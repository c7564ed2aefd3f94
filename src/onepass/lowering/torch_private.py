"""Every private torch name that lowering uses, in one place.

If a torch release moves one of these, this file is the only one to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.inductor_prims  # registers prims.fma
from torch import _decomp
from torch._C import DispatchKey
from torch._guards import tracing
from torch._higher_order_ops.associative_scan import associative_scan_op as associative_scan_op
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as free_unbacked_symbols
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy import functions as functions

# What newer dynamo writes in place of addcmul; empty where torch has no such operation.
MULTIPLY_ADD = "prims.fma.default" if hasattr(torch.ops.prims, "fma") else ""
# Max pooling whose second result says in a byte which element of the window is the largest; what makes indices of it.
POOL_OFFSETS = (
    "prims._low_memory_max_pool_with_offsets.default",
    "prims._low_memory_max_pool_offsets_to_indices.default",
)
if not hasattr(torch.ops.prims, "_low_memory_max_pool_with_offsets"):
    POOL_OFFSETS = ("", "")
without_modes = _disable_current_modes
MATH_ATTENTION = 0  # of torch's ways to compute attention
every_decomposition = _decomp.decomposition_table
try:  # the same without operations AOTAutograd takes apart by itself: 5 ms instead of 180 to collect
    core_aten_decompositions = _decomp._core_aten_decompositions_post_autograd
except AttributeError:
    core_aten_decompositions = _decomp.core_aten_decompositions


@contextmanager
def outside_of_traces() -> Iterator[None]:
    """Tensors are real again, and what is traced inside knows nothing of a trace around it."""
    with _disable_current_modes(), tracing(None):
        yield


def call_general(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The operation by its implementation for every device, which calls other operations."""
    return op._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


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
    with without_modes():
        value: float | int | bool | complex = constant.item()
    return value


def library_takes(given: dict[str, Any]) -> bool:
    """Whether torch would give attention to a kernel of the library; else it multiplies float32 matrices.

    `given`: the arguments of the call by name.
    """
    (query, key, value), mask = (given[name] for name in ("query", "key", "value")), given.get("attn_mask")
    options = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
    dropped, causal = given.get("dropout_p", 0.0), given.get("is_causal", False)
    if query.device.type == "cpu":  # of fake tensors torch does not say
        own = (query, key, value) if mask is None else (query, key, value, mask)
        dense = all(t.stride(-1) == 1 for t in own)
        masked = mask is not None and (mask.requires_grad or mask.dim() not in (2, 4))
        return not (dropped or masked) and dense and query.dim() == 4 and own[0].shape[-1] == own[2].shape[-1]
    try:
        choice = torch._fused_sdp_choice(query, key, value, mask, dropped, causal, **options)
    except (AttributeError, RuntimeError, TypeError):  # a torch that does not say
        return True
    return int(choice) != MATH_ATTENTION
