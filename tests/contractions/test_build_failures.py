"""A chip's own compiler may fail on a kernel with matrix products: the library then multiplies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass import compilation
from onepass.backend import FallbackWarning
from onepass.building import Building
from onepass.errors import CompilerNotFound, KernelBuildError
from onepass.ir.source import KernelSource
from onepass.runtime.builders import InterpretedBuilder
from onepass.runtime.executable import Executable
from onepass.runtime.triton_kernels import Built

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


def test_only_the_kernel_that_cannot_be_built_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two products, one kernel fails; of the point-wise kernels, one with two operations does."""
    build = InterpretedBuilder.build

    def fail(self: InterpretedBuilder, source: KernelSource, output: Path) -> None:
        if any(all(f"aten.{op}." in source.text for op in pair) for pair in (("mm", "sin"), ("exp", "tanh"))):
            raise KernelBuildError("the assembler", "it crashed", "")
        build(self, source, output)

    monkeypatch.setattr(InterpretedBuilder, "build", fail)
    inputs = (torch.randn(17, 24), torch.randn(24, 19), torch.randn(24, 40), torch.randn(33, 50))

    def function(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sin(x @ v), torch.relu((x * 2) @ w + 1), torch.tanh(torch.exp(y)).sort(0)[0], y.cos() + 1

    explanation = onepass.explain(function, *inputs, target="triton-interpret", options={"cache": False})
    graph = explanation.graphs[0]
    assert [e.op for e in graph.externs if ".mm." in e.op] == ["aten.mm.default"]
    found = [{o["op"].split(".")[1] for o in k.operations} for k in graph.kernels]
    assert any({"mm", "relu"} <= ops for ops in found) and any({"cos", "add"} <= ops for ops in found)
    assert not any({"tanh", "exp"} <= ops or {"mm", "sin"} <= ops for ops in found)
    assert sum("could not be built" in d.reason for d in graph.decisions) == 3  # both, and half of the second
    options = {"target": "triton-interpret", "cache": False, "strict": True}
    for ours, eager in zip(
        torch.compile(function, backend="onepass", options=options)(*inputs), function(*inputs), strict=True
    ):
        torch.testing.assert_close(ours, eager)


def test_a_kernel_of_one_operation_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: InterpretedBuilder, source: KernelSource, output: Path) -> None:
        raise KernelBuildError("the assembler", "it crashed", "")

    monkeypatch.setattr(InterpretedBuilder, "build", fail)
    options = {"target": "triton-interpret", "cache": False, "strict": False}
    run = torch.compile(lambda x: x.sinh() * 2, backend="onepass", options=options)
    x = torch.randn(8)
    with pytest.warns(FallbackWarning, match="it crashed"):
        torch.testing.assert_close(run(x), x.sinh() * 2)


def test_nothing_is_compiled_that_cannot_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler there is no launcher: programs run as eager does, at once."""

    def missing() -> None:
        raise CompilerNotFound(["cc"])

    monkeypatch.setattr(compilation, "launcher", missing)
    monkeypatch.setattr(compilation, "kernel_device", lambda _: "cuda")
    monkeypatch.setattr(compilation, "runs_here", lambda _: True)
    monkeypatch.setattr(Building, "run", lambda _: pytest.fail("compiled"))
    run = torch.compile(lambda x: x.sin() * 2, backend="onepass", options={"target": "sm_90", "cache": False})
    x = torch.randn(8)
    with pytest.warns(FallbackWarning, match="no C compiler"):
        torch.testing.assert_close(run(x), x.sin() * 2)


def test_a_kernel_that_asks_for_too_much_shared_memory_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load, large = InterpretedBuilder.load, []

    def claimed(self: InterpretedBuilder, path: Path, source: KernelSource) -> Any:
        function = load(self, path, source)
        if "tl.dot" in source.text and len(large) < 2:
            large.append(source.text)
        shared = 1 << 30 if source.text in large else 0
        function.built = Built("", shared, 0, 1, 0, b"")  # type: ignore[attr-defined]
        return function

    class Strict(Executable):
        def __init__(self, host: Any, kernels: list[Any]) -> None:
            assert not any(k.function.built.shared for k in kernels), "the driver would refuse this"
            super().__init__(host, kernels)

    monkeypatch.setattr(InterpretedBuilder, "load", claimed)
    monkeypatch.setattr(compilation, "Executable", Strict)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w + 1)

    x, w = torch.randn(128, 64), torch.randn(64, 128)
    options = {"target": "triton-interpret", "cache": False, "strict": True}
    ours = torch.compile(function, backend="onepass", options=options)(x, w)
    assert len(large) == 2
    torch.testing.assert_close(ours, function(x, w))
