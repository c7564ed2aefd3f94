"""The operators that draw random numbers, as eager runs them: a seed on the host, numbers computed from it.

`onepass::seed` takes a seed from torch's CPU generator (so `torch.manual_seed` reproduces); `onepass::uniform` and
`onepass::normal` are pure. Element i of the row-major order is lane i mod 4 of Philox4x32-10(counter = (i div 4,
stream), key = seed): the very words a kernel makes. Importing this module defines the operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .interpret import philox, uniform_of_words

_library = torch.library.Library("onepass", "DEF")
_library.define("seed(int number) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
for _name in ("uniform", "normal"):
    _library.define(
        f"{_name}(Tensor seed, int stream, SymInt[] size, *, ScalarType dtype, Device device) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )

# Bits of a 16-bit float in [0.5, 1): a uniform number keeps so many, lest it round up to 1.
PRECISION: dict[object, int] = {torch.float16: 11, torch.bfloat16: 8}


def _uniforms(seed: Tensor, stream: int, size: Sequence[int], dtype: Any, device: Any, count: int) -> list[Tensor]:
    """`count` uniform numbers for each element."""
    index = torch.arange(math.prod(size), device=device).reshape(tuple(size)) * count
    return [uniform_of_words(philox(seed.to(device), index + k, stream), dtype) for k in range(count)]


def _uniform(seed: Tensor, stream: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    (value,) = _uniforms(seed, stream, size, dtype, device, 1)
    bits = PRECISION.get(dtype)
    return (value if bits is None else (value * 2**bits).floor() * 2.0**-bits).to(dtype)


def _normal(seed: Tensor, stream: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    first, second = _uniforms(seed, stream, size, dtype, device, 2)
    radius = (-2 * (1 - first).log()).sqrt()
    return (radius * (2 * math.pi * second).cos()).to(dtype)


def _empty(seed: Tensor, stream: int, size: Sequence[int], **options: Any) -> Tensor:
    return torch.empty(size, **options)


for _name, _eager, _fake in (
    ("seed", lambda number: torch.randint(-(2**63), 2**63 - 1, ()), lambda number: torch.empty((), dtype=torch.int64)),
    ("uniform", _uniform, _empty),
    ("normal", _normal, _empty),
):
    _library.impl(_name, _eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"onepass::{_name}", _fake, lib=_library)
