"""The private torch functions the runtime calls: those whose public equivalents cost 1 us more per call.

The public ones are used where a torch release lacks them. `without_modes` and `plain_dispatch` have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled as is_profiling
from torch._dispatch.python import no_python_dispatcher as plain_dispatch
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = ["is_profiling", "plain_dispatch", "without_modes"]  # torch's own; the rest is made here


def _empty_on(device: str) -> Callable[..., torch.Tensor]:
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _view(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


# Operators whose bindings take the same arguments in the same order: lists of integers are read there by torch's own
# parser, not through a schema (a convolution 2.7 us instead of 9, an embedding 1.6 instead of 4, a product 1.0
# instead of 1.2; Xeon, torch 2.13, November 2026).
_BOUND = frozenset({"convolution", "mm", "bmm", "addmm", "baddbmm", "embedding"})


def direct(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's quickest entry into torch's dispatcher: its binding, or what its Python object wraps."""
    entry: Callable[..., Any] = getattr(operator, "_op", operator)
    if isinstance(operator, torch._ops.OpOverload) and operator._overloadname == "default":
        namespace, name = operator._schema.name.split("::")
        if namespace == "aten" and name in _BOUND:
            entry = getattr(torch._C._VariableFunctions, name, entry)
    return entry if callable(entry) else operator


def on_device(index: int, call: Callable[[list[Any]], Any], args: list[Any]) -> Any:
    """The call with another device current."""
    with torch.cuda.device(index):
        return call(args)


_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)

# empty_cpu(shape, strides, dtype): 0.65 us against 1.5 us of torch.empty_strided.
empty_cpu: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cpu", _empty_on("cpu"))
# empty_cuda(shape, strides, dtype): on the current device.
empty_cuda: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cuda", _empty_on("cuda"))
# current_device(): its number.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
# is_capturing(): whether the current device's current stream is.
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
# current_stream(device index): the stream's handle.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 0)
# view(tensor, shape, strides, offset from the tensor's own): 0.8 us against 1.9 us of as_strided.
view: Callable[..., torch.Tensor] = getattr(_guards, "_reinterpret_tensor", _view)
