"""Programs around matrix products, as a user would write them, in bfloat16: attention from plain math, matmuls with
neighbours, a transformer block. The FLOPs counted are those of the products that no mask makes useless.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .libraries import Attend, bare, epilogue, flex, sdpa, sdpa_decode
from .workloads import Arguments, Sample, Workload

BF16, I8 = torch.bfloat16, torch.int8
WINDOW, CAP = 512, 20.0
_CHECKED_ROWS = 256


# --- attention ---


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)


def distances(s: Tensor) -> Tensor:
    """How far each key lies before its query; negative for later keys."""
    places = torch.arange(s.shape[-1], device=s.device)
    return places[:, None] - places[None, :]


def mixed(s: Tensor, allowed: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(s.masked_fill(~allowed, -math.inf), -1) @ v


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), -1) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return mixed(s, distances(s) >= 0, v)


def alibi_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    s = scores(q, k)
    away = distances(s)
    return mixed(s - slopes[:, None, None] * away, away >= 0, v)


def capped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = CAP * torch.tanh(scores(q, k) / CAP)
    return mixed(s, distances(s) >= 0, v)


def window_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    away = distances(s)
    return mixed(s, (away >= 0) & (away < WINDOW), v)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def with_rope(attend: Attend, q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return attend(rotated(q, cosine, sine), rotated(k, cosine, sine), v)


def rope_attention(q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return with_rope(causal_attention, q, k, v, cosine, sine)


def decode_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    return full_attention(q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1))


# --- matmuls ---


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate) * (x @ up)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype) * scale[:, None])


def int8_weights(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x @ (weight.to(x.dtype) * scale)


def int8_matmul(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, scale: Tensor) -> Tensor:
    product = (x.to(x_scale.dtype) * x_scale) @ (weight.to(weight_scale.dtype) * weight_scale)
    return torch.clamp(torch.round(product / scale), -128, 127).to(torch.int8)


def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def matmul_residual_norm(x: Tensor, weight: Tensor, residual: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x @ weight + residual, residual.shape[-1:], gain, shift)


# --- a transformer block ---


def block_around(
    attend: Attend, x: Tensor, norms: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    batch, rows, width = x.shape
    y = F.layer_norm(x, (width,), norms[0], norms[1])
    heads = F.linear(y, qkv).view(batch, rows, 3, max(1, width // 128), -1).permute(2, 0, 3, 1, 4)
    mixed_heads = attend(heads[0], heads[1], heads[2]).transpose(1, 2).reshape(batch, rows, width)
    x = x + F.linear(mixed_heads, out)
    y = F.layer_norm(x, (width,), norms[2], norms[3])
    return x + F.linear(F.gelu(F.linear(y, up), approximate="tanh"), down)


def transformer_block(x: Tensor, norms: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return block_around(causal_attention, x, norms, qkv, out, up, down)


# --- arguments; quick runs have one batch, few heads and short sides ---


def side_of(size: int, scale: float, least: int = 128) -> int:
    return min(size, max(least, int(size * scale)))


def normal(*shape: int, deviation: float = 1.0) -> Tensor:
    return (torch.randn(shape) * deviation).to(BF16)


def drawn_weight(*shape: int, inputs: int) -> Tensor:
    return normal(*shape, deviation=inputs**-0.5)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=I8)


def heads_of(width: int = 128, batch: int = 4) -> Callable[[float], Arguments]:
    def build(scale: float) -> Arguments:
        shape = side_of(batch, scale, 1), side_of(16, scale, 2), side_of(4096, scale), width
        return tuple(normal(*shape) for _ in range(3))

    return build


def _alibi(scale: float) -> Arguments:
    q, k, v = heads_of()(scale)
    heads = q.shape[1]
    return q, k, v, torch.exp2(-8 * (1 + torch.arange(heads)) / heads).to(BF16)


def _rope(scale: float) -> Arguments:
    q, k, v = heads_of()(scale)
    rates = 10000.0 ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
    angles = (torch.arange(q.shape[-2])[:, None] * rates).repeat(1, 2)
    return q, k, v, angles.cos().to(BF16), angles.sin().to(BF16)


def _decode(scale: float) -> Arguments:
    heads, keys = side_of(8, scale, 2), side_of(32768, scale)
    return normal(1, 4 * heads, 1, 128), normal(1, heads, keys, 128), normal(1, heads, keys, 128)


def _linear(scale: float) -> Arguments:
    rows, inputs, outputs = (side_of(size, scale) for size in (8192, 4096, 16384))
    return normal(rows, inputs), drawn_weight(outputs, inputs, inputs=inputs), normal(outputs)


def _swiglu(scale: float) -> Arguments:
    rows, inputs, outputs = (side_of(size, scale) for size in (8192, 4096, 14336))
    return normal(rows, inputs), *(drawn_weight(inputs, outputs, inputs=inputs) for _ in range(2))


def _int8_weights(scale: float) -> Arguments:
    side = side_of(8192, scale)
    return normal(16, side), _bytes(side, side), (torch.rand(side) + 0.5).to(BF16) * (side**-0.5 / 64)


def _int8_matmul(scale: float) -> Arguments:
    side = side_of(4096, scale)
    x_scale, weight_scale = (torch.rand(side, 1) + 0.5) / 64, (torch.rand(side) + 0.5) * (side**-0.5 / 64)
    return (
        _bytes(side, side),
        _bytes(side, side),
        x_scale.to(BF16),
        weight_scale.to(BF16),
        torch.full((side,), 1 / 32).to(BF16),
    )


def _projections(scale: float) -> Arguments:
    rows, inputs = side_of(4096, scale), side_of(2048, scale)
    return normal(rows, inputs), *(drawn_weight(side_of(n, scale), inputs, inputs=inputs) for n in (2048, 512, 512))


def _residual(scale: float) -> Arguments:
    rows, inputs, outputs = (side_of(size, scale) for size in (65536, 1024, 512))
    weight = drawn_weight(inputs, outputs, inputs=inputs)
    return normal(rows, inputs), weight, normal(rows, outputs), normal(outputs), normal(outputs)


def _block(scale: float) -> Arguments:
    batch, rows, width = side_of(8, scale, 1), side_of(2048, scale), side_of(2048, scale, 256)
    weights = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    return normal(batch, rows, width), normal(4, width), *(drawn_weight(*shape, inputs=shape[1]) for shape in weights)


# --- what is counted and what is checked ---


def pair_flops(window: int | None) -> Callable[[Arguments], float]:
    """The FLOPs of both products over those pairs of query and key that count: all, or the last `window` keys."""

    def count(arguments: Arguments) -> float:
        q, k = arguments[:2]
        rows, keys, width = q.shape[-2], k.shape[-2], q.shape[-1]
        last = min(keys, window or keys)
        pairs = rows * keys if window is None else last * rows - last * (last - 1) / 2
        return float(4 * width * math.prod(q.shape[:-2]) * pairs)

    return count


_ALL, _CAUSAL, _BAND = pair_flops(None), pair_flops(1 << 30), pair_flops(WINDOW)


def _products(weights: slice) -> Callable[[Arguments], float]:
    """Every element of the weights with every row of the first argument."""
    return lambda a: 2.0 * math.prod(a[0].shape[:-1]) * sum(weight.numel() for weight in a[weights])


def block_products(arguments: Arguments) -> float:
    batch, rows, width = arguments[0].shape
    attention: float = 2.0 * batch * width * rows * (rows + 1)
    return _products(slice(2, None))(arguments) + attention


def _some_heads(arguments: Arguments) -> Arguments:
    """The corners: of the first and last batch the first and last head."""
    return tuple(a[::3, ::15] if a.dim() == 4 else a[::15] if a.dim() == 1 else a for a in arguments)


def _rows(*positions: int) -> Sample:
    """Rows at equal distances, of the arguments at these positions."""

    def some(value: Tensor) -> Tensor:
        return value[:: max(1, value.shape[0] // _CHECKED_ROWS)]

    return Sample(lambda arguments: tuple(some(a) if n in positions else a for n, a in enumerate(arguments)), some)


HEADS = Sample(_some_heads, lambda output: output[::3, ::15])
WHOLE = Sample(lambda arguments: arguments, lambda output: output)
BATCHES = Sample(lambda arguments: (arguments[0][::7], *arguments[1:]), lambda output: output[::7])


# --- what libraries are asked ---


def not_later(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < WINDOW)


def _alibi_score(arguments: Arguments) -> Callable[..., Tensor]:
    slopes = arguments[3]

    def score(s: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return s - slopes[head] * (query - key)

    return score


def capped_score(arguments: Arguments) -> Callable[..., Tensor]:
    def score(s: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return CAP * torch.tanh(s / CAP)

    return score


def _one_matmul(weights: slice) -> Callable[[Arguments], Callable[..., Any]]:
    def make(arguments: Arguments) -> Callable[..., Any]:
        weight = torch.cat(arguments[weights])
        return lambda x, *rest: F.linear(x, weight)

    return make


def _int8_linear_wide(arguments: Arguments) -> Callable[..., Any]:
    weight = arguments[1].to(BF16) * arguments[2][:, None]
    return lambda x, *rest: F.linear(x, weight)


def _int8_weights_wide(arguments: Arguments) -> Callable[..., Any]:
    weight = arguments[1].to(BF16) * arguments[2]
    return lambda x, *rest: x @ weight


def _int8_matmul_wide(arguments: Arguments) -> Callable[..., Any]:
    x, weight = arguments[0].to(BF16) * arguments[2], arguments[1].to(BF16) * arguments[3]
    return lambda *given: x @ weight


CONTRACTIONS: tuple[Workload, ...] = (
    Workload(
        "attention, causal", causal_attention, heads_of(), _CAUSAL, sample=HEADS,
        libraries=sdpa(causal=True) | flex(not_later),
    ),
    Workload(
        "attention, full", full_attention, heads_of(), _ALL, sample=HEADS, libraries=sdpa(causal=False) | flex()
    ),
    Workload(
        "attention, ALiBi + causal", alibi_attention, _alibi, _CAUSAL, sample=HEADS,
        libraries=flex(not_later, _alibi_score),
    ),
    Workload(
        "attention, soft-cap + causal", capped_attention, heads_of(), _CAUSAL, sample=HEADS,
        libraries=flex(not_later, capped_score),
    ),
    Workload("attention, window 512", window_attention, heads_of(), _BAND, sample=HEADS, libraries=flex(near)),
    Workload(
        "attention, RoPE + causal", rope_attention, _rope, _CAUSAL, sample=HEADS,
        libraries=sdpa(causal=True, program=with_rope) | flex(not_later, program=with_rope),
    ),
    Workload(
        "attention, 64 wide, causal", causal_attention, heads_of(64), _CAUSAL, sample=HEADS,
        libraries=sdpa(causal=True) | flex(not_later),
    ),
    Workload(
        "attention, 1 query, 32k keys", decode_attention, _decode, _ALL, sample=WHOLE,
        libraries=sdpa_decode() | flex(enable_gqa=True),
    ),
    Workload(
        "linear + bias + GELU, 8192x4096x16384", linear_gelu, _linear, _products(slice(1, 2)), sample=_rows(0),
        libraries=epilogue() | bare(lambda arguments: lambda x, weight, bias: F.linear(x, weight)),
    ),
    Workload(
        "SwiGLU, 8192x4096x14336 twice", swiglu, _swiglu, _products(slice(1, 3)), sample=_rows(0),
        libraries=bare(lambda arguments: lambda x, gate, up: (x @ gate, x @ up)),
    ),
    Workload(
        "int8 linear, 16x8192x8192", int8_linear, _int8_weights, _products(slice(1, 2)), sample=WHOLE,
        libraries=bare(_int8_linear_wide),
    ),
    Workload(
        "int8 weights inputs first, 16x8192x8192", int8_weights, _int8_weights, _products(slice(1, 2)), sample=WHOLE,
        libraries=bare(_int8_weights_wide),
    ),
    Workload(
        "dequantise, matmul, quantise, 4096^3", int8_matmul, _int8_matmul, _products(slice(1, 2)),
        sample=_rows(0, 2), libraries=bare(_int8_matmul_wide),
    ),
    Workload(
        "Q, K, V, 4096x2048x(2048+512+512)", projections, _projections, _products(slice(1, 4)), sample=_rows(0),
        libraries=bare(_one_matmul(slice(1, 4))),
    ),
    Workload(
        "matmul + residual + LayerNorm, 65536x1024x512", matmul_residual_norm, _residual, _products(slice(1, 2)),
        sample=_rows(0, 2), libraries=bare(lambda arguments: lambda x, weight, *rest: x @ weight),
    ),
    Workload(
        "transformer block, 8x2048x2048", transformer_block, _block, block_products, sample=BATCHES,
        libraries=sdpa(causal=True, program=block_around) | flex(not_later, program=block_around),
    ),
)  # fmt: skip
