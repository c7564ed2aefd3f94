"""Models written for the benchmark: a diffusion U-Net, a recommendation model. Each gives its loss, then its result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ImageClassifier(nn.Module):
    """A network from images to scores, with the loss of given labels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.network(images)
        return F.cross_entropy(scores.float(), labels), scores


class Block(nn.Module):
    """Two convolutions with group norms; the time step shifts the channels between them."""

    def __init__(self, channels_in: int, channels: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels_in), nn.GroupNorm(8, channels)
        self.convolution1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.convolution2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(time_width, channels)
        self.skip = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.convolution1(F.silu(self.norm1(x)))
        hidden = hidden + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.convolution2(F.silu(self.norm2(hidden)))


class ImageAttention(nn.Module):
    """Self-attention of all pixels."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, channels), heads
        self.inputs, self.output = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        parts = self.inputs(pixels).view(batch, height * width, 3, self.heads, channels // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, -1, channels)
        return x + self.output(mixed).transpose(1, 2).reshape(x.shape)


class DiffusionUNet(nn.Module):
    """Predicts the noise in images at given time steps; attention at the two coarsest resolutions."""

    def __init__(self, channels: int, factors: tuple[int, ...] = (1, 2, 4), heads: int = 4) -> None:
        super().__init__()
        widths = [channels * factor for factor in factors]
        time_width = 4 * channels
        self.time = nn.Sequential(nn.Linear(channels, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.channels = channels
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        before = [channels, *widths[:-1]]
        coarse = [width in widths[-2:] for width in widths]
        self.down = nn.ModuleList(Block(a, b, time_width) for a, b in zip(before, widths, strict=True))
        self.up = nn.ModuleList(Block(2 * b, a, time_width) for a, b in zip(before, widths, strict=True))
        self.mix_down = nn.ModuleList(
            ImageAttention(w, heads) if c else nn.Identity() for w, c in zip(widths, coarse, strict=True)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, stride=2, padding=1) for w in widths[:-1])
        self.middle = Block(widths[-1], widths[-1], time_width)
        self.leave = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    def forward(self, images: Tensor, steps: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        time = self.time(self._waves(steps).to(images.dtype))
        x = self.enter(images)
        kept = []
        for level, (block, mix) in enumerate(zip(self.down, self.mix_down, strict=True)):
            x = mix(block(x, time))
            kept.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        x = self.middle(x, time)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat((x, kept[level]), 1), time)
            if level:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        predicted = self.leave(x)
        return F.mse_loss(predicted.float(), noise.float()), predicted

    def _waves(self, steps: Tensor) -> Tensor:
        """Sines and cosines of the time step."""
        half = self.channels // 2
        frequencies = torch.exp(-9.21 * torch.arange(half, device=steps.device) / half)
        angles = steps[:, None].float() * frequencies
        return torch.cat((angles.sin(), angles.cos()), -1)


class Recommender(nn.Module):
    """Categories and numbers of a visit to the chance of a click: tables, products of all pairs, two small networks."""

    def __init__(self, tables: int, rows: int, width: int, numbers: int, inner: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = _network(numbers, inner, width)
        self.top = _network(width + tables * (tables + 1) // 2, inner, 1)
        row, column = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("row", row)
        self.register_buffer("column", column)

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> tuple[Tensor, Tensor]:
        dense = self.bottom(numbers)
        features = torch.stack([dense, *(table(categories[:, k]) for k, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        pairs = products[:, self.row, self.column]
        score = self.top(torch.cat((dense, pairs), 1))[:, 0]
        return F.binary_cross_entropy_with_logits(score.float(), clicked.float()), score


def _network(inputs: int, inner: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, inner), nn.ReLU(), nn.Linear(inner, inner // 2), nn.ReLU(), nn.Linear(inner // 2, outputs)
    )
