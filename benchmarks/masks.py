"""Attention whose masks come from data, as a user would write it, in bfloat16: captured positions, documents, lengths,
a stored mask of booleans or of numbers that are added. FlexAttention is given a block mask that was made before the
clock starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .contractions import CAP, WHOLE, capped_score, heads_of, mixed, not_later, pair_flops, scores
from .libraries import flex
from .workloads import Arguments, Workload

_DOCUMENTS = 8


def positions_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    return mixed(scores(q, k), positions[:, None] >= positions[None, :], v)


def capped_positions_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    return mixed(CAP * torch.tanh(scores(q, k) / CAP), positions[:, None] >= positions[None, :], v)


def documents_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    places = torch.arange(q.shape[-2], device=q.device)
    return mixed(scores(q, k), (places[:, None] >= places) & (documents[:, None] == documents), v)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    kept = torch.arange(k.shape[-2], device=q.device) < lengths[:, None]
    return mixed(scores(q, k), kept[:, None, None, :], v)


def stored_mask_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return mixed(scores(q, k), allowed, v)


def added_mask_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(scores(q, k) + bias, -1) @ v


def sdpa_given_a_mask(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def _documents_and_causal(rows: int) -> Tensor:
    places = torch.arange(rows)
    document = places * _DOCUMENTS // rows
    return (places[:, None] >= places) & (document[:, None] == document)


def _with(make: Callable[[int, int], Tensor]) -> Callable[[float], Arguments]:
    """Heads, and what `make` gives for their batch and rows."""

    def build(scale: float) -> Arguments:
        q, k, v = heads_of()(scale)
        return q, k, v, make(q.shape[0], q.shape[2])

    return build


_positions = _with(lambda batch, rows: torch.arange(rows))
_documents = _with(lambda batch, rows: torch.arange(rows) * _DOCUMENTS // rows)
_lengths = _with(lambda batch, rows: torch.linspace(rows // 4, rows, batch).long())
_stored = _with(lambda batch, rows: _documents_and_causal(rows))
_added = _with(lambda batch, rows: torch.where(_documents_and_causal(rows), 0.0, -math.inf).to(torch.bfloat16))
_CAUSAL = pair_flops(1 << 30)


def _in_documents(arguments: Arguments) -> float:
    return _CAUSAL((arguments[0][..., : arguments[0].shape[2] // _DOCUMENTS, :],) * 2) * _DOCUMENTS


def _kept_pairs(arguments: Arguments) -> float:
    q, lengths = arguments[0], arguments[3]
    return float(4 * q.shape[3] * q.shape[1] * q.shape[2] * lengths.sum().item())


def _by_documents(arguments: Arguments) -> Callable[..., Any]:
    documents = arguments[3]

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[query] == documents[key])

    return flex(allowed)["flex"](arguments)


def _by_mask(arguments: Arguments) -> Callable[..., Any]:
    stored = arguments[3] if arguments[3].dtype is torch.bool else arguments[3] == 0

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return stored[query, key]

    return flex(allowed)["flex"](arguments)


def _by_lengths(arguments: Arguments) -> Callable[..., Any]:
    lengths = arguments[3]

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < lengths[batch]

    return flex(allowed, batch=arguments[0].shape[0])["flex"](arguments)


MASKS: tuple[Workload, ...] = tuple(
    Workload(name, function, build, operations, sample=WHOLE, libraries=libraries)
    for name, function, build, operations, libraries in (
        ("causal by positions", positions_attention, _positions, _CAUSAL, flex(not_later)),
        (
            "soft-cap, causal by positions", capped_positions_attention, _positions, _CAUSAL,
            flex(not_later, capped_score),
        ),
        ("8 documents + causal", documents_attention, _documents, _in_documents, {"flex": _by_documents}),
        ("padding, 62.5 % of the keys kept", padded_attention, _lengths, _kept_pairs, {"flex": _by_lengths}),
        ("8 documents + causal, a stored mask", stored_mask_attention, _stored, _in_documents, {"flex": _by_mask}),
        ("8 documents + causal, an additive mask", added_mask_attention, _added, _in_documents, {"flex": _by_mask}),
        ("SDPA given that mask", sdpa_given_a_mask, _stored, _in_documents, {"flex": _by_mask}),
        ("SDPA given that additive mask", sdpa_given_a_mask, _added, _in_documents, {"flex": _by_mask}),
    )
)  # fmt: skip
