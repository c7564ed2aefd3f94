"""Fused optimiser steps in compiled code: eager's values, in few launches, without a fallback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.backend import FallbackWarning

SIZES = [(0,), (1,), (2,), (7,), (31, 3), (64,), (257,), (5, 13), (1024,)]


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in SIZES]


def adam(name: str, amsgrad: bool = False, maximize: bool = False, lr: Any = 1e-2, **more: Any) -> Callable[..., None]:
    call = getattr(torch, name)

    def step(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor], xs: list[Tensor], ss: Any) -> None:
        torch._foreach_add_(ss, 1)
        call(
            ps, gs, ms, vs, xs if amsgrad else [], ss, lr=lr, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8,
            amsgrad=amsgrad, maximize=maximize, **more,
        )  # fmt: skip

    return step


def sgd(momentum: float, nesterov: bool = False, first: bool = False) -> Callable[..., None]:
    def step(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], *_: Any) -> None:
        torch._fused_sgd_(
            ps, gs, ms if momentum else [], weight_decay=0.1, momentum=momentum, lr=0.01,
            dampening=0.0 if nesterov else 0.5, nesterov=nesterov, maximize=False, is_first_step=first,
        )  # fmt: skip

    return step


STEPS = {
    "adamw": adam("_fused_adamw_"),
    "adam, amsgrad": adam("_fused_adam_", amsgrad=True),
    "adamw, maximize": adam("_fused_adamw_", maximize=True, lr=torch.tensor(0.01)),
    "sgd": sgd(0.0),
    "sgd, momentum": sgd(0.9),
    "sgd, nesterov": sgd(0.9, nesterov=True),
    "sgd, first": sgd(0.9, first=True),
}


def state(dtype: torch.dtype) -> list[list[Tensor]]:
    ps, gs, ms = (tensors(dtype, k) for k in range(3))
    vs, xs = ([t.abs() for t in tensors(dtype, k)] for k in (3, 4))
    return [ps, gs, ms, vs, xs, [torch.ones(()) for _ in SIZES]]


def after(step: Callable[..., None], dtype: torch.dtype, times: int) -> list[Tensor]:
    found = state(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for _ in range(times):
            step(*found)
    return [t for own in found for t in own]


@pytest.mark.rotating
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_eager(name: str) -> None:
    step = STEPS[name]
    compiled = torch.compile(step, backend="onepass", options={"target": "cpu"})
    for own, wanted in zip(after(compiled, torch.float32, 3), after(step, torch.float32, 3), strict=True):
        torch.testing.assert_close(own, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.rotating
def test_bfloat16_computes_in_float32() -> None:
    step = STEPS["adamw"]
    compiled = torch.compile(step, backend="onepass", options={"target": "cpu"})
    for own, wanted in zip(after(compiled, torch.bfloat16, 1), after(step, torch.bfloat16, 1), strict=True):
        torch.testing.assert_close(own, wanted, rtol=0.01, atol=1e-3)


def test_few_launches_on_a_gpu() -> None:
    record = onepass.explain(STEPS["adamw"], *state(torch.float32), target="triton-interpret")
    assert sum(len(graph.kernels) for graph in record.graphs) <= 3
    assert not any(graph.fallback or graph.externs for graph in record.graphs)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_scaled_gradients_and_infinities(found: float) -> None:
    scale, infinite = torch.tensor(4.0), torch.tensor(found)
    step = adam("_fused_adamw_", grad_scale=scale, found_inf=infinite)
    compiled = torch.compile(step, backend="onepass", options={"target": "cpu"})
    for own, wanted in zip(after(compiled, torch.float32, 2), after(step, torch.float32, 2), strict=True):
        torch.testing.assert_close(own, wanted, rtol=2e-5, atol=1e-6)
