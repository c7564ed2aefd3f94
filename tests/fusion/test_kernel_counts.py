"""How many kernels well-known programs take at 4096 x 4096, and that spelling does not change the plan.

A kernel is a generated launch; a split reduction counts two; drawing a seed launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unbuilt import unbuilt
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass

N = 4096


def full(*, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(N, N, requires_grad=requires_grad)


def row(*, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(N, requires_grad=requires_grad)


def explained(function: Callable[..., Any], *args: Any) -> onepass.Explanation:
    with unbuilt():
        e = onepass.explain(function, *args, options={"strict": True})
    assert not [g.fallback for g in e.graphs if g.fallback]
    return e


def hand_softmax(x: torch.Tensor) -> torch.Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def rms_norm_silu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w)


def bias_dropout_residual_norm(
    x: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    return F.layer_norm(residual + F.dropout(x + b, 0.1), (N,), w, c)


def concatenate_and_narrow(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.cat([x, torch.zeros_like(x)])
    return z, x.half()


# name -> (function, arguments, at most this many kernels)
COUNTS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], int]] = {
    "four point-wise": (lambda x: ((x + 1).relu() * 2).exp(), lambda: (full(),), 1),
    "sigmoid times tanh": (lambda x: torch.sigmoid(x) * torch.tanh(x + 1), lambda: (full(),), 1),
    "bias gelu dropout": (lambda x, b: F.dropout(F.gelu(x + b), 0.1), lambda: (full(), row()), 1),
    "bias dropout residual norm": (bias_dropout_residual_norm, lambda: (full(), row(), full(), row(), row()), 1),
    "rms norm silu": (rms_norm_silu, lambda: (full(), row()), 1),
    "softmax": (lambda x: x.softmax(-1), lambda: (full(),), 1),
    "softmax by hand": (hand_softmax, lambda: (full(),), 1),
    "log-softmax": (lambda x: x.log_softmax(-1), lambda: (full(),), 1),
    "softmax and logsumexp": (lambda x: (x.softmax(-1), x.logsumexp(-1)), lambda: (full(),), 1),
    "siblings": (lambda a, b, c: (F.relu(a + b), torch.sigmoid(a * c)), lambda: (full(), full(), full()), 1),
    "cat and half": (concatenate_and_narrow, lambda: (full(),), 1),
    "relu and its transpose": (lambda x: (F.relu(x), F.relu(x).t().contiguous()), lambda: (full(),), 1),
    "three statistics": (lambda x: (x.abs().max(), x.abs().mean(), x.square().mean()), lambda: (full(),), 2),
    "cross-entropy": (F.cross_entropy, lambda: (full(), torch.randint(0, N, (N,))), 2),
    "group norm silu": (
        lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
        lambda: (torch.randn(16, 64, 128, 128), torch.randn(64), torch.randn(64)),
        2,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_kernel_count(name: str) -> None:
    function, arguments, most = COUNTS[name]
    with FakeTensorMode(), torch.no_grad():
        e = explained(function, *arguments())
    assert 1 <= len(e.kernels) <= most, [k.name for k in e.kernels]
    library = [x.op for x in e.externs if "seed" not in x.op]
    assert not library, library


@pytest.mark.parametrize("name", ["four point-wise", "softmax", "rms norm silu", "siblings", "bias gelu dropout"])
def test_no_more_bytes_than_inputs_and_outputs(name: str) -> None:
    function, arguments, _ = COUNTS[name]
    with FakeTensorMode(), torch.no_grad():
        e = explained(function, *arguments())
    assert e.bytes_moved <= 1.02 * e.bytes_minimum
    assert e.bytes_unfused > e.bytes_moved


def picture(function: Callable[..., Any], *args: Any) -> list[tuple[int, int, str]]:
    """What a plan does, names aside: bytes and schedule of each kernel."""
    e = explained(function, *args)
    return sorted((k.bytes_read, k.bytes_written, k.schedule) for k in e.kernels)


def first_then_second(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = (a + b).relu()
    q = (a * b).sum(-1)
    return p, q


def second_then_first(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = (b * a).sum(-1)
    p = (b + a).relu()
    return p, q


def var_mean(x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def var_and_mean(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = x.var(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


SAME = {
    "commuted": (lambda a, b: a * 2 + b.exp() * a, lambda a, b: a * b.exp() + 2 * a),
    "reordered": (first_then_second, second_then_first),
    "silu": (lambda a, b: F.silu(a) + b, lambda a, b: a * torch.sigmoid(a) + b),
    "var_mean": (lambda a, b: var_mean(a) + b, lambda a, b: var_and_mean(a) + b),
    "softmax": (lambda a, b: a.softmax(-1) * b, lambda a, b: hand_softmax(a) * b),
    "square": (lambda a, b: (a - b).square().mean(-1), lambda a, b: ((a - b) ** 2).mean(-1)),
    "relu": (lambda a, b: F.relu(a + b), lambda a, b: torch.clamp_min(a + b, 0)),
    "views": (lambda a, b: (a.t() + b).t() * 2, lambda a, b: (a + b.t()) * 2),
    "in place": (lambda a, b: (a + b).mul_(2).relu_(), lambda a, b: ((a + b) * 2).relu()),
    "layer norm": (lambda a, b: F.layer_norm(a, (N,)) + b, lambda a, b: b + F.layer_norm(a, (N,), None, None)),
}


@pytest.mark.parametrize("name", SAME)
def test_spelling_does_not_change_the_plan(name: str) -> None:
    left, right = SAME[name]
    with FakeTensorMode(), torch.no_grad():
        a, b = full(), full()
        assert picture(left, a, b) == picture(right, a, b)


def forward(e: onepass.Explanation) -> Any:
    return next(g for g in e.graphs if g.direction == "forward")


def backward(e: onepass.Explanation) -> Any:
    return next(g for g in e.graphs if g.direction == "backward")


FULL_SIZE = N * N * 4


def test_layer_norm_saves_statistics_only() -> None:
    e = explained(
        lambda x, w, b: F.layer_norm(x, (N,), w, b),
        full(requires_grad=True),
        row(requires_grad=True),
        row(requires_grad=True),
    )
    assert forward(e).saved_bytes <= 4 * N * 4, "a few numbers per row"
    assert len(forward(e).kernels) == 1
    assert len(backward(e).kernels) <= 3


def test_cross_entropy_saves_statistics_only() -> None:
    with FakeTensorMode():
        e = explained(F.cross_entropy, full(requires_grad=True), torch.randint(0, N, (N,)))
    assert forward(e).saved_bytes <= 4 * N * 4
    assert len(backward(e).kernels) == 1
    # Backward: the logits once in, their gradient once out.
    assert backward(e).bytes_moved <= 2.05 * FULL_SIZE


def test_dropout_mask_is_not_saved() -> None:
    with FakeTensorMode():
        e = explained(lambda x: F.dropout(x, 0.3) * 2, full(requires_grad=True))
    assert forward(e).saved_bytes <= 64, "a seed"
    assert len(backward(e).kernels) == 1


def test_softmax_backward() -> None:
    with FakeTensorMode():
        e = explained(lambda x: x.softmax(-1), full(requires_grad=True))
    assert len(forward(e).kernels) == 1 and len(backward(e).kernels) == 1
    assert forward(e).saved_bytes <= FULL_SIZE


def test_operations_name_the_users_lines() -> None:
    e = explained(lambda x: F.relu(x + 1), full())
    lines = [operation["line"] for operation in e.kernels[0].operations]
    assert any("test_kernel_counts.py" in line for line in lines), lines


def test_one_kernel_per_operation_when_asked() -> None:
    with torch.no_grad():
        e = onepass.explain(lambda x: ((x + 1).relu() * 2).exp(), torch.randn(64, 64), options={"fuse": False})
    assert len(e.kernels) == 4


class TestReasons:
    """What was not fused says why, with the deciding number."""

    def test_matmul_goes_to_the_library(self) -> None:
        with torch.no_grad():
            e = explained(lambda a, b: F.relu(a @ b), torch.randn(64, 64), torch.randn(64, 64))
        assert [x.op for x in e.externs] == ["aten.mm.default"]
        assert "library" in e.externs[0].why
        assert len(e.kernels) == 1

    def test_sort_is_an_extern_with_a_reason(self) -> None:
        with torch.no_grad():
            e = explained(lambda x: (x * 2).sort(-1)[0] + 1, torch.randn(32, 32))
        (sort,) = [x for x in e.externs if "sort" in x.op]
        assert sort.why
        assert len(e.kernels) == 2

    def test_rejections_carry_reasons_and_numbers(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            column = x.exp().sum(0)
            return (x.exp() / column).sum(1), column

        with torch.no_grad():
            e = explained(function, torch.randn(2048, 2048))
        rejected = [d for d in e.decisions if not d.accepted]
        assert rejected
        for decision in e.decisions:
            assert decision.reason and decision.producer and decision.consumer
        assert any(any(c.isdigit() for c in d.reason) or d.saved_us or d.bytes_saved for d in rejected)

    def test_accepted_fusions_say_what_they_save(self) -> None:
        with torch.no_grad():
            e = explained(lambda x: F.relu(x + 1).exp(), full())
        accepted = [d for d in e.decisions if d.accepted]
        assert accepted and any(d.bytes_saved >= FULL_SIZE for d in accepted)
