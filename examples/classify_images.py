"""Train an image classifier and say where its time goes: `python examples/classify_images.py [--quick]`.

The images are made here: a bright bar, whose direction is the class, in noise.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass


def images(count: int, size: int) -> tuple[Tensor, Tensor]:
    kinds = torch.randint(2, (count,))
    pictures = 0.3 * torch.randn(count, 1, size, size)
    places = torch.randint(size, (count,))
    for picture, kind, place in zip(pictures, kinds, places, strict=True):
        bar = picture[0, place] if kind else picture[0, :, place]
        bar += 1.5
    return pictures, kinds


class Classifier(nn.Module):
    """Two convolutions with batch norm, then the mean of every channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, channels, 5, padding=2), nn.Conv2d(channels, channels, 5, padding=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.out = nn.Linear(channels, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        x = F.relu(self.norms[1](self.second(x)))
        return self.out(x.amax((-1, -2)))


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps on small images")
    options = parser.parse_args()
    size, channels, batch, steps = (12, 8, 32, 25) if options.quick else (32, 32, 128, 200)
    torch.manual_seed(0)
    model = Classifier(channels)
    compiled = onepass.jit(model)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number in range(1, steps + 1):
        pictures, kinds = images(batch, size)
        loss = F.cross_entropy(compiled(pictures), kinds)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if number in (1, steps) or number % 50 == 0:
            print(f"step {number:4}: loss {loss.item():.3f}")
    model.eval()
    pictures, kinds = images(4 * batch, size)
    with torch.no_grad():
        right = (compiled(pictures).argmax(-1) == kinds).double().mean().item()
        print(f"{100 * right:.0f} % of new images are classified rightly\n")
        print(onepass.profile(model, pictures, seconds=0.1 if options.quick else 2.0))
    return right


if __name__ == "__main__":
    main()
