"""Attention with a mask is traced as plain math: values of eager, and one kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.unbuilt import unbuilt
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.lowering import masked_attention

INTERPRETED = {"target": "triton-interpret", "cache": False}


def operands(heads: int = 4, keys: int = 4, rows: int = 19, dtype: torch.dtype = torch.float16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, n, rows, 16, generator=generator).to(dtype) for n in (heads, keys, keys))


def boolean(rows: int = 19) -> Tensor:
    mask = torch.rand(2, 1, rows, rows, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[:, :, 3] = False  # a row that sees nothing
    return mask


MASKS = {
    "boolean": boolean,
    "added": lambda: torch.randn(19, 19, dtype=torch.float16),
    "some never": lambda: torch.zeros(2, 1, 19, 19).masked_fill(~boolean(), -torch.inf).half(),
}


@pytest.mark.parametrize("name", MASKS)
def test_values_are_those_of_eager(name: str) -> None:
    mask = MASKS[name]()

    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m)

    with torch.no_grad():
        wide = mask if mask.dtype is torch.bool else mask.double()
        exact = attend(*(t.double() for t in operands()), wide)
        found = torch.compile(attend, backend="onepass", options=INTERPRETED)(*operands(), mask)
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)


def test_grouped_heads_and_a_scale() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3, enable_gqa=True)

    q, k, v = operands(heads=4, keys=2)
    with torch.no_grad():
        exact = attend(q.double(), k.double(), v.double(), boolean())
        found = torch.compile(attend, backend="onepass", options=INTERPRETED)(q, k, v, boolean())
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rows", [197, 1024])
def test_it_is_one_kernel(rows: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m)

    with torch.no_grad(), FakeTensorMode(), unbuilt():
        q, k, v = (torch.empty(8, 16, rows, 64, dtype=torch.bfloat16) for _ in range(3))
        mask = torch.empty(8, 1, rows, rows, dtype=torch.bool)
        report = onepass.explain(attend, q, k, v, mask, target="sm_90", options={"tune": "off"})
    (graph,) = report.graphs
    assert len(graph.kernels) == 1 and not graph.externs


def test_what_backward_goes_through_is_left_alone() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m)

    q, k, v = (t.requires_grad_() for t in operands())
    mask = boolean()
    mask[:, :, 3] = True
    exact = attend(q, k, v, mask)
    found = torch.compile(attend, backend="onepass", options=INTERPRETED)(q, k, v, mask)
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(
        *(torch.autograd.grad(out.float().sum(), q)[0] for out in (found, exact)), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mask_the_library_refuses_is_copied(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The library's rule on CUDA, on the CPU: the last dimension of a mask is dense."""
    asked: list[int] = []

    def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
        asked.append(mask.stride(-1))
        return mask.stride(-1) == 1

    monkeypatch.setattr(masked_attention, "library_takes", takes)
    monkeypatch.setattr(masked_attention, "on_gpu", lambda tensor: True)
    q, k, v = (t.requires_grad_() for t in operands(dtype=dtype))
    seen = (torch.arange(19) != 4)[None, None, :, None].expand(2, 1, 19, 19).transpose(-1, -2)
    row = torch.ones(2, 1, 19, 1, dtype=torch.bool).expand(2, 1, 19, 19)
    for mask in (seen.contiguous().mT, row):
        exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        compiled = torch.compile(F.scaled_dot_product_attention, backend="onepass", options=INTERPRETED)
        found = compiled(q, k, v, attn_mask=mask)
        assert asked[-1] == 1
        torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
        grads = (torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in (found, exact))
        torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)
