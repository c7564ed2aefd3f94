"""Statistics of a product as people write them: beside the product, without it, of rows, of columns and of all.

Sizes are no multiples of anything, and small: the kernels run in an interpreter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contractions.row_spellings import Program, matrices

x, w, b = (150, 40), (301, 40), (301,)


def beside(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w.t()
    return y, y.float().square().mean(-1), y.abs().amax(-1)


def batch_statistics(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w.t()
    return y, *torch.var_mean(y.float(), 0)


def batch_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w.t()
    variance, mean = torch.var_mean(y.float(), 0)
    return (y - mean) * torch.rsqrt(variance + 1e-5)


def both_ways(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w.t()
    return y.amax(-1), y.amin(0), y.float().sum(0), y.abs().max(), y.float().square().sum()


def activated(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = F.gelu(F.linear(x, w, b))
    return y, y.abs().amax(), torch.linalg.vector_norm(y.float(), dim=-1)


STATES: dict[str, Program] = {
    "row statistics beside the product": (beside, matrices(x, w)),
    "in bfloat16": (beside, matrices(x, w, dtype=torch.bfloat16)),
    "in float32": (beside, matrices(x, w, dtype=torch.float32)),
    "row statistics alone": (lambda x, w: (x @ w.t()).float().square().mean(-1).add(1e-6).rsqrt(), matrices(x, w)),
    "rows of one tile": (beside, matrices((150, 40), (17, 40))),
    "mean and variance of rows": (lambda x, w: torch.var_mean((x @ w.t()).float(), -1), matrices(x, w)),
    "mean and variance of columns": (batch_statistics, matrices(x, w)),
    "a column's sum": (lambda x, w: (lambda y: (y, y.float().sum(0)))(x @ w.t()), matrices(x, w)),
    "the largest of all": (lambda x, w: (x @ w.t()).abs().max(), matrices(x, w)),
    "rows, columns and all": (both_ways, matrices(x, w, dtype=torch.float32)),
    "bias, activation and its scale": (activated, matrices(x, w, b)),
    "arg-max": (lambda x, w: (lambda y: (y, *y.max(-1)))(x @ w.t()), matrices(x, w)),
    "any and all": (
        lambda x, w: (lambda y: ((y > 0.5).any(-1), (y > -3).all(0)))(x @ w.t()),
        matrices(x, w, dtype=torch.float32),
    ),
    "log-sum-exp": (lambda x, w: torch.logsumexp(x @ w.t(), -1), matrices(x, w)),
    "log-sum-exp beside the product": (lambda x, w: (lambda y: (y, torch.logsumexp(y, 0)))(x @ w.t()), matrices(x, w)),
    "batched": (
        lambda a, b: (lambda y: (y, y.float().sum(-1), y.amax(-2)))(a @ b),
        matrices((3, 70, 33), (3, 33, 150)),
    ),
    "batched, over the batch, too": (
        lambda a, b: (a @ b).float().square().mean((0, 2)),
        matrices((3, 70, 33), (3, 33, 150)),
    ),
    "a batch with one matrix": (
        lambda a, w: (lambda y: (y, y.float().mean((0, 1))))(F.linear(a, w)),
        matrices((3, 50, 40), w),
    ),
    "two products": (lambda x, w, u: ((x @ w.t()) * (x @ u.t())).float().square().sum(-1), matrices(x, w, w)),
    "statistics of a residual": (
        lambda x, w, r: (lambda s: (s, s.float().square().mean(-1)))(x @ w.t() + r),
        matrices(x, w, (150, 301)),
    ),
    "batch norm": (batch_norm, matrices(x, w)),
    "batch norm of another product": (
        lambda x, w: (x @ w.t() - torch.mean((x @ w.t()).float(), 0)).relu(),
        matrices(x, w),
    ),
}
