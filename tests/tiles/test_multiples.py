"""Sizes known at run time: where they were multiples of 8, kernels load 16 bytes at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onepass

pytest.importorskip("triton")
from onepass.ir.source import KernelSource
from onepass.runtime import triton_kernels

FREE = {"strict": True, "cache": False}
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "chain": lambda x: torch.sigmoid(x * 1.0611) * 2,
    "softmax": lambda x: (x * 1.0612).softmax(-1),
    "norm": lambda x: torch.nn.functional.layer_norm(x * 1.0613, x.shape[-1:]),
}


def assembled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the assembler gets from now on."""
    texts: list[str] = []
    real = triton_kernels._edited

    def kept(text: str, **how: bool) -> str:
        texts.append(real(text, **how))
        return texts[-1]

    monkeypatch.setattr(triton_kernels, "_edited", kept)
    return texts


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "wide"), [(1000, True), (500, False)])
def test_loads(name: str, columns: int, wide: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    real = triton_kernels._edited

    def kept(text: str, **how: bool) -> str:
        texts.append(text)
        return real(text, **how)

    monkeypatch.setattr(triton_kernels, "_edited", kept)
    x = torch.randn(304 if wide else 300, columns).to(dtype)
    for dimension in (0, 1):
        torch._dynamo.mark_dynamic(x, dimension)
    e = onepass.explain(FUNCTIONS[name], x, target="sm_90", options=FREE)
    assert "s" in e.kernels[0].schedule
    loads = [load for text in texts for load in re.findall(r"ld\.global\S*", text)]
    assert loads and all((".v4." in load) == wide for load in loads)


def built(monkeypatch: pytest.MonkeyPatch) -> list[KernelSource]:
    """The sources of which kernels are built from now on."""
    sources: list[KernelSource] = []
    real = triton_kernels.build_binary

    def build(source: KernelSource, target: Any) -> bytes:
        sources.append(source)
        return real(source, target)

    monkeypatch.setattr(triton_kernels, "build_binary", build)
    monkeypatch.setattr("onepass.runtime.kernels._functions", {})
    return sources


@pytest.mark.parametrize(
    ("rows", "columns", "multiples"), [(64, 520, (0, 1)), (63, 512, (1,)), (64, 511, (0,)), (63, 511, ())]
)
def test_only_what_was_seen_is_assumed(
    rows: int, columns: int, multiples: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = built(monkeypatch)
    x = torch.randn(rows, columns)
    for dimension in (0, 1):
        torch._dynamo.mark_dynamic(x, dimension)
    onepass.explain(lambda x: x.t() * 1.5, x, target="sm_90", options=FREE)
    (source,) = sources
    sizes = [k for k in range(source.symbols) if f"n{k}" in source.text]
    assert sizes == [0, 1] and source.multiples == multiples


ROWS: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    **{name: (function, (64, 512), 0) for name, function in FUNCTIONS.items()},
    "short rows": (FUNCTIONS["norm"], (640, 64), 0),
    "heads": (lambda x: (x.view(8, -1, 4, 32).transpose(1, 2) * 2).contiguous(), (8, 64, 128), 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_number_of_rows_decides_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of them takes the kernel that was built first, and it loads as much at once."""
    texts = assembled(monkeypatch)
    sources = built(monkeypatch)
    function, shape, dimension = ROWS[name]
    x = torch.randn(shape).bfloat16()
    torch._dynamo.mark_dynamic(x, dimension)
    onepass.explain(function, x, target="sm_90", options=FREE)
    assert sources and all(source.symbols == 1 and not source.multiples for source in sources)
    loads = [load for text in texts for load in re.findall(r"ld\.global\S*", text)]
    assert loads and all(".v4." in load or ".v2." in load for load in loads)
