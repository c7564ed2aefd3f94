"""Train a small GPT on this file's own text: `python examples/train_gpt.py [--quick] [--eager]`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass


class Block(nn.Module):
    """Causal attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        each = self.queries_keys_values(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = each.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """Letters in, the loss of the next ones out."""

    def __init__(self, letters: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.letters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def batches(text: Tensor, length: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
    rows = torch.stack([text[s : s + length + 1] for s in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--eager", action="store_true", help="without compiling, to compare")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    length, width, heads, layers, size, steps = (32, 32, 2, 2, 4, 12) if options.quick else (128, 256, 8, 6, 32, 300)
    torch.manual_seed(0)
    written = Path(__file__).read_text()
    alphabet = sorted(set(written))
    text = torch.tensor([alphabet.index(c) for c in written])
    model = GPT(len(alphabet), length, width, heads, layers).to(options.device)
    step = model if options.eager else onepass.jit(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3 if options.quick else 6e-4)
    generator = torch.Generator().manual_seed(0)
    for number in range(1, steps + 1):
        start = time.perf_counter()
        loss = step(*(t.to(options.device) for t in batches(text, length, size, generator)))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        value = loss.item()
        if number in (1, 2, steps) or number % 50 == 0:
            print(f"step {number:4}: loss {value:.3f}, {1e3 * (time.perf_counter() - start):.1f} ms")
    return value


if __name__ == "__main__":
    main()
