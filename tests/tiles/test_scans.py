"""Scans as machine code of chips that are not here: no spills, and a tile's states in log steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.resources import FEW_BYTES
from tests.chips import CHIPS, EVERY_CHIP

pytest.importorskip("triton")


def gate(x: Tensor, g: Tensor) -> Tensor:
    return (torch.sigmoid(g) * x).cumsum(-1) * F.silu(g)


def built(function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, target: str) -> onepass.Explanation:
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for _ in range(2)]
        return onepass.explain(function, *inputs, target=target, options={"strict": True, "cache": False})


@pytest.mark.parametrize("target", EVERY_CHIP)
def test_gate(target: str) -> None:
    (kernel,) = built(gate, (4096, 8192), torch.float32, target).graphs[0].kernels
    assert kernel.registers > 0 and kernel.spilled_bytes == 0
    assert "op_scan_sum(" in kernel.source and "op_single_of(" in kernel.source


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[int, ...]]] = {
    "short rows": (gate, (4096, 300)),
    "from the end": (lambda x, g: (x * g).flip(-1).cumsum(-1).flip(-1), (4096, 8192)),
    "columns": (lambda x, g: (x * g).cumsum(0), (512, 131072)),
    "few columns": (lambda x, g: (x * g).cumprod(0), (1 << 22, 4)),
    "extremes": (lambda x, g: x.cummax(-1), (4096, 8192)),
    "exponentials": (lambda x, g: x.logcumsumexp(-1) * g, (4096, 8192)),
    "integers": (lambda x, g: (x > g).cumsum(-1), (4096, 8192)),
    "chunks": (gate, (1, 1 << 26)),
}


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("name", FORMS)
def test_builds(name: str, target: str, dtype: torch.dtype) -> None:
    function, shape = FORMS[name]
    for kernel in built(function, shape, dtype, target).graphs[0].kernels:
        assert kernel.registers > 0 and kernel.spilled_bytes <= FEW_BYTES, kernel.name
