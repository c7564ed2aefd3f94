"""Small real models, each with an example input; used for training and for inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Block(nn.Module):
    """A transformer block: attention with a causal mask, feed-forward, two norms."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 12, 3, stride=2), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class Lstm(nn.Module):
    """An LSTM cell unrolled over a few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.around = nn.Linear(6, 40), nn.Linear(10, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], 10)
        for step in x:
            i, f, g, o = (self.inside(step) + self.around(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


class Language(nn.Module):
    """Embedding, a norm, logits and cross-entropy with ignored targets and label smoothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.embedding(tokens)))
        targets = torch.where(tokens % 7 == 0, -100, (tokens + 1) % 50)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, label_smoothing=0.1)


class GroupNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 1)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x))).amax((2, 3))


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    example: Callable[[], torch.Tensor]


MODELS = {
    "mlp": Model(Mlp, lambda: torch.randn(16, 24)),
    "block": Model(Block, lambda: torch.randn(2, 11, 32)),
    "conv": Model(ConvNet, lambda: torch.randn(4, 3, 10, 10)),
    "lstm": Model(Lstm, lambda: torch.randn(5, 3, 6)),
    "language": Model(Language, lambda: torch.randint(0, 50, (3, 9))),
    "group norm": Model(GroupNormNet, lambda: torch.randn(2, 4, 6, 6)),
}
