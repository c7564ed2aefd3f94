"""Attention as people write it: spellings that become one kernel, and programs that only look like them.

Each entry takes its arguments from a function, so that nothing is made before a test wants it. `half` and the other
makers give small sizes that are no multiples of anything: the kernels run in an interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Arguments = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Spelling:
    """A program over tensors, and what it is called with."""

    function: Callable[..., Any]
    arguments: Arguments


SPELLINGS: dict[str, Spelling] = {}
NEAR_MISSES: dict[str, Spelling] = {}


def heads(
    *shape: int, dtype: torch.dtype = torch.float16, keys: int | None = None, value: int | None = None
) -> Arguments:
    """Queries, keys and values of (batch, heads, positions, size)."""

    def make() -> tuple[Tensor, ...]:
        *outer, n, d = shape
        m, e = keys or n, value or d
        return tuple(torch.randn(*outer, *own).to(dtype) for own in ((n, d), (m, d), (m, e)))

    return make


def also(base: Arguments, *more: Callable[[], Tensor]) -> Arguments:
    """The arguments of another maker, and some after them."""
    return lambda: (*base(), *(make() for make in more))


half = heads(1, 2, 70, 32)
brain = heads(1, 2, 70, 32, dtype=torch.bfloat16)
single = heads(1, 2, 37, 16, dtype=torch.float32)


def spelling(arguments: Arguments, into: dict[str, Spelling] = SPELLINGS) -> Callable[..., Callable[..., Any]]:
    """Enter a program into a table under its own name."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        into[function.__name__] = Spelling(function, arguments)
        return function

    return enter


def near_miss(arguments: Arguments) -> Callable[..., Callable[..., Any]]:
    """Enter a program that is not attention, though close to it."""
    return spelling(arguments, NEAR_MISSES)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def lower(s: Tensor) -> Tensor:
    """Where a query may see a key, both counted from the start."""
    return torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()


def distance(s: Tensor) -> Tensor:
    """Position of the query less that of the key."""
    return torch.arange(s.shape[-2], device=s.device)[:, None] - torch.arange(s.shape[-1], device=s.device)[None, :]


# --- where the scale is ---


@spelling(half)
def scale_after_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


@spelling(brain)
def scale_after_multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, -1) @ v


@spelling(half)
def scale_before_on_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q * 0.25) @ k.mT, -1) @ v


@spelling(half)
def scale_before_on_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    c = q.shape[-1] ** -0.25
    return ((q * c) @ (k.mT * c)).softmax(-1) @ v


@spelling(brain)
def no_scale_at_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


@spelling(also(half, lambda: torch.tensor(0.3)))
def scale_from_a_tensor(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return ((q @ k.mT) * scale).softmax(-1) @ v


@spelling(also(half, lambda: torch.rand(2, 1, 1).half() + 0.5))
def scale_for_each_head(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return (q @ k.mT * scale).softmax(-1) @ v


# --- how softmax is written ---


@spelling(half)
def exponentials_over_their_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).float()
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(v.dtype) @ v


@spelling(single)
def division_after_the_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = torch.exp(s - s.max(-1, keepdim=True).values)
    return (e @ v) / e.sum(-1, keepdim=True)


@spelling(half)
def by_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).float()
    return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)).to(v.dtype) @ v


@spelling(single)
def by_log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.log_softmax(scores(q, k), -1).exp() @ v


@spelling(brain)
def in_float32_and_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(scores(q, k), -1, dtype=torch.float32).to(q.dtype) @ v


@spelling(half)
def upcast_before_the_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k).float(), -1).type_as(v) @ v


@spelling(brain)
def upcast_inputs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q32, k32, v32 = q.float(), k.float(), v.float()
    return (scores(q32, k32).softmax(-1) @ v32).to(q.dtype)


@spelling(single)
def exponentials_without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(scores(q, k))
    return e / e.sum(-1, keepdim=True) @ v


# --- masks ---


@spelling(half)
def causal_by_masked_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.masked_fill(~lower(s), float("-inf")).softmax(-1) @ v


@spelling(brain)
def causal_by_where_of_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.where(distance(s) >= 0, s, float("-inf")).softmax(-1) @ v


@spelling(half)
def causal_by_an_added_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    mask = torch.full(s.shape[-2:], float("-inf"), dtype=s.dtype, device=s.device).triu(1)
    return (s + mask).softmax(-1) @ v


