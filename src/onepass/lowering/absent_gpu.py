"""Tracing with fake tensors of a GPU in a torch that was built without GPUs.

Such a torch runs operators on fake tensors, but five methods of tensors are bound by hand and ask for the device first.
Inside of `absent_gpu()` they are operators for tensors of a GPU, all of which are fake then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


_lock = threading.RLock()


@contextmanager
def absent_gpu() -> Iterator[None]:
    """A context around a trace; nothing changes where torch knows GPUs."""
    if torch.backends.cuda.is_built():
        yield
        return
    with _lock:
        for name, by_operators in _BY_OPERATORS.items():
            setattr(Tensor, name, _for_gpus(getattr(Tensor, name), by_operators))
        try:
            yield
        finally:
            for name in _BY_OPERATORS:
                delattr(Tensor, name)  # the base class has its own


def _for_gpus(own: Callable[..., Any], by_operators: Callable[..., Any]) -> Callable[..., Any]:
    def method(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (by_operators if x.is_cuda else own)(x, *args, **kwargs)

    return method


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    is_so: bool = x.is_contiguous(memory_format=memory_format)
    return x if is_so else torch.clone(x, memory_format=memory_format)


def _item(x: Tensor, place: Any) -> Tensor:
    """x[place]"""
    parts = list(place) if isinstance(place, tuple) else [place]
    parts = [torch.tensor(p, device=x.device) if isinstance(p, list) else p for p in parts]
    whole = [slice(None)] * (x.dim() - sum(map(_width, parts)))
    at = next((k for k, p in enumerate(parts) if p is ...), len(parts))
    dim, indices = 0, {}
    for part in (*parts[:at], *whole, *parts[at + 1 :]):
        if part is None:
            x = aten.unsqueeze.default(x, dim)
        elif isinstance(part, slice):
            x = aten.slice.Tensor(x, dim, part.start, part.stop, 1 if part.step is None else part.step)
        elif isinstance(part, Tensor):
            indices[dim] = part
        else:
            x = aten.select.int(x, dim, part)
            continue
        dim += _width(part) or 1
    return aten.index.Tensor(x, [indices.get(k) for k in range(max(indices) + 1)]) if indices else x


def _width(part: Any) -> int:
    """How many dimensions a part of an index is for."""
    if part is None or part is ...:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else 1


def _set_item(x: Tensor, place: Any, value: Any) -> None:
    parts = place if isinstance(place, tuple) else (place,)
    value = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    if not any(isinstance(p, Tensor | list) for p in parts):
        aten.copy_.default(_item(x, place), value)
        return
    if any(not isinstance(p, Tensor) for p in parts):
        raise NotImplementedError("a tensor among other indices is assigned to")
    aten.index_put_.default(x, list(parts), value)


_BY_OPERATORS: dict[str, Callable[..., Any]] = {
    "__getitem__": _item,
    "__setitem__": _set_item,
    "__invert__": torch.bitwise_not,
    "contiguous": _contiguous,
    "copy_": aten.copy_.default,
}
