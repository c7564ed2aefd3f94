"""A plugged-in kernel in a training graph: two operators that torch's tracing does not look into.

    onepass_plugged::my_norm(x, w) -> y
    onepass_plugged::my_norm_backward(x, w, y, dy) -> (dx, dw)

Shapes and strides of results are those of the reference, of gradients those of their inputs; a kernel's own tensors
are laid out again where they differ.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir.callables import PLUGGED
from .checks import Function, listed

_library = torch.library.Library(PLUGGED, "DEF")
_numbers = itertools.count()

_library.define(
    "unknown(Tensor[] given, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _unknown(given: Sequence[Tensor], size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


torch.library.register_fake(f"{PLUGGED}::unknown", _unknown, lib=_library)


def unknown(given: Sequence[Tensor], like: Any) -> Any:
    """Stands for results of a call that is not looked into, while a graph is traced to be read."""
    operator = getattr(torch.ops, PLUGGED).unknown
    if not isinstance(like, Tensor):
        return tuple(unknown(given, x) for x in like) if isinstance(like, tuple | list) else like
    return operator(list(given), like.shape, like.stride(), like.dtype, like.device)


class Differentiated:
    """A kernel with `backward`, to be called with tensors that have gradients."""

    def __init__(self, name: str, function: Function, backward: Function, reference: Function, floats: Sequence[bool],
                 results: int) -> None:  # fmt: skip
        self.function, self._backward, self.reference, self.floats = function, backward, reference, floats
        word = re.sub(r"\W+", "", name) or "kernel"
        own = f"{word}_{next(_numbers)}"
        inputs = len(floats)
        self.forward = self._operator(own, inputs, results, self._made, self._like_reference)
        self.backward = self._operator(
            f"{own}_backward", inputs + 2 * results, sum(floats), self._gradients, self._like_inputs
        )

    def __call__(self, *inputs: Tensor) -> Any:
        return _Kernel.apply(self, *inputs)  # type: ignore[no-untyped-call]

    def _operator(self, name: str, inputs: int, results: int, run: Function, fake: Function) -> Function:
        given = ", ".join(f"Tensor p{k}" for k in range(inputs))
        made = ", ".join(["Tensor"] * results)
        _library.define(
            f"{name}({given}) -> {made if results == 1 else f'({made})'}", tags=(torch.Tag.pt2_compliant_tag,)
        )
        promised: dict[Any, list[tuple[Any, ...]]] = {}

        def promise(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
            key = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
            if key not in promised:
                metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
                promised[key] = [(r.shape, r.stride(), r.dtype) for r in fake(*metas)]
            return promised[key]

        def call(*tensors: Tensor) -> Any:
            kept = {t.untyped_storage().data_ptr() for t in tensors}
            laid = []
            for made, (shape, strides, dtype) in zip(run(*tensors), promise(tensors), strict=True):
                fits = isinstance(made, Tensor) and (made.stride(), made.dtype) == (strides, dtype)
                if not fits or made.storage_offset() or made.untyped_storage().data_ptr() in kept:
                    fresh = torch.empty_strided(shape, strides, dtype=dtype, device=tensors[0].device)
                    made = fresh.zero_() if made is None else fresh.copy_(made)
                kept.add(made.untyped_storage().data_ptr())
                laid.append(made)
            return laid[0] if results == 1 else tuple(laid)

        def faked(*tensors: Tensor) -> Any:
            with torch.autocast(tensors[0].device.type, enabled=False):
                found = tuple(
                    torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=r.device) for r in fake(*tensors)
                )
            return found[0] if results == 1 else found

        _library.impl(name, call, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{PLUGGED}::{name}", faked, lib=_library)
        operator: Function = getattr(getattr(torch.ops, PLUGGED), name).default
        return operator

    def _made(self, *inputs: Tensor) -> tuple[Any, ...]:
        return listed(self.function(*inputs))

    def _like_reference(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return listed(self.reference(*inputs))

    def _gradients(self, *tensors: Tensor) -> list[Any]:
        found = listed(self._backward(*tensors))
        if len(found) != len(self.floats):
            raise ValueError(f"backward gives {len(found)} gradients for {len(self.floats)} inputs")
        return [gradient for gradient, wanted in zip(found, self.floats, strict=True) if wanted]

    def _like_inputs(self, *tensors: Tensor) -> list[Tensor]:
        return [torch.empty_like(x) for x, wanted in zip(tensors, self.floats, strict=False) if wanted]


class _Kernel(torch.autograd.Function):  # type: ignore[misc]
    """Runs the operators; tracing sees them alone."""

    @staticmethod
    def forward(ctx: Any, kernel: Differentiated, *inputs: Tensor) -> Any:
        results = kernel.forward(*inputs)
        ctx.kernel = kernel
        ctx.mark_non_differentiable(*(r for r in listed(results) if not r.is_floating_point()))
        ctx.save_for_backward(*inputs, *listed(results))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = iter(listed(ctx.kernel.backward(*ctx.saved_tensors, *gradients)))
        return (None, *(next(found) if wanted else None for wanted in ctx.kernel.floats))
