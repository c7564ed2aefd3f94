"""Calls of `F.scaled_dot_product_attention` that no kernel of the library takes, as plain math that kernels of ours do.

AOTAutograd expands such a call to products of float32 matrices, which are stored. Here operands stay 16-bit, forward
and backward, scores are float32, and the weights are rounded to the type of the values before they multiply them, as
the library's kernels do. A row in which no score counts is zero, as in eager.

A call that the library takes is left alone, apart from one with a large stored mask that nobody differentiates. Some
it takes in another form: with a matrix or a mask copied so that its last dimension has a stride of 1, with a batch of
one in front, with every head of keys repeated for its group. Of a chip that is not here torch cannot say what its
library takes: there every masked call without backward is math.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from ..ir.orders import orders_of
from .grouped_heads import group_heads
from .known_masks import ARGUMENTS, ATTENTION, simplify_masks
from .torch_private import library_takes

MANY_KEYS = 1024  # from which a kernel of ours finds out which tiles of a stored mask count
Given = dict[str, Any]  # arguments of a call by name
_MATRICES = ARGUMENTS[:3]
LAYOUT = "layout"  # of what eager returns: an argument of `attention` alone


class _Scores(torch.autograd.Function):  # type: ignore[misc]
    """Scaled products of queries and keys in float32, and a bias. The gradient of the scores is rounded to 16 bits."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, factor: float, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.factor, ctx.bias = factor, None if bias is None else (bias.shape, bias.dtype)
        scores = (query.float() @ key.float().transpose(-2, -1)) * factor
        return scores if bias is None else scores + bias.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.saved_tensors
        if ctx.bias is None or not ctx.needs_input_grad[3]:
            gradient = (gradients[0] * ctx.factor).to(query.dtype)
            return gradient @ key, gradient.transpose(-2, -1) @ query, None, None
        gradient, factor = gradients[0].to(query.dtype), ctx.factor
        bias = gradient.sum_to_size(ctx.bias[0]).to(ctx.bias[1])
        own = gradient @ key, gradient.transpose(-2, -1) @ query
        return (*(own if factor == 1.0 else (x * factor for x in own)), None, bias)


class _Weights(torch.autograd.Function):  # type: ignore[misc]
    """The softmax of each row; zero where no score of it counts. Its gradient is that of a softmax."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - torch.where(top == -math.inf, 0.0, top))
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0.0, 1.0, total)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        shares = gradients[0] * weights
        return shares - weights * shares.sum(-1, keepdim=True)


def plain_attention(given: Given) -> Tensor:
    """Attention as plain math. A mask is of booleans, or of numbers that are added to the scores."""
    query, key, value = (given[name] for name in _MATRICES)
    mask, scale = given.get("attn_mask"), given.get("scale")
    if given.get("enable_gqa"):
        key, value = (_repeated(t, query.shape[-3] // t.shape[-3]) for t in (key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if given.get("is_causal"):
        rows, columns = (torch.arange(t.shape[-2], device=query.device) for t in (query, key))
        mask = rows[:, None] >= columns
    seen, bias = (mask, None) if mask is not None and mask.dtype is torch.bool else (None, mask)
    scores = _Scores.apply(query, key, factor, bias)  # type: ignore[no-untyped-call]
    scores = scores if seen is None else scores.masked_fill(seen.logical_not(), -math.inf)
    sees_some = mask is None or given.get("is_causal")  # each row, keys
    weights = torch.softmax(scores, -1) if sees_some else _Weights.apply(scores)  # type: ignore[no-untyped-call]
    if dropped := given.get("dropout_p"):
        weights = F.dropout(weights, dropped)
    return weights.to(value.dtype) @ value


def _repeated(heads: Tensor, times: int) -> Tensor:
    """Every head so many times in a row."""
    *outer, count, rows, width = heads.shape
    return heads.unsqueeze(-3).expand(*outer, count, times, rows, width).reshape(*outer, count * times, rows, width)


def prepare_attention(graph: GraphModule) -> None:
    """Attention loses masks that say nothing and repeated heads; what the library does not take is plain math.

    The graph is dynamo's, before AOTAutograd. Calls are replaced; a mode around the whole trace would be asked about
    every function of torch that is called.
    """
    simplify_masks(graph)
    group_heads(graph)
    for part in (m for m in graph.modules() if isinstance(m, GraphModule)):
        found = part.graph.find_nodes(op="call_function", target=ATTENTION)
        for node in (calls := [n for n in found if not orders_of(n).no_fuse]):
            node.target = attention
            if isinstance(eager := node.meta.get("example_value"), Tensor):
                node.update_kwarg(LAYOUT, _outermost_first(eager))
        if calls:
            part.recompile()


def _outermost_first(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions by their strides, as far as those are known."""
    strides = tensor.stride()
    known = all(isinstance(n, int) for n in strides)
    return tuple(sorted(range(len(strides)), key=lambda k: -strides[k])) if known else tuple(range(len(strides)))


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """What stands for `F.scaled_dot_product_attention` while a graph is traced; the result lies as eager's does."""
    order = kwargs.pop(LAYOUT, ())
    found = _attention({**dict(zip(ARGUMENTS, args, strict=False)), **kwargs})
    if not order or order == _outermost_first(found):
        return found
    return found.permute(order).contiguous().permute([order.index(k) for k in range(len(order))])


