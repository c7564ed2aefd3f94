"""One text for every spelling of a computation, and another text for every other computation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.analysis.canonical import canonical
from onepass.analysis.cuts import parts_of
from onepass.ir.program import Buffer
from onepass.lowering.graph import lower_graph
from onepass.plugging.tracing import functional_graph

Function = Callable[..., Tensor]
X, W = torch.randn(4, 6, 8), torch.randn(8)


def text(function: Function, *args: Tensor) -> str | None:
    with torch.no_grad():
        program = lower_graph(functional_graph(function, args))
    (part,) = parts_of(program)
    return canonical(part.store(), {b: f"p{k}" for k, b in enumerate(program.inputs) if isinstance(b, Buffer)})


EQUAL: dict[str, list[Function]] = {
    "rms norm": [
        lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: w * (x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) / 8 + 1e-6)),
        lambda x, w: (w * x) * ((x**2).mean(-1, keepdim=True) + 1e-6) ** -0.5,
        lambda x, w: F.rms_norm(x, (8,), w, 1e-6),
    ],
    "layer norm": [
        lambda x, w: F.layer_norm(x, (8,), w),
        lambda x, w: (x - (m := x.mean(-1, keepdim=True))) * ((x - m).pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w,
        lambda x, w: w * (x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt(),
    ],
    "silu": [
        lambda x, w: F.silu(x) * w,
        lambda x, w: w * (x * torch.sigmoid(x)),
        lambda x, w: x * w / (1 + torch.exp(-x)),
    ],
    "a sum and numbers": [lambda x, w: 2 * (x + w) - x, lambda x, w: x + w + w, lambda x, w: (x * 0.5 + w) / 0.5],
    "comparison": [lambda x, w: torch.where(x > w, x, w), lambda x, w: torch.where(w < x, x, w)],
    "softmax": [
        lambda x, w: torch.softmax(x, -1) * w,
        lambda x, w: (e := torch.exp(x - x.amax(-1, keepdim=True))) * w / e.sum(-1, keepdim=True),
        lambda x, w: w * (e := (x - x.max(-1, True).values).exp()) * e.sum(-1, True).reciprocal(),
    ],
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spellings_have_one_text(name: str, dtype: torch.dtype) -> None:
    texts = {text(f, X.to(dtype), W.to(dtype)) for f in EQUAL[name]}
    assert len(texts) == 1 and None not in texts
    # Rows may be counted by one axis or by several.
    assert texts == {text(EQUAL[name][0], X.view(24, 8).to(dtype), W.to(dtype))}


DIFFERENT: list[tuple[Function, Function]] = [
    (lambda x, w: x - w, lambda x, w: w - x),
    (lambda x, w: x / w, lambda x, w: w / x),
    (lambda x, w: (x * x).sqrt() + w, lambda x, w: x + w),
    (lambda x, w: (x * w).sqrt(), lambda x, w: x.sqrt() * w),
    (lambda x, w: x.sum(-1) + 1, lambda x, w: (x + 1).sum(-1)),
    (lambda x, w: x.sum(-1), lambda x, w: x.sum(1)),
    (lambda x, w: (x * w).sum(-1), lambda x, w: x.sum(-1) * w.sum()),
    (lambda x, w: x.exp().sum(-1), lambda x, w: x.sum(-1).exp()),
    (lambda x, w: x * 1.0001, lambda x, w: x * 1.0002),
    (lambda x, w: x.pow(0.3333), lambda x, w: x.pow(1 / 3)),
    (lambda x, w: torch.where(x > w, x, w), lambda x, w: torch.where(x < w, x, w)),
    (lambda x, w: x.transpose(0, 1).contiguous() * w, lambda x, w: x * w),
    (lambda x, w: x.flip(-1) * w, lambda x, w: x * w),
    (lambda x, w: x.amax(-1), lambda x, w: x.amin(-1)),
    (lambda x, w: x.var(-1), lambda x, w: x.var(-1, correction=0)),
    (lambda x, w: F.gelu(x), lambda x, w: F.gelu(x, approximate="tanh")),
    (lambda x, w: x.long() * 1000001, lambda x, w: x.long() * 1000002),
]


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_other_computations_have_another(number: int) -> None:
    one, other = (text(f, X, W) for f in DIFFERENT[number])
    assert one is not None and other is not None and one != other


def test_what_has_no_text() -> None:
    assert text(lambda x, w: torch.gather(x, -1, (x > 0).long()), X, W) is None
    assert text(lambda x, w: (x * float("nan")).sqrt(), X, W) is not None
