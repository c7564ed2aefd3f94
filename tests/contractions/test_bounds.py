"""Steps of a sweep are left out only where nothing that is summed depends on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onepass

pytest.importorskip("triton")
OPTIONS = {"target": "triton-interpret", "cache": False, "strict": True}


def later(scores: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1], device=scores.device)
    return place[None, :] > place[:, None]


def masked_maximum_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The maximum is causal, the weights are not."""
    scores = (q @ k.transpose(-1, -2)) * 0.2
    top = scores.masked_fill(later(scores), float("-inf")).amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def two_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Half of every weight is causal."""
    scores = (q @ k.transpose(-1, -2)) * 0.2
    masked = scores.masked_fill(later(scores), float("-inf"))
    top = masked.amax(-1, keepdim=True)
    weights = torch.exp(masked - top) + torch.exp(scores - top)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * 0.2
    return scores.masked_fill(later(scores), float("-inf")).softmax(-1) @ v


def sweeps(function: object, *inputs: Tensor) -> int:
    (kernel,) = onepass.explain(function, *inputs, target="sm_90", options={"cache": False}).kernels
    return kernel.source.count("for i")


@pytest.mark.parametrize(("function", "parts"), [(causal, 2), (masked_maximum_alone, 3), (two_weights, 3)])
def test_what_a_mask_leaves_out(function: object, parts: int) -> None:
    """Causal attention has a loop without the mask and one with it; sums that go everywhere come after."""
    inputs = [torch.randn(4, 16, 200, 32, dtype=torch.bfloat16) for _ in range(3)]
    assert sweeps(function, *inputs) == parts
    q, k, v = (torch.randn(1, 2, 200, 32) for _ in range(3))
    ours = torch.compile(function, backend="onepass", options=OPTIONS)(q, k, v)  # type: ignore[call-overload]
    exact = function(q.double(), k.double(), v.double())  # type: ignore[operator]
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_sum_with_terms_before_the_first_of_its_maximum() -> None:
    """No maximum yet, but terms that count: they cannot be carried to a maximum that comes later."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * 0.2
        early = torch.arange(scores.shape[-1], device=scores.device) < 150
        weights = torch.exp(scores - scores.masked_fill(early, float("-inf")).amax(-1, keepdim=True))
        return (weights / weights.sum(-1, keepdim=True)) @ v

    q, k, v = (torch.randn(1, 1, 200, 16) for _ in range(3))
    ours = torch.compile(function, backend="onepass", options=OPTIONS)(q, k, v)
    exact = function(q.double(), k.double(), v.double())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_sum_beside_a_masked_maximum_vanishes_or_not() -> None:
    from onepass.analysis.bounds import vanishes
    from onepass.ir.dtypes import DType
    from onepass.ir.expr import Index, Load, const, pointwise
    from onepass.ir.poly import Axis, Poly
    from onepass.ir.program import Buffer

    row, column = Axis("row", Poly.of(8)), Axis("column", Poly.of(8))
    buffer = Buffer("s", DType.F32, (Poly.of(8), Poly.of(8)), (Poly.of(8), Poly.ONE))
    score = Load(buffer, (row.poly(), column.poly()))
    condition = pointwise("le", Index(column.poly()), Index(row.poly()))
    masked = pointwise("where", condition, score, const(float("-inf"), DType.F32))
    kept = pointwise("exp", pointwise("sub", masked, const(1.0, DType.F32)))
    whole = pointwise("exp", pointwise("sub", score, const(1.0, DType.F32)))
    assert vanishes(kept, condition, ())
    assert vanishes(pointwise("mul", whole, kept), condition, ())
    assert not vanishes(whole, condition, ())
    assert not vanishes(pointwise("add", whole, kept), condition, ())
