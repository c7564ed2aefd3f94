"""The tour shows the compiler's own output for softmax and for causal attention."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass

TOUR = Path(__file__).resolve().parents[2] / "docs" / "tour.md"
# Seconds depend on the machine, registers on the version of Triton.
BUILT = re.compile(r"cache \w+, compiled (before, )?in \S+ s|\d+ registers, .*")


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    i = torch.arange(q.shape[-2], device=q.device)
    scores = scores.masked_fill(i[:, None] < i[None, :], -math.inf)
    return torch.softmax(scores, -1) @ v


def test_softmax_is_shown_as_it_is_compiled(request: pytest.FixtureRequest) -> None:
    (record,) = onepass.explain(softmax, torch.randn(4096, 4096)).graphs
    _compare({"program": _program(record.program), "plan": record.plan}, request)


def test_attention_is_shown_as_it_is_planned(request: pytest.FixtureRequest) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 16, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
        explanation = onepass.explain(attention, q, k, v, target="sm_90")
    (record,) = explanation.graphs
    (kernel,) = record.kernels
    decisions = [d for d in record.decisions if d.kind in ("library", "chain")]
    sweep, _, rest = kernel.source[kernel.source.index("    for i0 in") :].partition("    for i1 in")
    end = rest[rest.index("    sum_0 = ") :]
    blocks = {
        "attention program": _program(record.program),
        "attention decision": "\n".join(
            f"{d.kind}, {'made' if d.accepted else 'rejected'}: {d.reason}" for d in decisions
        ),
        "attention plan": record.plan,
        "attention schedule": kernel.schedule,
        "attention sweep": sweep.rstrip(),
        "attention end": end.rstrip(),
        "attention report": str(explanation),
    }
    _compare(blocks, request)


def _program(text: str) -> str:
    """Without this file's own lines."""
    return re.sub(r"(# \S+)  \S.*", r"\1", text)


def _compare(blocks: Mapping[str, str], request: pytest.FixtureRequest) -> None:
    """Every marked block of the page is the given text, or becomes it with --update-golden."""
    text = page = TOUR.read_text()
    for name, content in blocks.items():
        found = re.search(rf"<!-- {name} -->\n```\w*\n(.*?)\n```", text, re.DOTALL)
        assert found is not None, f"docs/tour.md has no block {name!r}"
        text = text[: found.start(1)] + content + text[found.end(1) :]
    if request.config.getoption("--update-golden"):
        TOUR.write_text(text)
    else:
        same = BUILT.sub("", text) == BUILT.sub("", page)
        assert same, "docs/tour.md differs; if the change is meant, run pytest --update-golden tests/docs"
