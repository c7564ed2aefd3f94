"""Random numbers: Philox by position, reproducible seeds, the right distributions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from onepass.ir.interpret import philox
from onepass.lowering import decomposition_table

from .tracing import Traced


def test_philox_known_answers() -> None:
    """Random123's vector for counter 0, key 0."""
    words = philox(torch.tensor(0), torch.arange(4), 0)
    assert [f"{w:08x}" for w in words.tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_lowered_draws_are_the_eager_ones(dtype: torch.dtype) -> None:
    """The kernel's expression and the eager implementation give the same numbers."""
    seed, options = torch.tensor(1234567890123456789), {"dtype": dtype, "device": torch.device("cpu")}
    for operation in (torch.ops.onepass.uniform, torch.ops.onepass.normal):
        traced = Traced(lambda s, draw=operation: draw(s, 5, [3, 7], **options))
        torch.testing.assert_close(traced(seed), operation(seed, 5, [3, 7], **options))
        assert not traced.program.externs()


def test_manual_seed_reproduces_and_draws_differ() -> None:
    traced = Traced(lambda x: (torch.rand_like(x), torch.rand_like(x)))
    x = torch.empty(50, 40)
    torch.manual_seed(3)
    first = traced(x)
    second = traced(x)
    torch.manual_seed(3)
    again = traced(x)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], second[0])


N = 200_000


@pytest.mark.parametrize(
    ("function", "mean", "variance"),
    [
        (lambda x: torch.rand_like(x), 0.5, 1 / 12),
        (lambda x: torch.randn_like(x), 0.0, 1.0),
        (lambda x: torch.rand(N), 0.5, 1 / 12),
        (lambda x: torch.randn(N), 0.0, 1.0),
        (lambda x: torch.empty_like(x).uniform_(2, 4), 3.0, 4 / 12),
        (lambda x: torch.empty_like(x).normal_(1, 3), 1.0, 9.0),
        (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25),
        (lambda x: torch.empty_like(x).geometric_(0.25), 4.0, 12.0),
        (lambda x: torch.empty_like(x).log_normal_(0.0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, 0.21),
        (lambda x: torch.normal(torch.full_like(x, 2.0), 0.5), 2.0, 0.25),
        (lambda x: F.dropout(torch.ones_like(x), 0.25), 1.0, 1 / 3),
    ],
)
def test_moments(function: object, mean: float, variance: float) -> None:
    torch.manual_seed(0)
    drawn = Traced(function)(torch.empty(N))  # type: ignore[arg-type]
    assert abs(drawn.mean().item() - mean) < 5 * math.sqrt(variance / N) + 1e-6
    assert abs(drawn.var().item() / variance - 1) < 0.05


def test_sixteen_bit_uniforms_stay_below_one() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        drawn = Traced(lambda x: torch.rand_like(x))(torch.empty(N, dtype=dtype))
        assert drawn.min() >= 0 and drawn.max() < 1


def test_dropout_mask_in_backward_is_the_forward_one() -> None:
    x = torch.randn(100, 100, requires_grad=True)
    y = Traced(lambda x: F.dropout(x, 0.5))(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient * x, y)


def test_a_users_generator_is_left_to_eager() -> None:
    table = decomposition_table()
    rule = table[torch.ops.aten.bernoulli.p]
    assert rule(torch.ones(3), 0.5, generator=torch.Generator()) is NotImplemented
