"""Reductions of a product's rows as people write them: what becomes one kernel, and what must stay as it is.

Sizes are no multiples of anything, and small: the kernels run in an interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Program = tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]


def matrices(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Callable[[], tuple[Tensor, ...]]:
    """Random matrices of these shapes, scaled so that products are of order one."""
    return lambda: tuple((torch.randn(shape) / shape[-1] ** 0.25).to(dtype) for shape in shapes)


def with_targets(rows: int, columns: int, make: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """The same matrices, and a column for every row."""
    return lambda: (*make(), torch.randint(0, columns, (rows,)))


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


x, w, b, r = (37, 64), (48, 64), (48,), (37, 48)
many, deep = (700, 64), (700, 300)

# A row fits a tile: one kernel, whatever is stored of it.
HELD: dict[str, Program] = {
    "layer norm": (lambda x, w: F.layer_norm(x @ w.t(), (48,)), matrices(x, w)),
    "residual, layer norm with weights": (
        lambda x, w, r, g, b: F.layer_norm(x @ w.t() + r, (48,), g, b),
        matrices(x, w, r, b, b),
    ),
    "the sum is stored beside its norm": (
        lambda x, w, r: (lambda s: (s, F.layer_norm(s, (48,))))(x @ w.t() + r),
        matrices(x, w, r),
    ),
    "bias, residual, rms norm": (lambda x, w, b, r: rms(F.linear(x, w, b) + r), matrices(x, w, b, r)),
    "rms norm by torch": (lambda x, w, g: F.rms_norm(x @ w.t(), (48,), g), matrices(x, w, b)),
    "softmax": (lambda x, w: (x @ w.t()).softmax(-1), matrices(x, w)),
    "softmax in float32": (lambda x, w: (x @ w.t()).softmax(-1), matrices(x, w, dtype=torch.float32)),
    "log-softmax": (lambda x, w: F.log_softmax(F.linear(x, w), -1), matrices(x, w)),
    "sum": (lambda x, w: (x @ w.t()).sum(-1), matrices(x, w)),
    "sum of squares": (lambda x, w: (x @ w.t()).float().square().sum(-1), matrices(x, w)),
    "mean and largest": (lambda x, w: (lambda p: (p.mean(-1), p.amax(-1)))(x @ w.t()), matrices(x, w)),
    "unit length": (lambda x, w: F.normalize(x @ w.t(), dim=-1), matrices(x, w)),
    "quantised by row": (
        lambda x, w: (lambda p, s: ((p / s).round().to(torch.int8), s))(
            x @ w.t(), (x @ w.t()).abs().amax(-1, keepdim=True) / 127
        ),
        matrices(x, w, dtype=torch.float32),
    ),
    "gate, then norm": (lambda x, w, u: F.layer_norm(F.silu(x @ w.t()) * (x @ u.t()), (48,)), matrices(x, w, w)),
    "long sums": (lambda x, w: F.layer_norm(x @ w.t(), (48,)), matrices((37, 700), (48, 700))),
    "batched": (lambda a, b: (a @ b).softmax(-1), matrices((3, 17, 33), (3, 33, 21))),
    "batched with one matrix": (lambda a, b: F.layer_norm(a @ b, (21,)), matrices((2, 3, 17, 33), (33, 21))),
    "columns of the other matrix": (lambda x, w: (x @ w.t()).softmax(0), matrices(x, w)),
    "arg-max": (lambda x, w: (x @ w.t()).argmax(-1), matrices(x, w)),
    "log-sum-exp": (lambda x, w: torch.logsumexp(x @ w.t(), -1), matrices(x, w)),
    "router": (lambda x, w: (lambda p: (p, p.max(-1)))((x @ w.t()).softmax(-1)), matrices(x, w)),
}

# A row does not fit, and is not stored.
SWEPT: dict[str, Program] = {
    "log-sum-exp": (lambda x, w: torch.logsumexp(x @ w.t(), -1), matrices(x, many)),
    "log-sum-exp in float32": (lambda x, w: torch.logsumexp(x @ w.t(), -1), matrices(x, many, dtype=torch.float32)),
    "log-sum-exp by hand": (
        lambda x, w: (lambda s, m: (s - m).exp().sum(-1).log() + m[:, 0])(
            (x @ w.t()).float(), (x @ w.t()).float().amax(-1, keepdim=True)
        ),
        matrices(x, many),
    ),
    "long sums": (lambda x, w: torch.logsumexp(x @ w.t(), -1), matrices((37, 300), deep)),
    "largest": (lambda x, w: (x @ w.t()).amax(-1), matrices(x, many)),
    "largest and smallest": (lambda x, w: (lambda p: (p.amax(-1), p.amin(-1)))(x @ w.t()), matrices(x, many)),
    "arg-max": (lambda x, w: (x @ w.t()).argmax(-1), matrices(x, many)),
    "arg-max with long sums": (lambda x, w: (x @ w.t()).argmax(-1), matrices((37, 300), deep)),
    "largest and where": (lambda x, w: (x @ w.t()).max(-1), matrices(x, many)),
    "arg-max and its probability": (
        lambda x, w: (lambda p: (p.argmax(-1), (p.amax(-1) - torch.logsumexp(p, -1)).exp()))(x @ w.t()),
        matrices(x, many),
    ),
    "bias": (lambda x, w, b: torch.logsumexp(F.linear(x, w, b), -1), matrices(x, many, (700,))),
    "temperature": (lambda x, w: torch.logsumexp(x @ w.t() / 0.07, -1), matrices(x, many)),
    "soft-cap": (lambda x, w: torch.logsumexp(30 * torch.tanh(x @ w.t() / 30), -1), matrices(x, many)),
    "cross-entropy": (
        lambda x, w, t: F.cross_entropy(x @ w.t(), t, reduction="none"),
        with_targets(37, 700, matrices(x, many)),
    ),
    "cross-entropy with long sums": (
        lambda x, w, t: F.cross_entropy(x @ w.t(), t, reduction="none"),
        with_targets(37, 700, matrices((37, 300), deep)),
    ),
    "cross-entropy in float32": (
        lambda x, w, t: F.cross_entropy((x @ w.t()).float(), t, reduction="none"),
        with_targets(37, 700, matrices(x, many)),
    ),
    "cross-entropy, some ignored": (
        lambda x, w, t: F.cross_entropy(x @ w.t(), torch.where(t % 3 == 0, -100, t), reduction="none"),
        with_targets(37, 700, matrices(x, many)),
    ),
    "cross-entropy, smoothed": (
        lambda x, w, t: F.cross_entropy(x @ w.t(), t, reduction="none", label_smoothing=0.1),
        with_targets(37, 700, matrices(x, many)),
    ),
    "hinge against the target": (
        lambda x, w, t: (lambda s: (s - s.gather(1, t[:, None]) + 1).clamp(min=0).sum(-1))((x @ w.t()).float()),
        with_targets(37, 700, matrices(x, many)),
    ),
    "variance": (lambda x, w: (x @ w.t()).float().var(-1), matrices(x, many)),
    "count above a threshold": (lambda x, w: (x @ w.t() > 0.5).sum(-1), matrices(x, many, dtype=torch.float32)),
    "any and all": (lambda x, w: (lambda p: ((p > 3).any(-1), (p > -9).all(-1)))(x @ w.t()), matrices(x, many)),
    "nearest by distance": (
        lambda x, w: (x.square().sum(-1, keepdim=True) - 2 * x @ w.t() + w.square().sum(-1)).argmin(-1),
        matrices(x, many, dtype=torch.float32),
    ),
    "batched": (lambda a, b: torch.logsumexp(a @ b.mT, -1), matrices((3, 17, 33), (3, 600, 33))),
    "batched with one matrix": (lambda a, b: torch.logsumexp(a @ b.t(), -1), matrices((2, 17, 33), (600, 33))),
    "columns of the other matrix": (lambda x, w: torch.logsumexp(w @ x.t(), 0), matrices(x, many)),
    "causal": (
        lambda a, b: torch.logsumexp(
            (a @ b.t()).masked_fill(~torch.ones(600, 600, device=a.device).tril().bool(), -torch.inf), -1
        ),
        matrices((600, 32), (600, 32)),
    ),
    "two products": (lambda x, w, u: torch.logsumexp(x @ w.t() + x @ u.t(), -1), matrices(x, many, many)),
    "mixture of softmaxes": (
        lambda x, w, u: torch.logsumexp((x @ w.t()) * torch.sigmoid(x @ u.t()), -1),
        matrices((37, 300), deep, deep),
    ),
}

# Long rows are stored, too, before they are reduced.
PASSING: dict[str, Program] = {
    "logits and their log-sum-exp": (
        lambda x, w: (lambda p: (p, torch.logsumexp(p, -1)))(x @ w.t()),
        matrices(x, many),
    ),
    "in float32, with long sums": (
        lambda x, w: (lambda p: (p, p.argmax(-1), p.var(-1)))(x @ w.t()),
        matrices((37, 300), deep, dtype=torch.float32),
    ),
    "stored after an activation": (
        lambda x, w, b: (lambda p: (p, p.float().square().sum(-1)))(F.gelu(F.linear(x, w, b))),
        matrices(x, many, (700,)),
    ),
    "the entropy's two sweeps": (
        lambda x, w: (lambda p: (p, (lambda q: -(q.exp() * q).sum(-1))(F.log_softmax(p.float(), -1))))(x @ w.t()),
        matrices(x, many),
    ),
    "causal": (
        lambda a, b: (lambda s: (s, torch.logsumexp(s, -1)))(
            (a @ b.t()).masked_fill(~torch.ones(600, 600, device=a.device).tril().bool(), -torch.inf)
        ),
        matrices((600, 32), (600, 32)),
    ),
    "stored transposed": (lambda x, w: (lambda p: (p.t().contiguous(), p.amax(-1)))(x @ w.t()), matrices(x, many)),
}

# What is no such region, or only part of one: values are all that is asked.
OTHERS: dict[str, Program] = {
    "contrast of both sides": (
        lambda a, b: (
            F.cross_entropy(a @ b.t() / 0.1, torch.arange(600, device=a.device))
            + F.cross_entropy(b @ a.t() / 0.1, torch.arange(600, device=a.device))
        ),
        matrices((600, 32), (600, 32)),
    ),
    "contrast by the transpose": (
        lambda a, b: (lambda s, t: F.cross_entropy(s, t) + F.cross_entropy(s.t(), t))(
            a @ b.t() / 0.1, torch.arange(600, device=a.device)
        ),
        matrices((600, 32), (600, 32)),
    ),
    "mean cross-entropy": (lambda x, w, t: F.cross_entropy(x @ w.t(), t), with_targets(37, 700, matrices(x, many))),
    "long rows stored": (lambda x, w: (x @ w.t()).softmax(-1), matrices(x, many)),
    "reduced over everything": (lambda x, w: (x @ w.t()).square().sum(), matrices(x, many)),
    "reduced over rows and columns apart": (lambda x, w: (lambda p: (p.sum(0), p.sum(1)))(x @ w.t()), matrices(x, w)),
    "norm over groups": (lambda x, w: F.group_norm(x @ w.t(), 4), matrices(x, w)),
    "norm over heads": (lambda x, w: F.layer_norm((x @ w.t()).view(37, 4, 12), (12,)), matrices(x, w)),
    "sorted": (lambda x, w: (x @ w.t()).softmax(-1).topk(4), matrices(x, w, dtype=torch.float32)),
    "cumulative": (lambda x, w: (x @ w.t()).softmax(-1).cumsum(-1), matrices(x, w)),
    "entropy": (
        lambda x, w: (lambda p: -(p.exp() * p).sum(-1))(F.log_softmax((x @ w.t()).float(), -1)),
        matrices(x, many),
    ),
    "softmax, then product": (lambda x, w, v: (x @ w.t()).softmax(-1) @ v, matrices((37, 300), deep, (700, 20))),
    "norm, then product": (lambda x, w, v: F.layer_norm(x @ w.t(), (48,)) @ v, matrices(x, w, (48, 20))),
    "one row": (lambda x, w: torch.logsumexp(x @ w.t(), -1), matrices((1, 64), many)),
    "one column": (lambda x, w: (x @ w.t()).softmax(-1), matrices(x, (1, 64))),
    "vector": (lambda x, w: torch.logsumexp(x @ w, -1), matrices((37, 64), (64,))),
    "double": (lambda x, w: torch.logsumexp(x @ w.t(), -1), matrices(x, many, dtype=torch.float64)),
}
