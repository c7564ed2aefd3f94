"""Positions in kernels of tiles: values beyond 32 bits, offsets of far buffers, comparisons of rows and columns."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import onepass
from onepass.ir.poly import Axis, Poly, Symbol, is_far
from tests.unbuilt import unbuilt

pytest.importorskip("triton")

FACTOR = 3_000_000_000
FREE = {"cache": False, "strict": True}


def scaled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.arange(x.shape[0]) * FACTOR
    opposite = torch.arange(x.shape[0]).flip(0) * (FACTOR - 1)
    return torch.where(places >= 3 * FACTOR, x, 0), places.to(torch.float64) + x, torch.where(places >= opposite, x, 0)


def test_positions_beyond_32_bits() -> None:
    x = torch.rand(37, dtype=torch.float64)
    options = {"target": "triton-interpret", "cache": False, "strict": True}
    ours = torch.compile(scaled, backend="onepass", options=options)(x)
    for got, exact in zip(ours, scaled(x), strict=True):
        assert torch.equal(got, exact)


def test_what_is_far() -> None:
    row = Axis("row", Poly.of(1 << 16))
    assert not is_far(row * 32767)
    assert is_far(row * 32769)
    assert is_far(-(row * 32769))
    assert not is_far((row * 1_000_000) % 7)
    assert is_far(row * Symbol("n"))


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.dropout(torch.softmax(q @ k.mT, -1), 0.1, True) @ v


def test_a_far_position_that_is_divided() -> None:
    """No buffer is far: a part of 3 * 2^30 elements, none of them stored, of which each is one of three."""
    for flip in (False, True):

        def function(x: Tensor, flip: bool = flip) -> Tensor:
            far = x.repeat(1 << 30).view(3 << 20, 1 << 10)
            return (far.flip(0) if flip else far)[::100_000, :7] * 2

        x = torch.tensor([1.0, 2.0, 3.0])
        run = torch.compile(function, backend="onepass", options={"target": "triton-interpret", **FREE})
        row = torch.arange(0, 3 << 20, 100_000)
        row = (3 << 20) - 1 - row if flip else row
        assert torch.equal(run(x), 2 * x[(row[:, None] * 1024 + torch.arange(7)) % 3])


def test_a_far_position_that_is_drawn_for() -> None:
    """Attention with dropout: forward and backward must draw the same words, whatever their tiles."""
    shape = (16, 32, 4096, 64)  # 2^33 probabilities
    with FakeTensorMode(), unbuilt():
        tensors = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(3)]
        (graph,) = onepass.explain(dropped, *tensors, target="sm_90", options=FREE).graphs
    (line,) = {s for kernel in graph.kernels for s in kernel.source.splitlines() if "= op_random" in s}
    assert "tl.int64" in line, line


def source_of(function: object, *shapes: tuple[int, ...]) -> str:
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        explanation = onepass.explain(function, *tensors, target="sm_90", options={"cache": False})  # type: ignore[arg-type]
    return explanation.graphs[0].kernels[0].source


def test_lanes_of_a_far_buffer_have_32_bits() -> None:
    """What all lanes share is one number of 64 bits beside the pointer."""
    source = source_of(lambda x: torch.softmax(x, -1), (1 << 20, 4096))
    (opened,) = set(re.findall(r"(\w+) = tl\.arange", source))
    addresses = re.findall(r"tl\.(?:load|store)\((.*)", source)
    assert len(addresses) == 2
    for address in addresses:
        assert re.search(rf"tl\.int64\) \* \d+\) \+ {opened}\b", address), address


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(q.shape[-2])
    allowed = places[:, None] - places[None, :] >= 0
    scores = (q @ k.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, -1) @ v


def test_rows_and_columns_are_compared_each_on_its_side() -> None:
    """A tile of all differences would stay in registers through the loop."""
    shape = (4, 16, 1024, 64)
    (compared,) = re.findall(r"= \((.* >= .*)\)\n", source_of(causal, shape, shape, shape))
    left, right = compared.split(" >= ")
    axes = [set(re.findall(r"\btc\d+[rc]\b", side)) for side in (left, right)]
    assert [len(a) for a in axes] == [1, 1], compared
    assert "tl.int64" not in compared


def test_kernels_after_the_first_wait_by_themselves() -> None:
    """Waiting lets a launch begin early; the first kernel of a graph has nothing to gain."""
    x = torch.zeros(3, 1 << 20, dtype=torch.bfloat16)
    kernels = onepass.explain(lambda x: x.sum(-1), x, target="sm_90", options={"cache": False}).kernels
    older = onepass.explain(lambda x: x.sum(-1), x, target="sm_80", options={"cache": False}).kernels
    assert ["op_wait_for_last_kernel()" in k.source for k in kernels] == [False, True]
    assert not any("op_wait_for_last_kernel" in k.source for k in older)
