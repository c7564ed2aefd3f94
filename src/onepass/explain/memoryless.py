"""Tensors that have no memory: fake ones, or on the `meta` device. Programs of them can be planned.

`made_fake` lends fake tensors of one mode to arguments and modules. Those that were on no device are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .torch_private import FakeTensor, FakeTensorMode


def has_no_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@contextmanager
def made_fake(modules: Iterable[torch.nn.Module], arguments: Any) -> Iterator[Any]:
    """The arguments with fake tensors; the modules have fake parameters and buffers meanwhile."""
    kept = [m for module in modules for m in (module._parameters, module._buffers)]
    places = [(mapping, name, tensor) for mapping in kept for name, tensor in mapping.items() if tensor is not None]
    tensors = [t for t in (*pytree.tree_leaves(arguments), *(t for _, _, t in places)) if isinstance(t, torch.Tensor)]
    modes = {t.fake_mode for t in tensors if isinstance(t, FakeTensor)}
    with FakeTensorMode() if len(modes) != 1 else modes.pop() as mode:
        made = {id(t): t if isinstance(t, FakeTensor) and t.fake_mode is mode else _fake(t) for t in tensors}
        try:
            for mapping, name, tensor in places:
                mapping[name] = made[id(tensor)]
            yield pytree.tree_map(lambda leaf: made.get(id(leaf), leaf), arguments)
        finally:
            for mapping, name, tensor in places:
                mapping[name] = tensor


def _fake(t: torch.Tensor) -> torch.Tensor:
    device = "cpu" if t.is_meta else t.device
    made = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)
    wrapped = torch.nn.Parameter(made, t.requires_grad) if isinstance(t, torch.nn.Parameter) else made
    return wrapped.requires_grad_(t.requires_grad)
