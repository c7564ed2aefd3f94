"""Close calls on a real GPU: both ways race, the faster one is the plan, and values are eager's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass import judging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def statistics(x: Tensor, w: Tensor) -> Tensor:
    return torch.logsumexp(x @ w, -1)


def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return F.gelu(F.linear(x, q, b)), F.linear(x, k, b), torch.relu(F.linear(x, v)) * 2


CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "gelu": (gelu, ((4096, 1024), (4096, 1024), (4096,))),
    "statistics": (statistics, ((8192, 128), (128, 2048))),
    "projections": (projections, ((4096, 2048), *[(2048, 2048)] * 3, (2048,))),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_measured_decides(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(judging, "_known", {})
    function, shapes = CALLS[name]
    inputs = [torch.randn(s, device="cuda", dtype=torch.bfloat16) / 8 for s in shapes]
    with torch.no_grad():
        graph = onepass.explain(function, *inputs, options={"strict": True}).graphs[0]
        told = [d for d in graph.decisions if d.reason.startswith("measured ")]
        assert told, [d.reason for d in graph.decisions]
        for d in told:
            together, apart = (float(t) for t in re.findall(r"([\d.]+) us (?:in|by|side)", d.reason)[:2])
            assert 1 < together < 2000 and 1 < apart < 2000
        ours = torch.compile(function, backend="onepass", options={"strict": True})(*inputs)
        exact = function(*(t.double() for t in inputs))
    for mine, theirs in zip(*(v if isinstance(v, tuple) else (v,) for v in (ours, exact)), strict=True):
        assert (mine.double() - theirs).abs().max() <= 3e-2 * (1 + theirs.abs().max())


def test_what_does_not_fit_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(judging, "_known", {})
    torch.cuda.empty_cache()  # what torch holds for nothing counts as free
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (1 << 20, 1 << 30))
    inputs = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in CALLS["gelu"][1]]
    with torch.no_grad():
        graph = onepass.explain(gelu, *inputs, options={"strict": True, "cache": False}).graphs[0]
    assert any("not measured: its tensors take" in d.reason for d in graph.decisions)
