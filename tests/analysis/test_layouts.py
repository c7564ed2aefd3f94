"""Internal values are stored in the order in which they are read; nobody outside sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.tuning.planned import traced
from torch import Tensor

from onepass.analysis.layouts import lay_out
from onepass.ir.program import Program
from onepass.lowering.graph import lower_graph


def lowered(function: Callable[..., Tensor], *inputs: Tensor) -> Program:
    return lower_graph(traced(function, *inputs, dynamic=False), precision="fused", strict=True)


def strides(program: Program) -> dict[str, list[int]]:
    """By the operation that made a value."""
    return {d.origin.op: [int(str(s)) for s in d.buffer.strides] for d in program.defines()}


def biased(scores: Tensor, places: Tensor, table: Tensor) -> Tensor:
    """A relative bias as embeddings give it: heads last."""
    return scores + torch.nn.functional.embedding(places, table).permute(2, 0, 1)


def masked(scores: Tensor, places: Tensor, table: Tensor, seen: Tensor) -> Tensor:
    bias = torch.nn.functional.embedding(places, table).permute(2, 0, 1)[None]
    return scores + torch.where(seen, bias, -1e4)


def both_ways(scores: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A bias that is read in two orders."""
    return scores + bias.permute(2, 0, 1), scores.mT.contiguous() + bias.permute(2, 1, 0)


PLACES = torch.arange(7)[:, None] - torch.arange(5) + 4
TABLE = torch.randn(12, 3)


def test_a_value_that_a_batch_shares_is_laid_out_for_it() -> None:
    before = lowered(biased, torch.randn(8, 3, 7, 5), PLACES, TABLE)
    assert strides(before)["aten.embedding.default"] == [15, 3, 1]
    assert strides(lay_out(before))["aten.embedding.default"] == [5, 1, 35]


def test_values_of_the_size_of_their_reader_follow_it() -> None:
    """`where` keeps the strides of its permuted operand, in eager and in a trace; the scores are in order."""
    inputs = torch.randn(8, 3, 7, 5), PLACES, TABLE, torch.rand(8, 1, 7, 5) > 0.2
    before = lowered(masked, *inputs)
    assert strides(before)["aten.where.self"] == [105, 1, 15, 3]
    after = strides(lay_out(before))
    assert after["aten.where.self"] == [105, 35, 5, 1] and after["aten.embedding.default"] == [5, 1, 35]


@pytest.mark.parametrize(
    "function",
    [
        lambda s, p, t: biased(s[:2], p, t),  # two positions for each element: no more than the rest
        lambda s, p, t: (biased(s, p, t), torch.nn.functional.embedding(p, t)),  # the caller sees it
        lambda s, p, t: both_ways(s, torch.nn.functional.embedding(p, t)),
    ],
)
def test_others_stay_as_they_are(function: Callable[..., Tensor]) -> None:
    before = lowered(function, torch.randn(8, 3, 7, 5), PLACES, TABLE)
    assert lay_out(before).statements == before.statements


def channels_last(x: Tensor) -> Tensor:
    y = torch.sin(x) * 2
    return torch.sort(y.contiguous(memory_format=torch.channels_last), 0).values + y


def returned(x: Tensor) -> tuple[Tensor, Tensor]:
    """The caller sees both."""
    y = torch.sin(x) * 2
    return y, y.contiguous(memory_format=torch.channels_last)


def changed(x: Tensor) -> tuple[Tensor, Tensor]:
    """A call adds to the copy in place, and the value itself is read after that."""
    y = torch.sin(x) * 2
    z = y.contiguous(memory_format=torch.channels_last)
    z = z.index_put((torch.tensor([0, 0, -1]),), x[:1].expand(3, -1, -1, -1), accumulate=True)
    return z, z.sum() + y


X = torch.randn(2, 3, 5, 7)


def test_a_value_is_stored_as_a_call_reads_it() -> None:
    before = lowered(channels_last, X)
    assert strides(before)["aten.clone.default"] == [105, 1, 21, 3]
    after = strides(lay_out(before))
    assert "aten.clone.default" not in after and after["aten.mul.Tensor"] == [105, 1, 21, 3]


def test_a_value_that_the_caller_sees_stays_as_it_is() -> None:
    before = lowered(returned, X)
    assert lay_out(before).statements == before.statements


@pytest.mark.parametrize("target", ["cpu", "triton-interpret"])
@pytest.mark.parametrize("function", [channels_last, returned, changed])
def test_copied_values_are_those_of_eager(target: str, function: Callable[..., Any]) -> None:
    compiled = torch.compile(function, backend="onepass", options={"target": target, "cache": False, "strict": True})
    for x in (X, X[:1], X[:, :1], X[..., :1], X.contiguous(memory_format=torch.channels_last)):
        torch._dynamo.reset()
        ours, eagers = compiled(x), function(x)
        torch.testing.assert_close(ours, eagers)
        for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (ours, eagers)), strict=True):
            assert a.stride() == b.stride()


@pytest.mark.parametrize("target", ["cpu", "triton-interpret"])
def test_values_are_those_of_eager(target: str) -> None:
    inputs = torch.randn(8, 3, 7, 5), PLACES, TABLE, torch.rand(8, 1, 7, 5) > 0.2
    compiled = torch.compile(masked, backend="onepass", options={"target": target, "cache": False, "fuse": False})
    torch.testing.assert_close(compiled(*inputs), masked(*inputs))
