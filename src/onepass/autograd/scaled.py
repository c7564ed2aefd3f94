"""`onepass::scaled`: a gradient that forward saved, times the tangent that backward is given.

The operation is made in the saved tensor itself where nothing will read that again, so that a weight's gradient is not
there twice. Functional to all who trace it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_private import graph_is_kept

_library = torch.library.Library("onepass", "FRAGMENT")
_library.define("scaled(Tensor x, Tensor factor) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    if graph_is_kept():
        return x * factor
    if factor.device.type == "cpu" and factor.item() == 1:
        return x
    return x.mul_(factor)


def _fake_scaled(x: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


_library.impl("scaled", _scaled, "CompositeExplicitAutograd")
torch.library.register_fake("onepass::scaled", _fake_scaled, lib=_library)
SCALED = torch.ops.onepass.scaled.default
