"""Tiny models whole: what they ask the judge is what large ones ask."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH = 16, 2, 29, 13


def heads(x: Tensor, count: int) -> Tensor:
    """(batch, length, width) as (batch, heads, length, width of a head)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Queries of one sequence, keys and values of another; fewer of these where they are shared."""

    def __init__(self, bias: bool = True, shared: int = 1, rotary: bool = False) -> None:
        super().__init__()
        self.shared, self.rotary, narrow = shared, rotary, WIDTH // shared
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.k, self.v = nn.Linear(WIDTH, narrow, bias), nn.Linear(WIDTH, narrow, bias)

    def forward(self, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
        q, k, v = heads(self.q(x), HEADS), *(heads(p(memory), HEADS // self.shared) for p in (self.k, self.v))
        if self.rotary:
            q, k = turned(q), turned(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self.shared > 1)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


def turned(x: Tensor) -> Tensor:
    """Positions as rotations."""
    left, right = x.chunk(2, -1)
    rates = 10_000 ** (-torch.arange(left.shape[-1], device=x.device) / left.shape[-1])
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    turned = left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()
    return torch.cat(turned, -1).to(x.dtype)


class Layer(nn.Module):
    """A layer of GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, causal)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GatedLayer(nn.Module):
    """A layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(bias=False, shared=2, rotary=True)
        self.gate, self.up, self.down = (nn.Linear(a, b, False) for a, b in ((16, 40), (16, 40), (40, 16)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, True)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class CrossLayer(Layer):
    """A layer of a decoder that looks at what an encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm3, self.cross = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        y = self.norm1(x)
        x = x + self.attention(y, y, True)
        x = x + self.cross(self.norm3(x), memory, False)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Language(nn.Module):
    """Words in, the loss of guessing the next word out."""

    def __init__(self, layer: Callable[[], nn.Module], positions: bool) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(layer() for _ in range(3))
        self.places = nn.Embedding(LENGTH, WIDTH) if positions else None
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        if self.places is not None:
            x = x + self.places(torch.arange(words.shape[1], device=words.device))
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class Translation(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.encoder, self.decoder = (nn.ModuleList(k() for _ in range(2)) for k in (Layer, CrossLayer))

    def forward(self, words: Tensor) -> Tensor:
        memory = x = self.words(words)
        for layer in self.encoder:
            memory = layer(memory, causal=False)
        x = x[:, :7]
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), words[:, 1:8].flatten())


class Convolutions(nn.Module):
    """Convolutions with biases, norms of channels, a shortcut, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.third, self.point = nn.Conv2d(8, 12, 3, stride=2, bias=False), nn.Conv2d(12, 24, 1)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.BatchNorm2d(12)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.first(x)))
        x = x + F.silu(self.norm2(self.second(x)))
        x = F.gelu(self.point(F.relu(self.norm3(self.third(x)))))
        return self.head(x.mean((2, 3))).logsumexp(-1).mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (lambda: Language(Layer, True), lambda: torch.randint(0, WORDS, (2, LENGTH))),
    "llama": (lambda: Language(GatedLayer, False), lambda: torch.randint(0, WORDS, (2, LENGTH))),
    "translation": (Translation, lambda: torch.randint(0, WORDS, (2, LENGTH))),
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 9, 9)),
}
