"""What forward keeps for backward: decided by predicted times, never more than by torch's rules, less where asked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.autograd.partition import SAVED, partition
from onepass.autograd.saved import choose_saved
from onepass.autograd.saved_costs import bytes_of
from onepass.errors import InvalidOption
from onepass.ir.target import Target, find_target
from onepass.lowering.decompositions import decomposition_table
from onepass.lowering.registry import RULES

STRICT = {"strict": True, "cache": False}
Function = Callable[..., Tensor]


def mlp(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ w)
    return x.square().mean()


def attention(x: Tensor, *weights: Tensor) -> Tensor:
    batch, rows, width = x.shape
    for w in weights:
        q, k, v = ((F.rms_norm(x, (width,)) @ w.roll(n, 0)).view(batch, rows, 4, -1).transpose(1, 2) for n in range(3))
        s = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + (s @ v).transpose(1, 2).reshape(x.shape)
    return x.square().mean()


def gated(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = x + F.dropout(F.silu(x @ w) * (x @ w.t()), 0.1) * x.sigmoid().sum(-1, keepdim=True)
    return x.square().mean()


def normalised(x: Tensor, *weights: Tensor) -> Tensor:
    x = x.view(-1, 8, 4, x.shape[-1] // 4)
    for w in weights:
        x = x + F.relu(F.batch_norm(F.conv2d(x, w[:8, :72].reshape(8, 8, 3, 3), padding=1), None, None, training=True))
    return x.square().mean()


def far_apart(x: Tensor, *weights: Tensor) -> Tensor:
    """Sums of half precision of which the parts are smaller than the sum: parts used again far away."""
    total = x.float()
    for w in weights:
        total = total + (F.layer_norm(total, x.shape[-1:]).to(x.dtype) @ w).tanh()
    return total.square().mean()


FUNCTIONS = [mlp, attention, gated, normalised, far_apart]


def arguments(rows: int = 32, width: int = 96, layers: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(width, width, dtype=dtype).div(width).requires_grad_() for _ in range(layers)]
    return [torch.randn(2, rows, width, dtype=dtype, requires_grad=True), *weights]


def joint_graph(function: Function, *args: Tensor) -> tuple[GraphModule, Any, dict[str, Any]]:
    found: list[tuple[GraphModule, Any, dict[str, Any]]] = []

    def keep(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        found.append((copy.deepcopy(joint), inputs, dict(kwargs)))
        return partition(joint, inputs, **kwargs)

    def call(graph: GraphModule, _inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    options = {"fw_compiler": call, "bw_compiler": call, "partition_fn": keep}
    backend = aot_autograd(decompositions=decomposition_table(), **options)
    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    return found[0]


def kept(function: Function, args: list[Tensor], target: Target, budget: float = 1.0) -> tuple[int, int]:
    """Bytes that are kept by torch's rules, and as decided."""
    joint, inputs, kwargs = joint_graph(function, *args)
    bytes_kept = []
    for saving in (None, lambda graph, outputs: choose_saved(graph, outputs, target, RULES, budget)):
        forward, _ = partition(copy.deepcopy(joint), inputs, saving=saving, **kwargs)
        bytes_kept.append(sum(bytes_of(node) for node, _ in forward.meta[SAVED]))
    return bytes_kept[0], bytes_kept[1]


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_never_more_than_torch_keeps(function: Function, dtype: torch.dtype, target: str) -> None:
    by_torch, mine = kept(function, arguments(dtype=dtype), find_target(target))
    assert 0 < mine <= by_torch * (1 + 1 / 256)


@pytest.mark.parametrize("budget", [0.75, 0.5, 0.25])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_budget_is_kept(function: Function, budget: float) -> None:
    args, target = arguments(), find_target("sm_90")
    _, whole = kept(function, args, target)
    _, part = kept(function, args, target, budget)
    assert part <= budget * whole


def gradients(function: Function, args: list[Tensor], **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    run = onepass.jit(function, options={**STRICT, **options})
    loss = run(*args)
    return [loss.detach(), *torch.autograd.grad(loss, args)]


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f is not gated])
def test_values_do_not_depend_on_what_is_kept(function: Function, dtype: torch.dtype, budget: float) -> None:
    args = arguments(dtype=dtype)
    exact_args = [a.detach().double().requires_grad_() for a in args]
    loss = function(*args)
    eager = [loss.detach(), *torch.autograd.grad(loss, args)]
    loss = function(*exact_args)
    exact = [loss.detach(), *torch.autograd.grad(loss, exact_args)]
    for mine, plain, true in zip(gradients(function, args, memory=budget), eager, exact, strict=True):
        scale = true.abs().max().item() * torch.finfo(dtype).eps
        assert (mine - true).abs().max().item() <= 2 * (plain - true).abs().max().item() + scale


