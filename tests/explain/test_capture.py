"""Recording runs: forward and backward are seen, and nothing of the user's is changed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from onepass.explain import run_recorded
from onepass.explain.capture import uncompiled
from onepass.ir.record import CompileRecord

_active: list[CompileRecord] = []


@contextmanager
def _recorder() -> Iterator[list[CompileRecord]]:
    _active.clear()
    yield _active


def _compiler(direction: str) -> Callable[..., Any]:
    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        _active.append(CompileRecord(direction=direction))
        return functools.partial(_boxed, graph)

    return compile_graph


def _boxed(graph: torch.fx.GraphModule, *args: Any) -> Any:
    return graph(*args)


def _backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Runs graphs as they are and records them, as the real backend does."""
    return aot_autograd(
        fw_compiler=_compiler("forward"),
        bw_compiler=_compiler("backward"),
        inference_compiler=_compiler("inference"),
        keep_inference_input_mutations=True,
    )(graph, inputs)


def _directions(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    return [r.direction for r in run_recorded(function, args, kwargs, _backend, _recorder)]


def test_inference_is_one_record() -> None:
    assert _directions(lambda x: torch.relu(x) + 1, torch.randn(4)) == ["inference"]


def test_training_compiles_the_backward_too() -> None:
    x = torch.randn(4, requires_grad=True)
    assert _directions(lambda x: torch.tanh(x) * 2, x) == ["forward", "backward"]
    assert x.grad is None


def test_a_non_leaf_argument_keeps_its_graph_out_of_it() -> None:
    leaf = torch.randn(4, requires_grad=True)
    assert _directions(lambda a, b: a.sin() * b, leaf * 2, leaf) == ["forward", "backward"]
    assert leaf.grad is None


def test_outputs_in_containers_reach_the_backward() -> None:
    x = torch.randn(4, requires_grad=True)
    assert _directions(lambda x: {"a": [x.sin()], "n": 3}, x) == ["forward", "backward"]


def test_a_training_step_inside_is_not_run_twice() -> None:
    model = nn.Linear(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    assert _directions(step, torch.randn(2, 3)).count("backward") == 1
    assert model.weight.grad is None


def test_explaining_again_and_again_does_not_hit_the_recompile_limit() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert all(_directions(double, torch.ones(3)) == ["inference"] for _ in range(20))


def test_arguments_are_not_mutated() -> None:
    x, out = torch.ones(4), [torch.zeros(4)]

    def mutate(x: torch.Tensor, out: list[torch.Tensor]) -> None:
        x.add_(1)
        out[0].copy_(x)

    assert _directions(mutate, x, out=out)
    assert x.tolist() == [1.0] * 4 and out[0].tolist() == [0.0] * 4


def test_aliased_arguments_stay_aliased() -> None:
    seen: list[bool] = []

    def look(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
        return a + 1

    base = torch.zeros(8)
    run_recorded(torch.compiler.disable(look), (base[:4], base[4:]), {}, _backend, _recorder)
    assert seen == [True]


def test_module_state_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[0].weight.grad = torch.full((4, 4), 7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert _directions(model, torch.randn(8, 4)) == ["forward", "backward"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 7.0))
    assert model[0].bias.grad is None


def test_a_buffer_replaced_by_forward_and_a_counter_are_kept() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total = self.total + 1
            self.calls += 1
            return x + self.total

    model = Counting()
    buffer = model.total
    assert _directions(model, torch.ones(2))
    assert model.total is buffer and model.total.item() == 0 and model.calls == 0


def test_an_optimiser_step_is_undone() -> None:
    model = nn.Linear(4, 4)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = model.weight.grad
    assert _directions(lambda: optimiser.step())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.weight.grad is gradient and not optimiser.state
    optimiser.step()
    momentum = optimiser.state[model.weight]["momentum_buffer"].clone()
    assert _directions(lambda: optimiser.step())
    assert torch.equal(optimiser.state[model.weight]["momentum_buffer"], momentum)


def test_random_generators_are_kept() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(2), random.random()
    torch.manual_seed(3)
    random.seed(3)
    _directions(lambda x: torch.nn.functional.dropout(x) + random.random(), torch.ones(64))
    assert torch.equal(torch.rand(2), expected[0]) and random.random() == expected[1]


def test_state_is_kept_when_the_program_fails() -> None:
    captured = torch.zeros(3)

    def fail(x: torch.Tensor) -> None:
        captured.add_(x)
        torch._dynamo.graph_break()
        raise ValueError("the user's own error")

    with pytest.raises(ValueError, match="the user's own error"):
        _directions(fail, torch.ones(3))
    assert captured.tolist() == [0.0] * 3


def test_restoring_does_not_disturb_a_pending_backward() -> None:
    model = nn.BatchNorm1d(3)
    pending = model(torch.randn(5, 3)).sum()
    _directions(model, torch.randn(5, 3))
    pending.backward()
    assert model.weight.grad is not None


def test_compiled_callables_are_taken_apart() -> None:
    model = nn.Linear(2, 2)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert uncompiled(torch.compile(model, backend="eager")) is model
    assert uncompiled(torch.compile(double, backend="eager")) is double
    assert uncompiled(double) is double
    assert _directions(torch.compile(double, backend="eager"), torch.ones(2)) == ["inference"]
    assert _directions(functools.partial(double), torch.ones(2)) == ["inference"]
