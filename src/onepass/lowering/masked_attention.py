"""`F.scaled_dot_product_attention` with a mask, as plain math: one kernel instead of products in float32.

AOTAutograd expands a call whose mask the library's kernels do not take to products of float32 matrices, which are
stored. Here operands stay 16-bit, scores are float32, and the weights are rounded to the
type of the values before they multiply them, as the library's kernels do. A row in which no score counts is zero, as
in eager. Calls that a kernel of the library takes are left alone. Calls that backward goes through are the library's:
it refuses a mask whose last dimension has a stride other than 1 (an expanded mask), so that mask is copied. Of a chip
that is not here torch cannot say what its library takes: there every masked call without backward is math.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..ir.orders import orders_of
from .known_masks import ARGUMENTS, ATTENTION
from .torch_private import library_takes


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, grouped: bool
) -> Tensor:
    """Attention of queries that a mask lets see some keys: booleans, or numbers that are added to the scores."""
    if grouped:
        key, value = (_repeated(t, query.shape[-3] // t.shape[-3]) for t in (key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.float() @ key.float().transpose(-2, -1)) * factor
    boolean = mask.dtype is torch.bool
    scores = scores.masked_fill(mask.logical_not(), -math.inf) if boolean else scores + mask.float()
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == -math.inf, 0.0, top))
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0.0, 1.0, total)).to(value.dtype) @ value


def _repeated(heads: Tensor, times: int) -> Tensor:
    """Every head so many times in a row."""
    *outer, count, rows, width = heads.shape
    return heads.unsqueeze(-3).expand(*outer, count, times, rows, width).reshape(*outer, count * times, rows, width)


def write_out_masked_attention(graph: GraphModule) -> None:
    """Masked attention that nothing differentiates is traced as plain math: of dynamo's graph, before AOTAutograd.

    Its calls are replaced; a mode around the whole trace would be asked about every function of torch that is called.
    """
    for part in (m for m in graph.modules() if isinstance(m, GraphModule)):
        found = part.graph.find_nodes(op="call_function", target=ATTENTION)
        for node in (calls := [n for n in found if not orders_of(n).no_fuse]):
            node.target = attention
        if calls:
            part.recompile()


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """What stands for `F.scaled_dot_product_attention` while a graph is traced."""
    given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
    if _is_refused(given):
        return ATTENTION(**given | {"attn_mask": given["attn_mask"].contiguous()})
    if not _is_masked(given):
        return ATTENTION(*args, **kwargs)
    query, key, value, mask = (given[name] for name in ARGUMENTS[:4])
    return masked_attention(query, key, value, mask, given.get("scale"), bool(given.get("enable_gqa")))


def on_gpu(tensor: Tensor) -> bool:
    """Whether torch can say what its library takes."""
    return bool(tensor.is_cuda)


def _matrices(given: dict[str, Any]) -> list[Tensor]:
    """Queries, keys, values and mask of a call whose matrices are 16-bit; else nothing."""
    tensors = [t for name in ARGUMENTS[:4] if isinstance(t := given.get(name), Tensor)]
    half = all(t.dtype in (torch.float16, torch.bfloat16) and t.dim() >= 3 for t in tensors[:3])
    return tensors if len(tensors) == 4 and half else []


def _is_masked(given: dict[str, Any]) -> bool:
    """Whether a call is written out: nothing differentiates it, and the library does not take it."""
    tensors = _matrices(given)
    if given.get("dropout_p") or given.get("is_causal") or not tensors:
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    query, key, value, mask = tensors
    return not on_gpu(query) or not library_takes(query, key, value, mask)


def _is_refused(given: dict[str, Any]) -> bool:
    """Whether the library takes a call that is differentiated only with a copy of its mask."""
    tensors = _matrices(given)
    if not tensors or not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors[:3]):
        return False
    query, key, value, mask = tensors
    if mask.requires_grad or mask.stride(-1) == 1 or not on_gpu(query) or library_takes(*tensors):
        return False
    return library_takes(query, key, value, mask.contiguous())
