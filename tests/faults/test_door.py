"""An error inside the compiler, wherever it is, costs speed and one warning, never the user's program."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import onepass
from onepass import backend
from onepass.backend import FallbackWarning, record_compilations


def fails(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("it is broken")


def train(**options: Any) -> tuple[torch.Tensor, ...]:
    """A result and gradients of a function that is compiled anew."""
    torch._dynamo.reset()
    x, w = torch.ones(3, 4, requires_grad=True), torch.full((4, 4), 0.5, requires_grad=True)
    run = onepass.jit(lambda x, w: ((x @ w).softmax(-1) * w[:3]).sum(), options={"strict": False, **options})
    out = run(x, w)
    return (out.detach(), *torch.autograd.grad(out, (x, w)))


@pytest.mark.parametrize("broken", ["compile_graph", "partition", "choose_target", "tangents_of", "prepare_attention"])
def test_an_error_of_the_compiler_is_one_warning(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train()
    monkeypatch.setattr(backend, broken, fails)
    target = {"target": "triton-interpret"} if broken == "prepare_attention" else {}
    with pytest.warns(FallbackWarning, match="it is broken") as caught, record_compilations() as records:
        found = train(**target)
    directions = [r.direction for r in records if r.fallback]
    assert len([w for w in caught if w.category is FallbackWarning]) == len(directions) <= 2
    assert records and all("it is broken" in r.fallback for r in records)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(Exception, match="it is broken"):
        train(strict=True, **target)


@pytest.mark.parametrize("entered", [True, False])
def test_tensors_without_memory(entered: bool) -> None:
    """A model is called with fake tensors to see its shapes: nothing may read their addresses."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
    run = onepass.jit(model, options={"strict": True})
    real = run(torch.randn(3, 8))
    with (mode := FakeTensorMode(allow_non_fake_inputs=True)):
        x = torch.randn(3, 8, requires_grad=True)
    with mode if entered else warnings.catch_warnings():
        found = onepass.jit(lambda x: F.gelu(x).softmax(-1) * 2, options={"strict": True})(x)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert run(x).shape == real.shape
    assert isinstance(found, FakeTensor) and found.shape == gradient.shape == (3, 8)
    meta = onepass.jit(lambda x: (x * 2).sum(-1), options={"strict": True})(torch.randn(3, 4, device="meta"))
    assert meta.device.type == "meta" and meta.shape == (3,)
    torch.testing.assert_close(run(torch.ones(3, 8)), model(torch.ones(3, 8)))
