"""Program, plan and C of small programs, word for word: `make golden` writes them, a diff shows what changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import onepass

Case = tuple[Callable[..., object], tuple[torch.Tensor, ...]]


def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


CASES: dict[str, Case] = {
    "chain": (lambda x, y: torch.relu((x + y) * 2).square(), (full(64, 1024), full(64, 1024))),
    "softmax": (lambda x: torch.softmax(x, -1), (full(64, 1000),)),
    "softmax_long": (lambda x: torch.softmax(x, -1), (full(8, 500_000),)),
    "layernorm": (lambda x, w: F.layer_norm(x, (512,), w, w), (full(128, 512), full(512))),
    "full_sum": (lambda x: (2 * x).relu().sum(), (full(1024, 1024),)),
    "column_sum": (lambda x, y: (x * y).sum(0), (full(512, 256), full(512, 256))),
    "cat": (lambda x: torch.cat([x, torch.zeros_like(x)], 1), (full(64, 256),)),
    "transpose": (lambda x: torch.relu(x).t().contiguous(), (full(300, 500),)),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), (full(512, 1000), full(512, dtype=torch.int64))),
    "gather": (lambda w, i: w[i] + 1, (full(100, 32), full(64, dtype=torch.int64))),
    "dropout": (lambda x: F.dropout(x, 0.25), (full(64, 1024),)),
    "bfloat16": (lambda x, y: F.gelu(x) * y, (full(64, 512, dtype=torch.bfloat16),) * 2),
}


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    function, arguments = CASES[name]
    with torch.no_grad():
        e = onepass.explain(function, *arguments, options={"strict": True, "cache": False})
    (graph,) = e.graphs
    program = "\n".join(line.split("    # ")[0].rstrip() for line in graph.program.splitlines())
    sources = ["\n".join(s for s in k.source.splitlines() if not s.startswith("//  ")) for k in graph.kernels]
    golden(f"{name}.txt", "\n\n".join([program, graph.plan, *sources]) + "\n")
