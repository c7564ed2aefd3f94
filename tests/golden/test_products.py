"""Plan and Triton of kernels with matrix products for sm_90, word for word: `make golden` writes them.

Texts are of the first schedules: no kernel is built, so none can spill.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.planning import plan
from tests.oracle.program import Arguments, Program

BF16 = torch.bfloat16


def shaped(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> Arguments:
    return lambda: tuple(torch.empty(shape, dtype=dtype) for shape in shapes)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def causal_with_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """A bias per head keeps the library's attention from taking it."""
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    places = torch.arange(q.shape[-2], device=q.device)
    away = places[:, None] - places[None, :]
    s = s - slopes[:, None, None] * away
    return torch.softmax(s.masked_fill(away < 0, -math.inf), -1) @ v


def residual_norm(x: Tensor, w: Tensor, r: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x @ w + r, r.shape[-1:], gain, shift)


def statistics(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w.t()
    return y, y.float().square().mean(-1)


CASES: dict[str, tuple[Callable[..., object], Arguments]] = {
    "linear_gelu": (
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        shaped((8192, 1024), (4096, 1024), (4096,)),
    ),
    "swiglu": (lambda x, g, u: F.silu(x @ g) * (x @ u), shaped((8192, 1024), (1024, 2048), (1024, 2048))),
    "attention_causal": (causal_with_alibi, shaped(*[(4, 16, 2048, 128)] * 3, (16,))),
    "attention_decode": (attention, shaped((1, 8, 4, 128), (1, 8, 8192, 128), (1, 8, 8192, 128))),
    "row_norm": (residual_norm, shaped((8192, 64), (64, 128), (8192, 128), (128,), (128,))),
    "row_logsumexp": (lambda x, w: torch.logsumexp(x @ w.t(), -1), shaped((4096, 64), (32000, 64))),
    "row_states": (statistics, shaped((8192, 256), (8192, 256))),
    "int8_weights": (
        lambda x, w, s: x @ (w.to(x.dtype) * s),
        lambda: (
            torch.empty(16, 8192, dtype=BF16),
            torch.empty(8192, 8192, dtype=torch.int8),
            torch.empty(8192, dtype=BF16),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    (record,) = plan(Program(name, *CASES[name]), "sm_90").records
    assert not record.fallback
    sources = ["\n".join(s for s in k.source.splitlines() if not s.startswith("#   ")) for k in record.kernels]
    assert any("tl.dot(" in source for source in sources), [e.why for e in record.externs]
    golden(f"products/{name}.txt", "\n\n".join([record.plan, *sources]) + "\n")
