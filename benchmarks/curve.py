"""The loss of a small GPT while it trains, compiled and as eager: `python -m benchmarks.curve --steps 200`.

The text is made up: words of a small grammar. Attention is plain math, the loss plain cross-entropy. Beside the
compiled run stands an eager run whose batches have their rows in the other order: the same mathematics, sums in another
order. A compiled curve may be a few times as far from eager's as that one, no more.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

from .plots import curve_plot
from .report import facts_lines, table
from .systems import facts, result_name

RESULTS = Path(__file__).parent / "results"
MOST = 3.0  # times the distance of two eager runs
SEEDS = (0, 1, 2)
ROWS, LENGTH, WIDTH, HEADS, LAYERS = 16, 64, 128, 4, 3
Step = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Attention and a wide layer, each behind a norm, added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        parts = self.heads(self.first(x)).view(batch, rows, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        later = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        x = x + self.mixed((weights @ v).transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Model(nn.Module):
    """A GPT of a few layers that says its loss."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        x = self.blocks(self.words(tokens[:, :-1]) + self.places(places))
        return F.cross_entropy(self.logits(self.last(x)).flatten(0, 1), tokens[:, 1:].flatten())


def made_up_text(seed: int, length: int) -> str:
    """Sentences of a small grammar with made-up nouns, which agree in number and come back later."""
    draw = random.Random(seed)
    nouns = ["".join(draw.choice("bdgklmnprstv") + draw.choice("aeiou") for _ in range(2)) for _ in range(40)]
    verbs, found = ["sees", "likes", "follows", "asks"], ""
    while len(found) < length:
        one, other = draw.sample(nouns, 2)
        found += f"the {one} {draw.choice(verbs)} the {other}, and the {other} {draw.choice(verbs)} the {one}. "
    return found[:length]


def losses(seed: int, steps: int, device: str, dtype: torch.dtype, compiled: bool, turned: bool = False) -> list[float]:
    """The loss of every step. `turned`: rows of a batch in the other order."""
    text = made_up_text(seed, 1 << 16)
    letters = {letter: n for n, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text])
    torch.manual_seed(seed)
    model = Model(len(letters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(seed)
    torch._dynamo.reset()
    run: Step = onepass.jit(model, options={"strict": True}) if compiled else model
    found = []
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - LENGTH - 1, (ROWS,), generator=draw).tolist()
        batch = torch.stack([tokens[s : s + LENGTH + 1] for s in (reversed(starts) if turned else starts)])
        with torch.autocast(device, dtype=dtype, enabled=dtype is not torch.float32):
            loss = run(batch.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def distance(one: list[float], other: list[float]) -> float:
    """The mean distance of two curves."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def measure(steps: int, device: str) -> dict[str, Any]:
    """Three curves for each type and seed, and their distances."""
    runs: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for seed in SEEDS:
            eager = losses(seed, steps, device, dtype, compiled=False)
            turned = losses(seed, steps, device, dtype, compiled=False, turned=True)
            mine = losses(seed, steps, device, dtype, compiled=True)
            runs.append({
                "dtype": str(dtype).removeprefix("torch."), "seed": seed, "eager": eager, "turned": turned,
                "onepass": mine, "between_eager": distance(eager, turned), "to_onepass": distance(eager, mine),
            })  # fmt: skip
            print({k: v for k, v in runs[-1].items() if not isinstance(v, list)}, flush=True)
    return {"device": device, "facts": facts(device), "steps": steps, "runs": runs}


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """How many times as far as two eager runs the compiled run is, over all seeds of a type."""
    found = {}
    for dtype in dict.fromkeys(run["dtype"] for run in result["runs"]):
        same = [run for run in result["runs"] if run["dtype"] == dtype]
        found[dtype] = sum(r["to_onepass"] for r in same) / sum(r["between_eager"] for r in same)
    return found


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    where = "the CPU" if result["device"] == "cpu" else result["facts"]["device"]
    rows = [
        [
            f"{r['dtype']}, seed {r['seed']}",
            *(f"{loss:.4f}" for loss in (r["eager"][0], r["eager"][-1], r["onepass"][-1])),
            *(f"{far:.3g}" for far in (r["between_eager"], r["to_onepass"])),
            f"{r['to_onepass'] / r['between_eager']:.2f}",
        ]
        for r in result["runs"]
    ]
    head = ["run", "first loss", "last, eager", "last, onepass", "eager to eager", "eager to onepass", "ratio"]
    lines = [f"# Training a small GPT on {where}", "", *facts_lines(result), ""]
    lines += [
        f"{LAYERS} layers, {WIDTH} wide, {ROWS} × {LENGTH} letters of made-up text, {result['steps']} steps of AdamW; "
        "bfloat16 is autocast. Distances are the mean over all steps between two curves of the loss: of two eager runs "
        "whose batches have their rows in another order, and of eager and onepass.",
        "",
        *table(head, rows),
        "",
        "Over all seeds: " + ", ".join(f"{dtype} **{ratio:.2f}**" for dtype, ratio in ratios(result).items())
        + f" (at most {MOST:g}).",
        "",
        f"![curves]({result_name(result['device'])}-curve.svg)",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    result = measure(arguments.steps, arguments.device)
    stem = arguments.out / f"{result_name(arguments.device)}-curve"
    stem.with_suffix(".json").write_text(json.dumps(result) + "\n")
    stem.with_suffix(".md").write_text(markdown(result))
    stem.with_suffix(".svg").write_text(curve_plot(result))
    print(markdown(result))
    if any(ratio > MOST for ratio in ratios(result).values()):
        raise SystemExit(f"a curve is more than {MOST:g} times as far from eager's as two eager curves from each other")


if __name__ == "__main__":
    main()
