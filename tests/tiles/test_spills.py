"""A kernel that spills registers gets its next schedule; where there is none, the plan fuses less and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onepass
from onepass.ir.source import KernelSource

pytest.importorskip("triton")
from onepass.runtime import triton_kernels

FREE = {"strict": True, "cache": False}


def spilling_if(monkeypatch: pytest.MonkeyPatch, spills: Any) -> None:
    """The assembler's answer replaced: a kernel spills where the test says so."""
    real = triton_kernels.build_binary

    def build(source: KernelSource, target: Any, aligned: bool = True) -> bytes:
        built = triton_kernels.read_binary(real(source, target, aligned))
        head = {"entry": built.entry, "shared": built.shared, "threads": built.threads, "registers": 255}
        return triton_kernels.packed({**head, "spills": 512 if spills(source) else 0}, built.binary)

    monkeypatch.setattr(triton_kernels, "build_binary", build)


def test_the_next_schedule_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spilling_if(monkeypatch, lambda source: source.warps <= 8)
    e = onepass.explain(lambda x: (x * 1.0371).softmax(-1), torch.randn(600, 4000), target="sm_90", options=FREE)
    (graph,) = e.graphs
    assert [k.spilled_bytes for k in graph.kernels] == [0]
    assert "16 warps" in graph.kernels[0].schedule
    notes = [d for d in graph.decisions if d.kind == "spill"]
    assert notes and not notes[0].accepted and "512 bytes" in notes[0].reason


def test_less_is_fused_where_every_schedule_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    spilling_if(monkeypatch, lambda source: source.text.count("tl.load") > 4)

    def function(*xs: torch.Tensor) -> torch.Tensor:
        total = xs[0] * 1.0372
        for x in xs[1:]:
            total = total * x + x
        return total

    e = onepass.explain(function, *(torch.randn(64, 128) for _ in range(12)), target="sm_90", options=FREE)
    (graph,) = e.graphs
    assert len(graph.kernels) > 1
    assert all(k.spilled_bytes == 0 for k in graph.kernels)
    assert any("operations, limit" in d.reason for d in graph.decisions if not d.accepted)
