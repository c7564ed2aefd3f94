"""`onepass.explain` on real programs: kernels, lines, bytes, and the same story from the cache."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import onepass
from onepass.errors import UnknownOption, UnknownTarget


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = x * 2 + y
    return torch.relu(total) - 1


def test_one_kernel_with_its_lines_and_bytes() -> None:
    x = torch.randn(1024, 1024)
    explanation = onepass.explain(chain, x, x + 1)
    (kernel,) = explanation.kernels
    assert explanation.externs == []
    lines = {operation["line"] for operation in kernel.operations}
    assert any("test_api.py" in line and "total = x * 2 + y" in line for line in lines), lines
    assert (kernel.bytes_read, kernel.bytes_written) == (2 * x.nbytes, x.nbytes)
    assert explanation.bytes_moved == explanation.bytes_minimum == 3 * x.nbytes
    assert explanation.bytes_unfused > explanation.bytes_moved
    assert kernel.source and kernel.schedule


def test_lines_are_the_users_not_those_of_torch() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.rms_norm(x, (64,))
            return self.norm(y)

    explanation = onepass.explain(Block(), torch.randn(32, 64, requires_grad=True))
    lines = {operation["line"] for kernel in explanation.kernels for operation in kernel.operations}
    assert all("test_api.py" in line for line in lines), lines
    assert {line.split(": ")[-1] for line in lines} == {"y = nn.functional.rms_norm(x, (64,))", "return self.norm(y)"}


def test_a_program_without_lines_of_its_own_names_none_of_ours() -> None:
    kernels = onepass.explain(nn.Sequential(nn.LayerNorm(64)), torch.randn(32, 64)).kernels
    lines = {operation["line"] for kernel in kernels for operation in kernel.operations}
    assert not any("capture.py" in line for line in lines), lines


def test_numbers_of_dynamic_sizes_are_those_of_the_sizes_at_hand() -> None:
    for rows in (40, 3000):
        x = torch.randn(rows, 96)
        torch._dynamo.mark_dynamic(x, 0)
        explanation = onepass.explain(lambda x: torch.softmax(x * 2, -1), x)
        (graph,) = explanation.graphs
        assert list(graph.sizes.values()) == [rows]
        assert f"numbers are for {next(iter(graph.sizes))} = {rows}" in str(explanation)
        assert f"= {rows}" in explanation.to_html()
        assert explanation.bytes_moved == explanation.bytes_minimum == 2 * x.nbytes


def test_forward_and_backward() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.GELU())
    explanation = onepass.explain(model, torch.randn(32, 64, requires_grad=True))
    assert [graph.direction for graph in explanation.graphs] == ["forward", "backward"]
    assert all(graph.kernels for graph in explanation.graphs)
    assert model[0].weight.grad is None


def test_an_extern_says_why() -> None:
    (extern,) = onepass.explain(torch.mm, torch.randn(8, 8), torch.randn(8, 8)).externs
    assert "mm" in extern.op and extern.why


def test_a_cache_hit_tells_the_same_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    x = torch.randn(128, 128)
    fresh, cached = onepass.explain(chain, x, x), onepass.explain(chain, x, x)
    assert [fresh.graphs[0].cache, cached.graphs[0].cache] == ["miss", "hit"]
    assert cached.kernels == fresh.kernels and cached.decisions == fresh.decisions
    assert cached.bytes_moved == fresh.bytes_moved


def test_mistakes_are_errors() -> None:
    with pytest.raises(UnknownOption, match="did you mean 'precision'"):
        onepass.explain(chain, torch.ones(2), torch.ones(2), options={"precison": "eager"})
    with pytest.raises(UnknownTarget, match="cpu"):
        onepass.explain(chain, torch.ones(2), torch.ones(2), target="abacus")


def test_unfused_on_request() -> None:
    x = torch.randn(64, 64)
    explanation = onepass.explain(chain, x, x + 1, options={"fuse": False})
    assert len(explanation.kernels) == 4
    assert explanation.bytes_moved == explanation.bytes_unfused


def test_the_function_and_the_package_of_one_name() -> None:
    """`onepass.explain` is the function; modules of the package `onepass.explain` are found by every form of import."""
    import onepass.explain.measure
    import onepass.explain.measure as measuring
    from onepass.explain import measure

    assert onepass.explain.measure is measuring is measure  # type: ignore[attr-defined]
    assert callable(measure.bytes_read) and inspect.isfunction(onepass.explain)
    assert list(inspect.signature(onepass.explain).parameters)[:2] == ["function", "args"]
