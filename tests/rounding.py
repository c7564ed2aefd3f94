"""Eager as it might have rounded: how much of a difference is the program's own sensitivity.

A gradient through a norm of two nearly equal numbers multiplies the last bit of each by thousands; eager's
error there is one draw of many. `Rounding` makes more draws: every operation's result that float64 says is
not exact moves by up to one unit in the last place. `decomposed` makes the operations small, so that a kernel of
eager's that is many of them rounds in many places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .checking import FLOATS, Compiler, to_float64

DRAWS = 8  # of eager's rounding, where a result exceeds twice the error of the one it makes


def decomposed() -> Compiler:
    """Eager in torch's own small operations."""

    def as_it_is(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return module

    compiler: Compiler = aot_autograd(fw_compiler=as_it_is, decompositions=core_aten_decompositions())
    return compiler


class Rounding(TorchDispatchMode):
    """While active, inexact results of operations that write nothing and draw nothing move at random."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags or _is_view(func):
            return result
        exact = _in_float64(func, args, kwargs or {})
        for i, value in enumerate(pytree.tree_leaves(result)):
            if isinstance(value, torch.Tensor) and value.dtype in FLOATS and value.layout is torch.strided:
                self._move(value, exact[i] if exact is not None and i < len(exact) else None)
        return result

    def _move(self, value: torch.Tensor, exact: Any) -> None:
        self.seed += 1
        generator = torch.Generator("cpu").manual_seed(self.seed)
        draw = torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        moved = (value.double() * (1 + (2 * draw - 1) * torch.finfo(value.dtype).eps)).to(value.dtype)
        if isinstance(exact, torch.Tensor) and exact.shape == value.shape:
            moved = torch.where(value.double() == exact.double(), value, moved)
        value.copy_(moved)


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None for r in func._schema.returns)


def _in_float64(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """The results of the operation on widened tensors; None where it does not take them."""
    wide = pytree.tree_map_only(torch.Tensor, to_float64, (args, kwargs))
    try:
        return pytree.tree_leaves(func(*wide[0], **wide[1]))
    except (RuntimeError, NotImplementedError, ValueError, IndexError):
        return None
