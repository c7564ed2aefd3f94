"""Equal layers of a model have the same kernels, at any depth and in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.planning import graphs_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from onepass.ir.options import Options
from onepass.ir.record import CompileRecord
from onepass.ir.target import find_target
from onepass.pipeline import compile_entry, lower, plan_graph

BATCH, TOKENS, HEADS, KEY_HEADS, DEPTH, WIDE = 2, 256, 8, 4, 64, 1024
WIDTH = HEADS * DEPTH


def norm(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def attention(q: Tensor, k: Tensor, v: Tensor, plain: bool) -> Tensor:
    if not plain:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    return torch.softmax((q @ k.transpose(-1, -2)).float() * DEPTH**-0.5, -1).to(v.dtype) @ v


def layer(x: Tensor, weights: dict[str, Tensor], cos: Tensor, sin: Tensor, plain: bool) -> Tensor:
    h = norm(x, weights["first"])
    q, k, v = ((h @ weights[n]).unflatten(-1, (-1, DEPTH)).transpose(1, 2) for n in "qkv")
    found = attention(rotated(q, cos, sin), rotated(k, cos, sin), v, plain)
    x = x + found.transpose(1, 2).flatten(2) @ weights["o"]
    h = norm(x, weights["second"])
    return x + (F.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]


SHAPES = {
    "first": (WIDTH,), "q": (WIDTH, WIDTH), "k": (WIDTH, KEY_HEADS * DEPTH), "v": (WIDTH, KEY_HEADS * DEPTH),
    "o": (WIDTH, WIDTH), "second": (WIDTH,), "gate": (WIDTH, WIDE), "up": (WIDTH, WIDE), "down": (WIDE, WIDTH),
}  # fmt: skip


def compiled(layers: int, plain: bool) -> dict[str, tuple[list[str], CompileRecord]]:
    """By direction: the keys of the distinct kernels of a model, and what was decided."""
    found = {}
    with FakeTensorMode():
        weights = [
            {n: torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for n, s in SHAPES.items()}
            for _ in range(layers)
        ]
        x = torch.empty(BATCH, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = (torch.empty(TOKENS, DEPTH, dtype=torch.bfloat16) for _ in range(2))

        def model(x: Tensor) -> Tensor:
            for own in weights:
                x = layer(x, own, cos, sin, plain)
            return x.float().sum()

        graphs = graphs_of(model, x)
    for direction, graph in graphs:
        record = CompileRecord(direction=direction)
        planned = plan_graph(lower(graph, find_target("sm_90"), Options.make({}), record), record)
        entry, _ = compile_entry(planned, record, {})
        found[direction] = [k.key for k in entry.kernels], record
    return found


@pytest.mark.parametrize("plain", [False, True], ids=["library", "plain"])
def test_more_layers_have_no_more_kernels(plain: bool) -> None:
    # From five on: kernels of up to four layers that share a launch have a text for each number of them.
    few, more = ({d: len(keys) for d, (keys, _) in compiled(n, plain).items()} for n in (5, 6))
    assert set(few) == {"forward", "backward"}
    assert few == more


@pytest.mark.rotating
def test_a_plan_does_not_depend_on_hash_seeds() -> None:
    root = Path(__file__).parents[2]
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
        command = [sys.executable, "-m", "tests.planner.test_equal_layers"]
        digests.add(subprocess.run(command, env=environment, cwd=root, capture_output=True, check=True).stdout)
    assert len(digests) == 1


def digest() -> str:
    """All that was planned and written for two layers, as one number."""
    parts = [f"{keys} {record.plan} {record.decisions}" for keys, record in compiled(2, plain=True).values()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


if __name__ == "__main__":
    print(digest())
