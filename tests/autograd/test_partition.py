"""What backward saves: statistics, seeds and inputs; never a second copy, never an overwritten value."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.checking import backend_callable, compile_direct
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import onepass
from onepass.autograd import partition
from onepass.autograd.between import COMPUTE_AGAIN
from onepass.autograd.merge import merge_equal
from onepass.backend import record_compilations

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


@pytest.mark.parametrize("size", [8, 40, 64, 100])
@pytest.mark.parametrize("largest", [torch.amax, torch.amin, lambda x, _: x.max()])
def test_what_a_maximum_is_taken_of_is_saved(largest: Callable[..., torch.Tensor], size: int) -> None:
    """Computed again by other instructions it may be off by its last bit: no element would be the largest."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return largest(torch.sin(x) * y, -1)

    gradients = []
    for run in (step, torch.compile(step, backend="onepass", options=STRICT)):
        torch.manual_seed(0)
        x, y = (torch.randn(800, size, requires_grad=True) for _ in range(2))
        run(x, y).sum().backward()
        gradients.append((x.grad, y.grad))
    torch.testing.assert_close(*gradients)
    x, y = (torch.randn(800, size, requires_grad=True) for _ in range(2))
    assert forward_of(step, x, y) >= 4 * 800 * size


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


def test_an_input_that_only_changes_its_shape_stays_a_view_of_its_storage() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        y.transpose_(0, -1)
        return [(x - y).square().exp()]

    def inputs() -> list[torch.Tensor]:
        return [torch.zeros(5, 1, requires_grad=True), torch.linspace(0, 1, 8)[3:].view(5, 1)]

    run = compile_direct(step, inputs(), backend_callable("onepass"))  # dynamo would change the shape itself
    (x, y), (mine, own) = inputs(), inputs()
    (expected,), (found,) = step(x, y), run(mine, own)
    torch.testing.assert_close((found, own), (expected, y))
    assert (own.stride(), own.storage_offset()) == (y.stride(), y.storage_offset())
    torch.testing.assert_close(*(torch.autograd.grad(r.sum(), leaf)[0] for r, leaf in ((found, mine), (expected, x))))


def test_products_that_cannot_be_computed_again_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's min-cut fails with values marked to be computed again, it is asked without these marks."""
    cut, marks = partition.min_cut_rematerialization_partition, list[bool]()

    def fails(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        (product, *_) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
        marks.append(product.meta.get("recompute") is COMPUTE_AGAIN["recompute"])
        if marks[-1]:
            raise RuntimeError("no cut")
        return cut(joint, *args, **kwargs)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v

    monkeypatch.setattr(partition, "min_cut_rematerialization_partition", fails)
    options = {"cache": False, "strict": False, "target": "triton-interpret"}
    inputs = [torch.randn(2, 64, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    with record_compilations() as records:
        found = torch.autograd.grad(torch.compile(attention, backend="onepass", options=options)(*inputs).sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(attention(*inputs).sum(), inputs), rtol=1e-2, atol=1e-2)
    assert marks == [True, False] and not any(r.fallback for r in records)
    assert any("not computed again: RuntimeError: no cut" in d.reason for r in records for d in r.decisions)


def test_equal_values_are_merged() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * 2 + x.exp().sin() - (x * 0.0) / (x * -0.0)).sum()  # 0.0 and -0.0 are not equal

    graph = make_fx(function)(torch.ones(3)).graph
    merge_equal(graph)
    names = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    assert names.count("aten.exp.default") == 1 and names.count("aten.mul.Tensor") == 3


def test_results_and_random_values_stay_apart() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x + 1, torch.rand_like(x) - torch.rand_like(x)

    graph = make_fx(function)(torch.ones(3)).graph
    merge_equal(graph)
    names = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    assert names.count("aten.add.Tensor") == 2 and names.count("aten.rand_like.default") == 2


@pytest.mark.rotating
def test_training_does_not_import_inductor() -> None:
    """Its modules take longer to import than most programs to compile."""
    code = (
        "import sys, torch, onepass; x = torch.ones(3, 4, requires_grad=True)\n"
        "torch.compile(lambda x: torch.softmax(x, -1).square().sum(), backend='onepass')(x).backward()\n"
        "sys.exit('torch._inductor.lowering' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _mask_itself(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.masked_fill_(x > 0, 0.5)
    return (x * y).softmax(-1)


def _write_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y.tanh())
    y.copy_(x * 2)
    return (x * y).sum()


@pytest.mark.parametrize("function", [_mask_itself, _write_both])
def test_backward_does_not_read_what_is_overwritten_after_forward(function: Callable[..., torch.Tensor]) -> None:
    """Torch writes the new value into an input that needs gradients when the forward graph has run."""

    def run(f: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        given = [torch.linspace(-2, 2, 12).view(3, 4).requires_grad_(), torch.linspace(1, 3, 12).view(3, 4)]
        inputs = [x.requires_grad_() * 1 for x in given]
        out = f(*inputs)
        loss = (out * out).sum() + sum((x * x.detach().cos()).sum() for x in inputs)
        return [out, *inputs, *torch.autograd.grad(loss, given)]

    for mine, theirs in zip(run(onepass.jit(function, options=STRICT)), run(function), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
