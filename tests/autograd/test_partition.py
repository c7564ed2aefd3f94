"""What backward saves: statistics, seeds and inputs; never a second copy, never an overwritten value."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import onepass

STRICT = {"strict": True, "cache": False}


def forward_of(function: object, *arguments: torch.Tensor) -> int:
    e = onepass.explain(function, *arguments, options=STRICT)  # type: ignore[arg-type]
    (forward,) = (g for g in e.graphs if g.direction == "forward")
    return forward.saved_bytes


def test_dropout_saves_its_seed_only() -> None:
    x = torch.randn(256, 256, requires_grad=True)
    assert forward_of(lambda x: F.dropout(x, 0.3) * 2, x) == 8


def test_cross_entropy_saves_statistics() -> None:
    x = torch.randn(128, 1000, requires_grad=True)
    assert forward_of(lambda x: F.cross_entropy(x, torch.arange(128)), x) <= 128 * 8 + 64


def test_an_input_overwritten_in_forward_keeps_its_value_for_backward() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product = x * (x - y)
        y[:-1] += y[1:].clone()
        return product

    results = []
    for run in (step, torch.compile(step, backend="onepass", options=STRICT)):
        torch.manual_seed(0)
        x, y = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4)
        run(x, y).sum().backward()
        results.append((x.grad, y))
    torch.testing.assert_close(results[0], results[1])
