"""A chip's own compiler may fail on a kernel with matrix products: the library then multiplies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onepass
from onepass.errors import KernelBuildError
from onepass.ir.source import KernelSource
from onepass.runtime.builders import InterpretedBuilder

pytest.importorskip("triton")


def test_products_go_to_the_library_where_their_kernel_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    build = InterpretedBuilder.build

    def fail(self: InterpretedBuilder, source: KernelSource, output: Path) -> None:
        if "tl.dot" in source.text:
            raise KernelBuildError("the assembler", "it crashed", "")
        build(self, source, output)

    monkeypatch.setattr(InterpretedBuilder, "build", fail)
    options = {"target": "triton-interpret", "cache": False, "strict": True}
    x, w = torch.randn(17, 24), torch.randn(24, 19)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w + 1)

    explanation = onepass.explain(function, x, w, target="triton-interpret", options={"cache": False})
    assert [e.op for e in explanation.graphs[0].externs] == ["aten.mm.default"]
    assert any("could not be built" in d.reason for d in explanation.graphs[0].decisions)
    ours = torch.compile(function, backend="onepass", options=options)(x, w)
    torch.testing.assert_close(ours, function(x, w))
