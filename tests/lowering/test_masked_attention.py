"""Attention with a mask is traced as plain math: values of eager, and one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.checking import near_as_eager
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
    assert len([k for k in graph.kernels if not k.asks]) == 1 and not graph.externs


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

    def takes(given: dict[str, Any]) -> bool:
        asked.append(given["attn_mask"].stride(-1))
        return asked[-1] == 1

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


@pytest.mark.parametrize("dtype, keys, own", [(torch.bool, 1024, True), (torch.bool, 512, False), (None, 1024, False)])
def test_a_stored_mask_is_not_the_librarys(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None, keys: int, own: bool
) -> None:
    """On a GPU whose library takes every call: it computes scores that a kernel of ours passes over."""
    monkeypatch.setattr(masked_attention, "library_takes", lambda given: True)
    monkeypatch.setattr(masked_attention, "on_gpu", lambda tensor: True)
    with torch.no_grad(), FakeTensorMode(), unbuilt():
        q, k, v = (torch.empty(2, 4, n, 64, dtype=torch.bfloat16) for n in (keys, keys, keys))
        mask = torch.empty(keys, keys, dtype=dtype or torch.bfloat16)
        report = onepass.explain(F.scaled_dot_product_attention, q, k, v, mask, target="sm_90", options={"tune": "off"})
        columns = torch.empty(2, 1, 1, keys, dtype=torch.bool).expand(2, 1, keys, keys)
        padded = onepass.explain(
            F.scaled_dot_product_attention, q, k, v, columns, target="sm_90", options={"tune": "off"}
        )
    assert bool(report.externs) != own and padded.externs


# --- calls that backward goes through ---


def of(**options: Any) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, *masks, **options)

    return attend


def learned(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).half().requires_grad_()


def sees_nothing() -> Tensor:
    """A bias with a row of which no score counts."""
    return learned(2, 1, 19, 19).detach().masked_fill(~boolean(), -torch.inf).requires_grad_()


# What the library refuses on the CPU, which stands for a chip that is not here.
REFUSED: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "a learned bias": (of(), lambda: (*operands(), learned(1, 4, 19, 19))),
    "a learned bias of keys": (of(scale=0.4), lambda: (*operands(), learned(2, 1, 1, 19))),
    "a bias and rows that see nothing": (of(), lambda: (*operands(), sees_nothing())),
    "a bias and groups of heads": (of(enable_gqa=True), lambda: (*operands(keys=2), learned(4, 19, 19))),
    "a mask for each batch of one head": (of(), lambda: (*(x[:, 0] for x in operands()), boolean()[:, 0])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_training_of_what_the_library_refuses(name: str) -> None:
    """Operands stay 16-bit, and so does the gradient of the scores, as in the library's kernels. Eager computes in
    float32 here, with smaller errors."""
    function, arguments = REFUSED[name]
    near_as_eager(function, arguments(), 4e-3)


def planned(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Any:
    with FakeTensorMode(), unbuilt():
        inputs = [torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        return onepass.explain(function, *inputs, target="sm_90", options={"tune": "off", "cache": False})


ROWS = (8, 16, 1024, 64)


def test_no_product_is_of_float32_matrices() -> None:
    """Nor are weights kept."""
    report = planned(of(), *[ROWS] * 3, (1, 16, 1024, 1024))
    forward, _ = report.graphs
    assert len(forward.kernels) == 1 and not forward.externs
    assert report.saved_bytes <= 2 * 4 * 8 * 16 * 1024


def test_dropout_is_drawn_again() -> None:
    report = planned(of(dropout_p=0.1, is_causal=True), *[ROWS] * 3)
    assert {e.op for e in report.externs} == {"onepass.seed.default"}
    assert report.saved_bytes <= 2 * 4 * 8 * 16 * 1024 + 8


@pytest.mark.parametrize("form", ["three dimensions", "rows apart"])
def test_the_library_is_given_a_form_it_takes(form: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if form == "three dimensions":
            return F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)))
        return F.scaled_dot_product_attention(*(x.mT.contiguous().mT for x in (q, k, v)))

    report = planned(attend, *[ROWS] * 3)
    assert {"attention" in e.op or e.op == "getitem" for e in report.externs} == {True}


def test_plain_math_lies_as_eagers_result_does() -> None:
    """Kernels of the library put heads beside each other; who reads the result may count on it."""
    q, k, v = (torch.randn(2, 3, 17, 8, dtype=torch.float16, requires_grad=True) for _ in range(3))
    mask = torch.randn(3, 17, 17, dtype=torch.float16, requires_grad=True)
    as_it_is = masked_attention.attention(q, k, v, mask)
    laid_out = masked_attention.attention(q, k, v, mask, **{masked_attention.LAYOUT: (0, 2, 1, 3)})
    assert as_it_is.is_contiguous() and laid_out.transpose(1, 2).is_contiguous()
    assert torch.equal(as_it_is, laid_out)
