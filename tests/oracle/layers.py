"""Layers of real models, written by hand at the sizes people train: the part of the corpus that no unit test has.

Every program takes all of its tensors as arguments, weights included, so that it can be planned from tensors that
have no memory. B batch, S positions, H heads, D size of a head, W width of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.program import Arguments, Program

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def shapes(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> Arguments:
    """Tensors of these shapes, contents undefined."""
    return lambda: tuple(torch.empty(shape, dtype=dtype) for shape in shapes)


def tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(0, vocabulary, shape, dtype=I64)


# --- attention, three ways ---


def by_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as model code spells it, its softmax in float32."""
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return torch.softmax(s.masked_fill(later, -math.inf).float(), -1).to(v.dtype) @ v


def of_all_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, S, H * D) as (B, H, S, D)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def merged_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


# --- Llama: RMSNorm, RoPE, grouped heads, SwiGLU ---


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def half_turn(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), -1)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return x * cosine + half_turn(x) * sine


def repeated(x: Tensor, times: int) -> Tensor:
    """Every key head for so many query heads."""
    batch, heads, rows, size = x.shape
    return x[:, :, None].expand(batch, heads, times, rows, size).reshape(batch, heads * times, rows, size)


def llama_layer(attend: Attend, size: int = 64) -> Callable[..., Tensor]:
    def layer(
        x: Tensor, first: Tensor, second: Tensor, cosine: Tensor, sine: Tensor,
        wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    ) -> Tensor:  # fmt: skip
        y = rms_norm(x, first)
        q, k, v = (split_heads(F.linear(y, w), w.shape[0] // size) for w in (wq, wk, wv))
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        times = q.shape[1] // k.shape[1]
        x = x + F.linear(merged_heads(attend(q, repeated(k, times), repeated(v, times))), wo)
        y = rms_norm(x, second)
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    return layer


def llama_arguments(batch: int, rows: int, width: int = 1024, keys: int = 512, inner: int = 2816) -> Arguments:
    weights = [(width, width), (keys, width), (keys, width), (width, width), (inner, width), (inner, width)]
    angles = [(1, 1, rows, 64)] * 2
    return shapes((batch, rows, width), (width,), (width,), *angles, *weights, (width, inner))


def rope(heads: int = 16, keys: int = 8, size: int = 64) -> Callable[..., tuple[Tensor, Tensor]]:
    """Queries and repeated keys turned together, the heads cut out of the projections."""

    def both(q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        q, k = split_heads(q, heads), split_heads(k, keys)
        return rotated(q, cosine, sine), repeated(rotated(k, cosine, sine), heads // keys)

    return both


def rope_arguments(batch: int = 8, rows: int = 1024) -> Arguments:
    return shapes((batch, rows, 1024), (batch, rows, 512), *[(1, 1, rows, 64)] * 2)


def two_layers(x: Tensor, w1: Tensor, w2: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
    """Two equal layers: their kernels should be equal."""

    def layer(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return (x + r) * torch.rsqrt((x + r).float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * w

    return layer(layer(x, w1, x @ m1) @ m2, w2, x)


# --- BERT: norms after the residual, dropout, biases ---


def bert_layer(dropout: float) -> Callable[..., Tensor]:
    def layer(
        x: Tensor, mask: Tensor, qkv: Tensor, qkv_bias: Tensor, out: Tensor, out_bias: Tensor,
        up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, norms: Tensor,
    ) -> Tensor:  # fmt: skip
        q, k, v = (split_heads(part, 12) for part in F.linear(x, qkv, qkv_bias).chunk(3, -1))
        s = q @ k.transpose(-1, -2) / 8 + mask[:, None, None, :]
        weights = F.dropout(torch.softmax(s, -1), dropout)
        y = F.dropout(F.linear(merged_heads(weights @ v), out, out_bias), dropout)
        x = F.layer_norm(x + y, (768,), norms[0], norms[1])
        y = F.dropout(F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias), dropout)
        return F.layer_norm(x + y, (768,), norms[2], norms[3])

    return layer


def bert_arguments(batch: int, rows: int) -> Arguments:
    weights = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,), (4, 768)]
    return shapes((batch, rows, 768), (batch, rows), *weights)


# --- GPT-2 and ViT: norms in front ---


def norm_first_layer(attend: Attend, heads: int, approximate: str) -> Callable[..., Tensor]:
    def layer(
        x: Tensor, norms: Tensor, qkv: Tensor, qkv_bias: Tensor, out: Tensor, out_bias: Tensor,
        up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    ) -> Tensor:  # fmt: skip
        width = x.shape[-1:]
        y = F.layer_norm(x, width, norms[0], norms[1])
        q, k, v = (split_heads(part, heads) for part in F.linear(y, qkv, qkv_bias).split(width[0], -1))
        x = x + F.linear(merged_heads(attend(q, k, v)), out, out_bias)
        y = F.layer_norm(x, width, norms[2], norms[3])
        return x + F.linear(F.gelu(F.linear(y, up, up_bias), approximate=approximate), down, down_bias)

    return layer


def norm_first_arguments(batch: int, rows: int, width: int = 768) -> Arguments:
    weights = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    return shapes((batch, rows, width), (4, width), *weights, (width, 4 * width), (width,))


# --- convolutions ---


def resnet_block(
    x: Tensor, first: Tensor, second: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *running: Tensor
) -> Tensor:
    """Two convolutions with batch norms in training, whose running statistics change in place."""
    m1, v1, m2, v2 = running
    y = F.relu(F.batch_norm(F.conv2d(x, first, padding=1), m1, v1, w1, b1, training=True))
    y = F.batch_norm(F.conv2d(y, second, padding=1), m2, v2, w2, b2, training=True)
    return F.relu(x + y)


def resnet_inference(
    x: Tensor, first: Tensor, second: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *running: Tensor
) -> Tensor:
    m1, v1, m2, v2 = running
    y = F.relu(F.batch_norm(F.conv2d(x, first, padding=1), m1, v1, w1, b1))
    return F.relu(x + F.batch_norm(F.conv2d(y, second, padding=1), m2, v2, w2, b2))


def resnet_arguments(train: bool, batch: int = 64, channels: int = 64, side: int = 56) -> Arguments:
    def make() -> tuple[Tensor, ...]:
        images = shapes((batch, channels, side, side), *[(channels, channels, 3, 3)] * 2, dtype=F32)()
        weights = shapes(*[(channels,)] * 4, dtype=F32)()
        changed = shapes(*[(channels,)] * 4, dtype=F32)()
        return (*(t.requires_grad_(train) for t in (*images, *weights)), *changed)

    return make


# --- losses, routing, optimiser ---


def shifted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of a language model: every position predicts the next."""
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def shifted_arguments(batch: int = 8, rows: int = 1024, vocabulary: int = 32000) -> Arguments:
    return lambda: (torch.empty(batch, rows, vocabulary, dtype=BF16), tokens(vocabulary, batch, rows))


def weighted_logsumexp(x: Tensor, w: Tensor) -> Tensor:
    return (torch.logsumexp(x[:, :-1].float(), -1) * w).sum()


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), labels)


def router(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two experts of each token, their weights made to sum to one, and the loss that balances the experts."""
    probabilities = F.softmax(F.linear(x, weight).float(), -1)
    chosen, experts = torch.topk(probabilities, 2, -1)
    share = F.one_hot(experts, weight.shape[0]).float().mean((0, 1))
    balance = (share * probabilities.mean(0)).sum() * weight.shape[0]
    return (chosen / chosen.sum(-1, keepdim=True)).to(x.dtype), experts, balance


def adamw(steps: int) -> Callable[..., None]:
    """One step of AdamW over several tensors, in place: parameter, gradient, mean, square of each."""

    def update(rate: Tensor, *state: Tensor) -> None:
        for k in range(0, 4 * steps, 4):
            parameter, gradient, mean, square = state[k : k + 4]
            wide = gradient.float()
            mean.lerp_(wide, 0.1)
            square.mul_(0.999).addcmul_(wide, wide, value=0.001)
            parameter.mul_(1 - rate * 0.01)
            parameter.sub_(rate * (mean / 0.1) / ((square / 0.001).sqrt() + 1e-8))

    return update


def adamw_arguments(*sizes: tuple[int, ...]) -> Arguments:
    def make() -> tuple[Tensor, ...]:
        state = [torch.empty(size, dtype=t) for size in sizes for t in (F32, BF16, F32, F32)]
        return torch.empty((), dtype=F32), *state

    return make


# --- positions from outside, and a region with a cycle around it ---


def positioned(captured: bool, cap: float) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        i = places if captured else torch.arange(q.shape[-2], device=q.device)
        s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        s = cap * torch.tanh(s / cap) if cap else s
        return torch.softmax(s.masked_fill(i[:, None] < i[None, :], -math.inf), -1).to(v.dtype) @ v

    return attend


def positioned_arguments(rows: int = 4096) -> Arguments:
    return lambda: (*shapes(*[(4, 16, rows, 128)] * 3)(), torch.arange(rows))


def sorted_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A region around both products would need a sort that needs the region."""
    s = q @ k.transpose(-1, -2)
    return torch.exp(s.float() - torch.sort(s.amax(-1)).values.float()[..., None]).to(v.dtype) @ v


def three_ways(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Reductions that keep different axes of one tensor."""
    return x.abs().amax(), x.mean(), (x * y).sum(0)


_GPT, _VIT = norm_first_layer(by_products, 12, "tanh"), norm_first_layer(of_all_positions, 12, "none")
_TRAINED: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "Llama layer": (llama_layer(by_products), llama_arguments(4, 1024)),
    "Llama layer, library attention": (llama_layer(by_library), llama_arguments(4, 1024)),
    "RoPE of queries and keys": (rope(), rope_arguments()),
    "two equal layers": (two_layers, shapes((4096, 1024), (1024,), (1024,), (1024, 1024), (1024, 1024))),
    "BERT layer": (bert_layer(0.1), bert_arguments(32, 512)),
    "GPT-2 layer": (_GPT, norm_first_arguments(8, 1024)),
    "ViT layer": (_VIT, norm_first_arguments(64, 197)),
    "shifted cross-entropy": (shifted_cross_entropy, shifted_arguments()),
    "weighted log-sum-exp": (
        weighted_logsumexp,
        lambda: (torch.empty(8, 1024, 32000, dtype=BF16), torch.empty(8, 1023)),
    ),
    "linear + cross-entropy": (
        linear_cross_entropy,
        lambda: (*shapes((4096, 2048), (32000, 2048))(), tokens(32000, 4096)),
    ),
    "router": (router, shapes((8192, 2048), (64, 2048))),
}
_INFERRED: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "ResNet block": (resnet_inference, resnet_arguments(False)),
    "BERT layer without dropout": (bert_layer(0.0), bert_arguments(8, 384)),
    "Llama layer, one token": (llama_layer(of_all_positions), llama_arguments(4, 1)),
    "AdamW, one tensor": (adamw(1), adamw_arguments((4096, 4096))),
    "AdamW, three tensors": (adamw(3), adamw_arguments((4096, 1024), (1024,), (1024, 2816))),
    "attention, positions inside": (positioned(False, 0.0), positioned_arguments()),
    "attention, positions captured": (positioned(True, 0.0), positioned_arguments()),
    "attention, positions captured, soft-cap": (positioned(True, 50.0), positioned_arguments()),
    "sort between two products": (sorted_between, shapes(*[(2048, 128)] * 3)),
    "reductions of different axes": (three_ways, shapes(*[(4096, 4096)] * 2, dtype=F32)),
}

LAYERS: tuple[Program, ...] = (
    *(Program(f"layer/{name}", *entry) for name, entry in (_TRAINED | _INFERRED).items()),
    *(Program(f"layer/{name}, training", *entry, train=True) for name, entry in _TRAINED.items()),
    Program("layer/ResNet block, training", resnet_block, resnet_arguments(True), recorded=True),
)
