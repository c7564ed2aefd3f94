"""Answer requests of many lengths with one compilation: `python examples/serve.py [--quick]`.

A bag of words is scored against topics. Requests come with any number of words; with `dynamic=True` the kernels of one
compilation serve all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import onepass


class Scorer(nn.Module):
    """The attention of a topic to the words of a text, as a probability of each topic."""

    def __init__(self, words: int, topics: int, width: int) -> None:
        super().__init__()
        self.words, self.topics = nn.Embedding(words, width), nn.Parameter(torch.randn(topics, width))

    def forward(self, text: Tensor) -> Tensor:
        values = nn.functional.normalize(self.words(text), dim=-1)
        near = values @ self.topics.T
        return torch.softmax(torch.logsumexp(near, 0), -1)


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few requests")
    requests, words, topics, width = (20, 100, 8, 16) if parser.parse_args().quick else (2000, 50_000, 64, 256)
    torch.manual_seed(0)
    scorer = Scorer(words, topics, width).eval()
    answer = onepass.jit(scorer, dynamic=True)
    worst, times = 0.0, []
    with torch.inference_mode():
        for number in range(requests):
            text = torch.randint(words, (1 + 7 * number % 61,))
            start = time.perf_counter()
            found = answer(text)
            times.append(1e3 * (time.perf_counter() - start))
            worst = max(worst, (found - scorer(text)).abs().max().item())
        later = sorted(times[1:])
        print(
            f"first answer {times[0]:.0f} ms, then median {statistics.median(later):.2f} ms, worst {later[-1]:.2f} ms"
        )
        print(f"largest difference to eager: {worst:.1e}")
        print("\n".join(onepass.profile(scorer, text, seconds=0.1).advice))
    return worst


if __name__ == "__main__":
    main()
