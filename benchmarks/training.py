"""Forward and backward around matrix products, as a user would write them, in bfloat16: attention from plain math with
masks and changes of the scores, a transformer block, a linear layer with cross-entropy. Every gradient is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .contractions import (
    WHOLE,
    WINDOW,
    block_products,
    capped_attention,
    capped_score,
    causal_attention,
    distances,
    drawn_weight,
    heads_of,
    mixed,
    near,
    normal,
    not_later,
    pair_flops,
    scores,
    side_of,
    window_attention,
)
from .libraries import Attend, flex, sdpa
from .workloads import Arguments, Workload

_DOCUMENTS = 8


# --- attention ---


def alibi_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The slopes are fixed numbers, as in the models that use them."""
    s = scores(q, k)
    away = distances(s)
    return mixed(s - _slopes(q)[:, None, None] * away, away >= 0, v)


def _slopes(q: Tensor) -> Tensor:
    heads = q.shape[1]
    return torch.exp2(-8 * (1 + torch.arange(heads, device=q.device)) / heads).to(q.dtype)


def relative_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A learned number for each head and distance is added to the scores."""
    s = scores(q, k)
    return torch.softmax(s + table[:, distances(s) + k.shape[-2] - 1], -1) @ v


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    s = scores(q, k)
    return mixed(s, (distances(s) >= 0) & (documents[:, None] == documents[None, :]), v)


# --- a transformer block of 16 d^2 parameters, and a loss of a product ---


def block_around(
    attend: Attend, x: Tensor, norms: Tensor, qkv: Tensor, out: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    batch, rows, width = x.shape
    y = F.rms_norm(x, (width,), norms[0])
    heads = F.linear(y, qkv).view(batch, rows, 3, max(1, width // 128), -1).permute(2, 0, 3, 1, 4)
    mixed_heads = attend(heads[0], heads[1], heads[2]).transpose(1, 2).reshape(batch, rows, width)
    x = x + F.linear(mixed_heads, out)
    y = F.rms_norm(x, (width,), norms[1])
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def transformer_block(
    x: Tensor, norms: Tensor, qkv: Tensor, out: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    return block_around(causal_attention, x, norms, qkv, out, gate, up, down)


def linear_cross_entropy(x: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, words), labels)


# --- arguments ---


def _relative(scale: float) -> Arguments:
    q, k, v = heads_of(batch=2)(scale)
    return q, k, v, normal(q.shape[1], 2 * q.shape[2] - 1)


def _documents(scale: float) -> Arguments:
    q, k, v = heads_of(batch=2)(scale)
    rows = q.shape[2]
    return q, k, v, torch.arange(rows) * _DOCUMENTS // rows


def _block(scale: float) -> Arguments:
    batch, rows, width = side_of(8, scale, 1), side_of(2048, scale), side_of(2048, scale, 256)
    shapes = ((3 * width, width), (width, width), (4 * width, width), (4 * width, width), (width, 4 * width))
    return normal(batch, rows, width), normal(2, width), *(drawn_weight(*shape, inputs=shape[1]) for shape in shapes)


def _words(scale: float) -> Arguments:
    rows, width, words = side_of(8192, scale), side_of(4096, scale), side_of(128256, scale)
    return normal(rows, width), drawn_weight(words, width, inputs=width), torch.randint(0, words, (rows,))


# --- what is counted, and what libraries are asked ---


def _five_products(window: int | None) -> Callable[[Arguments], float]:
    """Forward's two products, and five of backward: the scores are computed again."""
    forward = pair_flops(window)
    return lambda arguments: 3.5 * forward(arguments)


_ALL, _CAUSAL, _BAND = _five_products(None), _five_products(1 << 30), _five_products(WINDOW)


def _in_documents(arguments: Arguments) -> float:
    return _five_products(1 << 30)((arguments[0][..., : arguments[0].shape[2] // _DOCUMENTS, :],) * 2) * _DOCUMENTS


def _alibi_score(arguments: Arguments) -> Callable[..., Tensor]:
    slopes = _slopes(arguments[0])

    def score(s: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return s - slopes[head] * (query - key)

    return score


def _relative_score(arguments: Arguments) -> Callable[..., Tensor]:
    table, last = arguments[3], arguments[1].shape[2] - 1

    def score(s: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return s + table[head, query - key + last]

    return score


def _document_flex(arguments: Arguments) -> Callable[..., Any]:
    documents = arguments[3]

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[query] == documents[key])

    return flex(allowed)["flex"](arguments)


def _attention(name: str, function: Callable[..., Any], build: Any, operations: Any, libraries: Any) -> Workload:
    return Workload(name, function, build, operations, train=True, sample=WHOLE, libraries=libraries)


TRAINING: tuple[Workload, ...] = (
    _attention(
        "causal", causal_attention, heads_of(batch=2), _CAUSAL, sdpa(causal=True) | flex(not_later)
    ),
    _attention(
        "causal, 64 wide", causal_attention, heads_of(64, batch=2), _CAUSAL, sdpa(causal=True) | flex(not_later)
    ),
    _attention("ALiBi + causal", alibi_attention, heads_of(batch=2), _CAUSAL, flex(not_later, _alibi_score)),
    _attention("soft-cap + causal", capped_attention, heads_of(batch=2), _CAUSAL, flex(not_later, capped_score)),
    _attention("window 512", window_attention, heads_of(batch=2), _BAND, flex(near)),
    _attention("8 documents + causal", document_attention, _documents, _in_documents, {"flex": _document_flex}),
    _attention("relative positions, learned", relative_attention, _relative, _ALL, flex(None, _relative_score)),
    Workload(
        "transformer block, 8x2048x2048", transformer_block, _block, lambda a: 3 * block_products(a), train=True,
        libraries=sdpa(causal=True, program=block_around) | flex(not_later, program=block_around),
    ),
    Workload(
        "linear + cross-entropy, 8192x4096x128256", linear_cross_entropy, _words,
        lambda a: 6.0 * a[0].numel() * a[1].shape[0], train=True,
    ),
)  # fmt: skip
