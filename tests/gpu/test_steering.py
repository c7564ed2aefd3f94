"""Kernels that are plugged in, on a real GPU: compiled, measured, in training too; and eager's random numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import plugging
from onepass.backend import record_compilations
from tests.lowering.test_eager_random import DRAWS, SHAPES
from tests.steering.kernels import MLP_EXAMPLE, NORM_EXAMPLE, NORMS, Llama, mlp, mlp_backward, norm, norm_launchers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPTIONS = {"strict": True, "cache": False}


@pytest.fixture(autouse=True)
def _nothing_stays() -> Any:
    torch._dynamo.reset()
    yield
    plugging.unplug()


def plug(always: bool) -> None:
    launch, backward = norm_launchers()
    onepass.kernel(reference=norm, example=NORM_EXAMPLE, always=always, backward=backward)(launch)


def results(function: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [t.to(dtype).detach().requires_grad_() for t in inputs]
    found = function(*leaves)
    return [found.detach(), *torch.autograd.grad(found.double().sin().sum(), leaves)]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", NORMS, ids=lambda f: f.__name__)
def test_a_triton_kernel(spelling: Callable[..., Tensor], dtype: torch.dtype, dynamic: bool | None) -> None:
    plug(always=True)
    inputs = [torch.randn(8, 33, 257, device="cuda"), torch.rand(257, device="cuda") + 0.5]

    def program(x: Tensor, w: Tensor) -> Tensor:
        return spelling(x.sin() + 1, w) * 0.5

    with record_compilations() as records:
        ours = results(onepass.jit(program, dynamic=dynamic, options=OPTIONS), inputs, dtype)
    assert [sum("onepass_plugged" in e.op for e in r.externs) for r in records] == [1, 1]
    eager, exact = (results(program, inputs, d) for d in (dtype, torch.float64))
    for a, b, x in zip(ours, eager, exact, strict=True):
        assert (a.double() - x).abs().max() <= 2 * (b.double() - x).abs().max() + 1e-5 * (1 + x.abs().max())
    with torch.no_grad():
        assert onepass.explain(program, *inputs, options=OPTIONS).externs[0].op == "launch"


def test_both_are_measured() -> None:
    plug(always=False)
    inputs = [torch.randn(4096, 4096, device="cuda"), torch.rand(4096, device="cuda")]
    for train in (False, True):
        given = [t.detach().requires_grad_(train) for t in inputs]
        found = onepass.explain(norm, *given, options=OPTIONS).graphs[0].decisions
        (decision,) = [d for d in found if d.kind == "kernel"]
        theirs, ours = (float(t) for t in re.findall(r"([\d.]+) us by", decision.reason))
        assert decision.accepted == (theirs <= ours) and 1 < ours < 5000


def test_a_model_as_transformers_writes_them() -> None:
    plug(always=True)
    onepass.kernel(reference=mlp, example=MLP_EXAMPLE, always=True, backward=mlp_backward)(lambda *a: mlp(*a))
    model = Llama(width=64).cuda()
    x = torch.randn(4, 129, 64, device="cuda", requires_grad=True)
    run = torch.compile(model, backend="onepass", options=OPTIONS)
    with record_compilations() as records:
        found = torch.autograd.grad(run(x).sin().sum(), [x, *model.parameters()])
    assert sum("onepass_plugged" in e.op for e in records[0].externs) == 7
    eager = torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])
    for a, b in zip(found, eager, strict=True):
        assert (a - b).abs().max() <= 2e-3 * (1 + b.abs().max())


def drawn(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    torch.manual_seed(5)
    leaf = x.detach().clone().requires_grad_()
    result = function(leaf)
    gradient = torch.autograd.grad(result.sum(), leaf)[0] if result.requires_grad else None
    return result.detach(), gradient, torch.cuda.get_rng_state()


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_those_of_eager(name: str) -> None:
    """The same bits over 20 shapes, forward and backward, and the generator ends where eager's does."""
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        x = torch.linspace(-2, 2, max(1, size), device="cuda")[:size].reshape(shape)
        for given in (x, x.transpose(0, -1)):
            torch._dynamo.reset()
            run = onepass.jit(DRAWS[name], options={"eager_random": True, **OPTIONS})
            found, expected = drawn(run, given), drawn(DRAWS[name], given)
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True)), shape
