"""Dropout: one mask for forward and backward, new each call, the seed's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.checking import compiled


def test_backward_uses_the_forward_mask() -> None:
    x = torch.ones(64, 100, requires_grad=True)
    out = compiled(lambda x: F.dropout(x, 0.4))(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach()), "the same elements live, scaled alike"


def test_mask_is_recomputed_not_kept_by_the_caller() -> None:
    """Random state that moves between forward and backward must not change the mask."""
    x = torch.ones(64, 100, requires_grad=True)
    out = compiled(lambda x: F.dropout(x.sin(), 0.4))(x)
    torch.manual_seed(99)
    torch.rand(7)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, out != 0)


def test_seed_reproduces_and_calls_differ() -> None:
    run = compiled(lambda x: F.dropout(x + 1, 0.5))
    x = torch.zeros(50, 50)
    torch.manual_seed(7)
    first, second = run(x), run(x)
    torch.manual_seed(7)
    assert torch.equal(run(x), first)
    assert torch.equal(run(x), second)
    assert not torch.equal(first, second)


def test_several_dropouts_differ() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.dropout(x, 0.5), F.dropout(x, 0.5), F.dropout(x, 0.5)

    a, b, c = compiled(function)(torch.ones(100, 100))
    for left, right in ((a, b), (b, c), (a, c)):
        agreement = (left == right).float().mean().item()
        assert 0.45 < agreement < 0.55


def test_layers_draw_apart() -> None:
    model = torch.nn.Sequential(*[torch.nn.Dropout(0.5) for _ in range(3)])
    out = compiled(model)(torch.ones(200, 200))
    assert abs((out != 0).float().mean().item() - 0.125) < 0.01
    assert set(out.unique().tolist()) == {0.0, 8.0}


def test_rate() -> None:
    for rate in (0.1, 0.5, 0.9):
        out = compiled(lambda x, rate=rate: F.dropout(x, rate))(torch.ones(500, 500))
        assert abs((out == 0).float().mean().item() - rate) < 0.005
        assert abs(out.mean().item() - 1) < 0.02


def test_extremes_and_evaluation() -> None:
    x = torch.randn(9, 9)
    assert torch.equal(compiled(lambda x: F.dropout(x, 0.0))(x), x)
    assert torch.equal(compiled(lambda x: F.dropout(x, 1.0))(x), torch.zeros_like(x))
    assert torch.equal(compiled(lambda x: F.dropout(x, 0.5, training=False))(x), x)


def test_training_goes_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    run = compiled(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(64, 8)
    target = x.sum(1, keepdim=True)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = F.mse_loss(run(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_order_with_other_random_operators() -> None:
    """An operator that runs as eager does and one in a kernel draw in program order, from one generator."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.multinomial(torch.ones(50), 5), torch.rand_like(x)

    run = compiled(function)
    x = torch.zeros(20)
    torch.manual_seed(3)
    first = run(x)
    torch.manual_seed(3)
    again = run(x)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[2])