@spelling(half)
def causal_by_finfo_min(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.where(lower(s), s, torch.finfo(s.dtype).min).softmax(-1) @ v


@spelling(also(half, lambda: torch.ones(128, 128, dtype=torch.bool).tril()[None, None]))
def causal_by_a_stored_triangle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    n = q.shape[-2]
    return scores(q, k).masked_fill(bias[:, :, :n, :n] == 0, float("-inf")).softmax(-1) @ v


@spelling(also(half, lambda: torch.where(torch.rand(70, 70) < 0.2, float("-inf"), torch.randn(70, 70)).half()))
def mask_of_floats(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k) + mask).softmax(-1) @ v


@spelling(also(half, lambda: torch.rand(1, 1, 1, 70) < 0.7))
def mask_of_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@spelling(also(heads(2, 2, 37, 32), lambda: (torch.rand(2, 37) < 0.7).long()))
def mask_of_keys_as_an_added_minimum(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    mask = (1.0 - keep[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return (scores(q, k) + mask).softmax(-1) @ v


@spelling(heads(1, 2, 130, 32))
def sliding_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    apart = distance(s)
    return s.masked_fill((apart < 0) | (apart >= 20), float("-inf")).softmax(-1) @ v


@spelling(also(half, lambda: torch.arange(70) // 23))
def document_mask(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    s = scores(q, k)
    same = (document[:, None] == document[None, :]) & lower(s)
    return s.masked_fill(~same, float("-inf")).softmax(-1) @ v


@spelling(heads(1, 2, 70, 32))
def prefix_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    seen = (distance(s) >= 0) | (torch.arange(s.shape[-1], device=s.device) < 10)
    return s.masked_fill(seen.logical_not(), float("-inf")).softmax(-1) @ v


@spelling(also(half, lambda: (torch.rand(70, 70) < 0.8).half()))
def mask_of_ones_as_a_large_number(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (scores(q, k) - 1e4 * (1 - keep)).softmax(-1) @ v


@spelling(also(heads(3, 2, 37, 32), lambda: torch.tensor([37, 3, 20])))
def lengths(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    keep = torch.arange(k.shape[-2], device=k.device) < length[:, None]
    return scores(q, k).masked_fill(~keep[:, None, None], float("-inf")).softmax(-1) @ v


@spelling(also(half, lambda: (torch.rand(70, 70) < 0.3) | (torch.arange(70) == 4)[:, None]))
def masked_rows_become_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scores(q, k).masked_fill(mask, float("-inf")).softmax(-1).nan_to_num(0.0) @ v


# --- what is added to scores ---


@spelling(also(half, lambda: torch.tensor([0.5, 0.25])))
def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    s = scores(q, k)
    biased = s - slopes[:, None, None] * distance(s).abs()
    return biased.masked_fill(~lower(s), float("-inf")).softmax(-1).to(v.dtype) @ v


@spelling(also(half, lambda: torch.randn(2, 139).half()))
def relative_position_from_a_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    s = scores(q, k)
    return (s + table[:, distance(s) + s.shape[-1] - 1]).softmax(-1) @ v


@spelling(also(half, lambda: torch.randn(2, 70, 70).half()))
def bias_for_each_head(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (scores(q, k) + bias).softmax(-1) @ v


@spelling(half)
def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.tanh(scores(q, k) / 20.0) * 20.0
    return s.masked_fill(~lower(s), float("-inf")).softmax(-1) @ v


@spelling(also(half, lambda: torch.randn(2, 70, 70).half()))
def by_baddbmm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = torch.baddbmm(bias, q[0], k[0].mT, beta=1.0, alpha=0.2)
    return torch.bmm(s.softmax(-1), v[0])


@spelling(half)
def alibi_with_computed_slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    slopes = 2.0 ** (-4.0 * torch.arange(1, s.shape[1] + 1, device=s.device))
    return (s - slopes[:, None, None] * distance(s).abs()).softmax(-1).to(v.dtype) @ v


@spelling(also(half, lambda: torch.randn(16, 2).half()))
def relative_position_in_buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    s = q @ k.mT
    apart = distance(s).clamp(min=0)
    far = 8 + (torch.log(apart.float() / 8 + 1e-6) / math.log(16) * 8).long().clamp(max=7)
    return (s + table[torch.where(apart < 8, apart, far)].permute(2, 0, 1)).softmax(-1) @ v


@spelling(half)
def scale_by_the_logarithm_of_the_position(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = torch.arange(1, q.shape[-2] + 1, device=q.device).log() / math.log(20)
    s = scores(q * n[:, None].to(q.dtype), k)
    return s.masked_fill(~lower(s), float("-inf")).softmax(-1) @ v


@spelling(also(half, lambda: torch.randn(2).half()))
def sink_in_the_sum(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s, extra = scores(q, k).float(), sink.view(1, -1, 1, 1).float()
    top = torch.maximum(s.amax(-1, keepdim=True), extra)
    e = torch.exp(s - top)
    return (e / (e.sum(-1, keepdim=True) + torch.exp(extra - top))).to(v.dtype) @ v


@spelling(half)
def with_the_logarithm_of_the_sum(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    s = s.masked_fill(~lower(s), float("-inf")).float()
    top = s.amax(-1, keepdim=True)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    return e.to(v.dtype) @ v / total.to(v.dtype), (top + total.log()).squeeze(-1)


# --- layouts ---


@spelling(lambda: tuple(torch.randn(2, 37, 3, 16).half() for _ in range(3)))
def positions_before_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (scores(q, k).softmax(-1) @ v).transpose(1, 2)


@spelling(lambda: (torch.randn(2, 37, 96).half(),))
def packed(qkv: Tensor) -> Tensor:
    b, n, w = qkv.shape
    q, k, v = (x.view(b, n, 2, w // 6).transpose(1, 2) for x in qkv.split(w // 3, -1))
    return (scores(q, k).softmax(-1) @ v).transpose(1, 2).reshape(b, n, w // 3)


@spelling(lambda: (torch.randn(3, 2, 2, 37, 32).half(),))
def packed_in_front(qkv: Tensor) -> Tensor:
    q, k, v = qkv.unbind(0)
    return scores(q, k).softmax(-1) @ v


@spelling(lambda: (torch.randn(1, 4, 37, 32).half(), *(torch.randn(1, 2, 37, 32).half() for _ in range(2))))
def grouped_heads_by_expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, n, d = k.shape
    k, v = (x[:, :, None].expand(b, h, 2, n, d).reshape(b, 2 * h, n, d) for x in (k, v))
    return scores(q, k).softmax(-1) @ v


@spelling(lambda: (torch.randn(1, 4, 37, 32).half(), *(torch.randn(1, 2, 37, 32).half() for _ in range(2))))
def grouped_heads_by_repeat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return scores(q, k).softmax(-1) @ v


@spelling(lambda: (torch.randn(1, 4, 37, 32).half(), *(torch.randn(1, 2, 37, 32).half() for _ in range(2))))
def grouped_heads_by_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, n, d = q.shape
    grouped = q.view(b, 2, 2, n, d)
    return (scores(grouped, k[:, :, None]).softmax(-1) @ v[:, :, None]).view(b, h, n, d)


@spelling(lambda: (torch.randn(1, 3, 37, 32).half(), *(torch.randn(1, 1, 37, 32).half() for _ in range(2))))
def one_head_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@spelling(half)
def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.2
    return torch.einsum("bhqk,bhkd->bqhd", s.softmax(-1), v)


@spelling(lambda: tuple(torch.randn(2, 37, 2, 16).half() for _ in range(3)))
def by_einsum_heads_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.2
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


@spelling(lambda: (torch.randn(70, 32).half(), torch.randn(70, 32).half(), torch.randn(70, 32).half()))
def without_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.t() * 0.2).softmax(-1) @ v


@spelling(half)
def transposed_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = k @ q.mT * 0.2
    return s.softmax(-2).mT @ v


@spelling(half)
def transposed_result(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.mT @ scores(q, k).softmax(-1).mT


# --- sizes ---


@spelling(heads(1, 2, 37, 80))
def size_80(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.masked_fill(~lower(s), float("-inf")).softmax(-1) @ v


@spelling(heads(1, 1, 37, 96, dtype=torch.bfloat16))
def size_96(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@spelling(heads(1, 1, 37, 256))
def size_256(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@spelling(heads(1, 2, 37, 32, value=24))
def values_of_another_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@spelling(heads(1, 2, 37, 32, keys=130))
def cross_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@spelling(heads(1, 2, 5, 32, keys=130))
def causal_with_more_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    later = distance(s) + (s.shape[-1] - s.shape[-2])
    return s.masked_fill(later < 0, float("-inf")).softmax(-1) @ v


# --- what surrounds it ---


@spelling(also(half, lambda: torch.randn(1, 2, 70, 32).half()))
def gated_and_added(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return torch.sigmoid(gate) * (scores(q, k).softmax(-1) @ v) + q


# --- near misses ---


@near_miss(half)
def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-2) @ v


@near_miss(half)
def scores_transposed_wrongly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).mT @ v


@near_miss(half)
def mask_after_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return (p * lower(p)) @ v


@near_miss(half)
def mask_after_softmax_and_divided_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    p = p.masked_fill(~lower(p), 0.0)
    return (p / p.sum(-1, keepdim=True)) @ v


@near_miss(half)
def two_results_with_scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = scores(q, k).softmax(-1)
    return p @ v, p


@near_miss(half)
def raw_scores_as_well(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.mean(-1)


@near_miss(also(half, lambda: torch.randn(1, 2, 70, 16).half()))
def two_products_with_the_weights(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    p = scores(q, k).softmax(-1)
    return p @ v, p @ w


@near_miss(half)
def softmax_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(1) @ v


@near_miss(half)
def softmax_over_everything(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.flatten(-2).softmax(-1).view(s.shape) @ v


@near_miss(lambda: tuple(torch.randn(1, 2, 33, 33).half() for _ in range(3)))
def heads_permuted_wrongly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k.mT).softmax(-1) @ v.flip(1)


@near_miss(half)
def two_softmaxes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).softmax(-1) @ v


@near_miss(half)
def difference_of_softmaxes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) - 0.5 * scores(k, q).softmax(-1)) @ v


@near_miss(half)
def sigmoid_instead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(scores(q, k)) @ v


@near_miss(half)
def squared_relu_instead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).relu().square()
    return s @ v / (s.sum(-1, keepdim=True) + 1.0)


@near_miss(half)
def weights_of_largest_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s == s.amax(-1, keepdim=True)).to(v.dtype) @ v


@near_miss(half)
def normed_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s / s.square().sum(-1, keepdim=True).sqrt() @ v


@near_miss(half)
def layer_norm_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return F.layer_norm(s, s.shape[-1:]) @ v


@near_miss(half)
def values_from_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return p @ p @ v


@near_miss(half)
def running_sum_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).cumsum(-1).softmax(-1) @ v


@near_miss(half)
def reversed_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).flip(-1).softmax(-1) @ v


@near_miss(half)
def maximum_of_other_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, t = scores(q, k).float(), scores(k, q).float()
    e = torch.exp(s - t.amax(-1, keepdim=True).clamp(min=5.0))
    return (e / e.sum(-1, keepdim=True)).to(v.dtype) @ v


@near_miss(also(half, lambda: torch.rand(70, 16).half(), lambda: torch.rand(70, 16).half()))
def rotary_in_front(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return scores(rotate(q), rotate(k)).softmax(-1) @ v


@near_miss(also(half, lambda: torch.randn(2, 2).half()))
def heads_mixed_after_softmax(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("bhqk,gh->bgqk", scores(q, k).softmax(-1), mix) @ v


@near_miss(also(half, lambda: torch.randn(2).half()))
def sink_as_one_more_column(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = scores(q, k)
    more = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    return more.softmax(-1)[..., :-1] @ v


@near_miss(half)
def mean_weights_as_well(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = scores(q, k).softmax(-1)
    return p @ v, p.mean(1)


@near_miss(half)
def penalty_of_the_sum_as_well(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k).float()
    total = torch.logsumexp(s, -1, keepdim=True)
    return torch.exp(s - total).to(v.dtype) @ v, total.square().mean()


@near_miss(half)
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)


@near_miss(half)
def attention_of_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(scores(q, k).softmax(-1) @ v, k).softmax(-1) @ v


@near_miss(half)
def queries_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([scores(part, k).softmax(-1) @ v for part in q.split(35, -2)], -2)


@near_miss(half)
def norms_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])).softmax(-1) @ v
