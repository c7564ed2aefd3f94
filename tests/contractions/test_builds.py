"""Attention built for chips that are not here: one kernel that fits, without spills, at real sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.ir.target import find_target
from tests.chips import CHIPS, EVERY_CHIP
from tests.contractions.judging import FREE, make_library_slow, products_left
from tests.contractions.spellings import distance, scores

pytest.importorskip("triton")
SIZES = (64, 80, 96, 256)


@pytest.fixture(autouse=True)
def _slow_library(monkeypatch: pytest.MonkeyPatch) -> None:
    make_library_slow(monkeypatch)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.masked_fill(distance(s) < 0, float("-inf")).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    apart = distance(s)
    return s.masked_fill((apart < 0) | (apart >= 128), float("-inf")).softmax(-1) @ v


def built(function: Callable[..., Tensor], target: str, size: int, dtype: torch.dtype) -> onepass.Explanation:
    """Explained from tensors without contents."""
    with FakeTensorMode(), torch.no_grad():
        arguments = [torch.empty(4, 8, 1024, size, dtype=dtype) for _ in range(3)]
        return onepass.explain(function, *arguments, target=target, options=FREE)


def fits(e: onepass.Explanation, target: str) -> None:
    (kernel,) = e.kernels
    assert not products_left(e)
    assert kernel.registers > 0 and kernel.spilled_bytes == 0, kernel.schedule
    assert kernel.shared_bytes <= find_target(target).shared_bytes, kernel.schedule


@pytest.mark.parametrize("target", EVERY_CHIP)
def test_attention_on_every_chip(target: str) -> None:
    fits(built(causal, target, 128, torch.bfloat16), target)


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("size", SIZES)
def test_causal_attention(target: str, size: int) -> None:
    fits(built(causal, target, size, torch.bfloat16), target)


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("function", [plain, window])
def test_other_masks(function: Callable[..., Tensor], target: str) -> None:
    fits(built(function, target, 64, torch.float16), target)


@pytest.mark.parametrize("target", CHIPS)
def test_float32(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    fits(built(causal, target, 64, torch.float32), target)


@pytest.mark.parametrize("target", CHIPS)
def test_few_queries_are_shared_out_over_keys(target: str) -> None:
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(1, 8, n, 128, dtype=torch.bfloat16) for n in (4, 8192, 8192))
        e = onepass.explain(plain, q, k, v, target=target, options=FREE)
    assert not products_left(e)
    assert [kernel.name.split("_")[-1] for kernel in e.kernels] == ["partial", "finish"]
    assert all(kernel.registers > 0 and kernel.spilled_bytes == 0 for kernel in e.kernels)


RESULTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "product and gelu": lambda p: (p, F.gelu(p)),
    "two": lambda p: (p * 2, F.gelu(p)),
    "other types": lambda p: (p, F.silu(p).float()),
    "transposed": lambda p: (p, F.relu(p).t().contiguous()),
}


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("name", RESULTS)
def test_several_results_of_a_product(name: str, target: str) -> None:
    """On sm_90 the first schedule fits, or the one after it: registers are counted by whichever assembler is there."""
    with FakeTensorMode(), torch.no_grad():
        x, w, b = (torch.empty(s, dtype=torch.bfloat16) for s in ((16384, 256), (4096, 256), (4096,)))
        e = onepass.explain(lambda x, w, b: RESULTS[name](F.linear(x, w, b)), x, w, b, target=target, options=FREE)
    fits(e, target)
    assert target != "sm_90" or len([d for d in e.decisions if d.kind == "spill"]) <= 1


@pytest.mark.parametrize("target", CHIPS)
def test_a_packed_gate(target: str) -> None:
    """Two ranges of one weight's columns: two products of one kernel."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        gate, value = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * value

    with FakeTensorMode(), torch.no_grad():
        x, w = (torch.empty(n, 128, dtype=torch.bfloat16) for n in (16384, 8192))
        e = onepass.explain(function, x, w, target=target, options=FREE)
    fits(e, target)
    assert e.kernels[0].source.count("tl.dot(") == 2