def _attention(given: Given) -> Tensor:
    if given["query"].is_cuda and not torch.cuda.is_available():
        return plain_attention(given) if _is_plain(given) else _by_definition(given)
    if not _is_plain(given):
        return ATTENTION(**given)
    tensors = [t for name in ARGUMENTS[:4] if isinstance(t := given.get(name), Tensor)]
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    masked = len(tensors) == 4 and not given.get("dropout_p")
    if not differentiated and masked and (not on_gpu(tensors[0]) or _hides_tiles(*tensors)):
        return plain_attention(given)
    if not differentiated and not on_gpu(tensors[0]):
        return ATTENTION(**given)
    for form in _forms(given, differentiated):
        if library_takes(form):
            found: Tensor = ATTENTION(**form)
            return found if found.dim() == tensors[0].dim() else found.squeeze(0)
    return plain_attention(given)


def _by_definition(given: Given) -> Tensor:
    """Torch's own plain math, for a GPU that is not here and cannot be asked what its library takes."""
    own = [given.get(name) for name in ARGUMENTS[:4]]
    dropped, causal = given.get("dropout_p", 0.0), given.get("is_causal", False)
    options = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
    found: Tensor = torch.ops.aten._scaled_dot_product_attention_math(*own, dropped, causal, **options)[0]
    return found


def _hides_tiles(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether a mask is stored for every query and key, and so large that tiles are passed over.

    The library computes every score. A kernel of ours has three quarters of its rate and is expected to need half.
    """
    if mask.dim() < 2 or mask.dtype is not torch.bool:
        return False
    (rows, columns), steps = mask.shape[-2:], mask.stride()[-2:]
    stored = all(isinstance(n, int) and n > 0 for n in (rows, columns, *steps))
    return stored and rows > 1 and columns >= MANY_KEYS


def on_gpu(tensor: Tensor) -> bool:
    """Whether torch can say what its library takes."""
    return bool(tensor.is_cuda)


def _is_plain(given: Given) -> bool:
    """Whether plain math computes a call: of 16-bit matrices with equal batches, causal or with a mask."""
    matrices = [t for n in _MATRICES if isinstance(t := given.get(n), Tensor)]
    if len(matrices) < len(_MATRICES) or min(t.dim() for t in matrices) < 3:
        return False
    if not {t.dtype for t in matrices} <= {torch.float16, torch.bfloat16} or any(
        0 in _known(t.shape) for t in matrices
    ):
        return False
    if given.get("is_causal") and given.get("attn_mask") is not None:
        return False
    query, key, value = matrices
    outer = -3 if given.get("enable_gqa") else -2
    return bool(query.shape[:outer] == key.shape[:outer] == value.shape[:outer])


def _known(shape: torch.Size) -> list[int]:
    """The sizes that are known now."""
    return [n for n in shape if isinstance(n, int)]


def _forms(given: Given, copies: bool) -> Iterator[Given]:
    """A call as the program has it, and in the forms that the library may take instead.

    `copies`: also of matrices and masks that a kernel of ours reads as they are.
    """
    yield given
    if copies:
        tensors = {n: t for n in ARGUMENTS[:4] if isinstance(t := given.get(n), Tensor)}
        given = given | {n: t if t.stride(-1) == 1 else t.contiguous() for n, t in tensors.items()}
        if given["query"].dim() == 3:
            given |= {n: given[n].unsqueeze(0) for n in _MATRICES}
        yield given
    if given.get("enable_gqa"):
        query, *others = (given[n] for n in _MATRICES)
        key, value = (_repeated(t, query.shape[-3] // t.shape[-3]) for t in others)
        yield given | {"key": key, "value": value, "enable_gqa": False}
