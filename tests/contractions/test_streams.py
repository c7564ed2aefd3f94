"""Few rows: a matrix larger than the chip's cache is copied by hardware, and the cache is told to give it up first."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.planner.chooser import Chooser

pytest.importorskip("triton")
from onepass.runtime import triton_kernels
from onepass.runtime.assembler import given_up

FREE = {"strict": True, "cache": False, "tune": "off"}


def rand(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w)) * 1.0711


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    return torch.softmax((q @ k.mT) * 0.0883, -1) @ v


def shared(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(torch.matmul(x, w[None])) * 1.0712


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]], bool]] = {
    "large": (linear, lambda: (rand(16, 8192), rand(8192, 8192)), True),
    "stays in the cache": (linear, lambda: (rand(16, 2048), rand(2048, 2048)), False),
    "read by many": (shared, lambda: (rand(8, 4, 16, 8192), rand(4, 8192, 2048)), False),
    "decoding": (attention, lambda: (rand(1, 32, 1, 128), rand(1, 8, 32768, 128), rand(1, 8, 32768, 128)), True),
    "decoding, far more": (
        attention,
        lambda: (rand(4, 32, 1, 128), rand(4, 8, 16384, 128), rand(4, 8, 16384, 128)),
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_streams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, make, streams = CASES[name]
    marked: list[str] = []

    def kept(text: str) -> str:
        marked.append(given_up(text))
        return marked[-1]

    monkeypatch.setattr(triton_kernels, "given_up", kept)
    monkeypatch.setattr(Chooser, "apart", lambda *_: math.inf)  # whatever the library takes
    with FakeTensorMode():
        e = onepass.explain(function, *make(), target="sm_90", options=FREE)
    assert (".load([" in e.kernels[0].source) == streams
    assert len(marked) == streams
    for text in marked:
        copies = [line for line in text.splitlines() if "cp.async.bulk.tensor" in line and ".global.mbarrier" in line]
        assert copies and all("L2::cache_hint" in line and line.endswith(", %never;") for line in copies)
        assert text.count("createpolicy.fractional.L2::evict_first.b64 %never") == 1


def test_a_text_without_copies_stays() -> None:
    assert given_up("{\n\t.reg .b32 %r<2>;\n\tret;\n}\n") == "{\n\t.reg .b32 %r<2>;\n\tret;\n}\n"