def test_masks_of_dropout_are_the_same_whatever_is_kept() -> None:
    first, second, third = (gradients(gated, arguments(), memory=budget) for budget in (1.0, 0.5, 0.0))
    for a, b, c in zip(first, second, third, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


def test_a_budget_of_nothing_keeps_seeds_and_what_cannot_be_computed_again() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (F.dropout((x @ w).exp(), 0.5).sort(-1).values * x).sum()

    e = onepass.explain(function, *arguments(layers=1), options={**STRICT, "memory": 0.0})
    forward, backward = e.graphs
    kept = {s.op.removeprefix("onepass.").split(".")[0]: s.type for s in forward.saved}
    assert kept["seed"] == "int64[]" and all(t.startswith("int64") for t in kept.values()), kept  # positions of sort
    (decision,) = (d for d in backward.decisions if d.kind == "memory")
    assert decision.accepted and decision.bytes_saved > 0 and "no less is possible" in decision.reason


def test_the_residual_stream_is_kept_not_added_up_again() -> None:
    joint, inputs, kwargs = joint_graph(far_apart, *arguments(rows=512, width=512, layers=6, dtype=torch.bfloat16))
    target = find_target("sm_90")
    forward, backward = partition(
        joint, inputs, saving=lambda graph, outputs: choose_saved(graph, outputs, target, RULES), **kwargs
    )
    sums = [n for n, _ in forward.meta[SAVED] if n.target is torch.ops.aten.add.Tensor]
    assert len(sums) >= 5 and all(n.meta["val"].dtype is torch.float32 for n in sums)
    assert not {n.name for n in sums} & {n.name for n in backward.graph.nodes if n.op == "call_function"}


def test_explain_says_what_is_kept_and_why() -> None:
    e = onepass.explain(mlp, *arguments(), options=STRICT, target="h200")
    forward = next(g for g in e.graphs if g.direction == "forward")
    assert forward.saved and forward.saved_bytes == sum(s.bytes for s in forward.saved) == e.saved_bytes
    assert all("us to keep" in s.why and s.line.endswith(("mean()", "@ w)")) for s in forward.saved), forward.saved
    text = str(e)
    assert f"kept for backward: {len(forward.saved)} tensors" in text and "us to keep" in text
    assert "Kept for backward" in e.to_html()
    assert forward.to_json()["saved"][0]["bytes"] == forward.saved[0].bytes


def test_regions_of_checkpoints_are_respected() -> None:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x @ w).exp().sin() @ w

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = checkpoint(plain, x, w, use_reentrant=False)
        return x.square().mean()

    args = arguments()
    e = onepass.explain(function, *args, options=STRICT)
    backward = e.graphs[1]
    assert sum(x.op == "aten.mm.default" for x in backward.externs) > 6 + 2  # products of forward, again
    (decision,) = (d for d in backward.decisions if d.kind == "memory")
    assert not decision.accepted and "checkpoint" in decision.reason
    loss = function(*args)
    eager = [loss.detach(), *torch.autograd.grad(loss, args)]
    torch.testing.assert_close(gradients(function, args), eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("budget", [-0.1, 1.5, "half", True])
def test_a_budget_is_a_number_from_0_to_1(budget: object) -> None:
    with pytest.raises(InvalidOption, match="memory"):
        onepass.jit(mlp, options={"memory": budget})


def test_torch_s_own_budget_is_the_default() -> None:
    config = torch._functorch.config
    args = arguments()
    with config.patch(activation_memory_budget=0.5):
        e = onepass.explain(mlp, *args, options=STRICT)
    whole = onepass.explain(mlp, *args, options=STRICT)
    assert 0 < e.saved_bytes <= 0.5 * whole.saved_bytes


def test_modules_with_sizes_that_change() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    run = torch.compile(model, backend="onepass", options={**STRICT, "memory": 0.5}, dynamic=True)
    for rows in (5, 9, 64):
        x = torch.randn(rows, 8)
        mine = torch.autograd.grad(run(x).square().sum(), [*model.parameters()])
        eager = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        torch.testing.assert_close(mine, eager)
