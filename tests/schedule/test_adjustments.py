"""Every neighbour of the rules' schedule computes the same and builds for a GPU; sizes stay within what a nest has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from tests.tuning.planned import planned

from onepass.ir.record import CompileRecord
from onepass.ir.schedule import Schedule
from onepass.ir.target import find_target
from onepass.pipeline import PlannedGraph, compile_entry
from onepass.runtime.builders import builder_for
from onepass.runtime.entries import GraphEntry
from onepass.runtime.executable import Executable
from onepass.runtime.kernels import build_kernels

Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]
# name -> function, shapes, what its schedule says on the interpreter's target
CASES: dict[str, Case] = {
    "pointwise": (lambda x, y: F.gelu(x * y + 1), ((37, 130), (37, 130)), "grid x tile"),
    "held rows": (lambda x: (x * 3).softmax(-1), ((45, 300),), "held"),
    "held rows with a weight": (lambda x, w: F.layer_norm(x, (512,), w, w), ((21, 512), (512,)), "held"),
    "streamed rows": (lambda x: (x * 3).softmax(-1), ((5, 70_000),), "swept"),
    "streamed moments": (lambda x: x.var(-1), ((9, 40_001),), "swept"),
    "columns": (lambda x: (x * 2).sum(0), ((600, 4096),), "swept"),
    "split": (lambda x: (x * x).sum(), ((150, 2000),), "split"),
    "split columns": (lambda x: x.amax(0), ((9000, 24),), "split"),
    "rows and columns": (lambda x: ((y := x.softmax(-1)) * 2, (y * x).sum(0)), ((2000, 256),), "split"),
    "transpose": (lambda x: torch.relu(x).t().contiguous(), ((70, 130),), "grid x tile"),
}
PRODUCTS: dict[str, Case] = {
    "product": (lambda x, w: F.gelu(x @ w), ((70, 48), (48, 70)), "columns by"),
    "attention": (
        lambda q, k, v: torch.softmax((q @ k.mT).tanh(), -1) @ v,
        ((2, 70, 32), (2, 130, 32), (2, 130, 24)),
        "held",
    ),
    "rows of products": (lambda x, w: torch.softmax(x @ w, -1), ((70, 48), (48, 50)), "inside by"),
    "states of tiles": (lambda x, w: torch.logsumexp(x @ w, -1), ((70, 48), (48, 300)), "rows by"),
    "side by side": (lambda x, v, w: ((x @ v).relu(), (x @ w) * 2), ((70, 48), (48, 64), (48, 32)), "columns by"),
}
FAR = *["warps / 2"] * 2, *["lanes x 2"] * 3, *["block x 2"] * 3, *["chunk / 2"] * 3


def entry_of(graph: PlannedGraph, *changes: str) -> GraphEntry:
    """The graph with its schedules changed step by step; a step that a schedule does not have is left out."""
    choices: dict[str, Schedule] = {}
    for name in graph.names:
        for change in changes:
            beside = graph.neighbours(name, choices.get(name))
            choices |= {name: beside[change]} if change in beside else {}
    return compile_entry(graph, CompileRecord(), choices)[0]


def all_changes(graph: PlannedGraph) -> list[str]:
    """How the neighbours of a graph's schedules differ from them."""
    return list(dict.fromkeys(change for name in graph.names for change in graph.neighbours(name)))


def values(graph: PlannedGraph, entry: GraphEntry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    kernels = build_kernels(entry.kernels, builder_for(graph.target))
    return list(Executable(entry.host, kernels).call(list(inputs)))


@pytest.mark.rotating
@pytest.mark.parametrize("name", [*CASES, *PRODUCTS])
def test_neighbours_compute_the_same(name: str) -> None:
    function, shapes, kind = (CASES | PRODUCTS)[name]
    inputs = [torch.randn(s) * (0.2 if name in PRODUCTS else 1) for s in shapes]
    graph = planned(function, *inputs)
    ruled = entry_of(graph)
    assert any(kind in k.schedule for k in ruled.record.kernels), ruled.record.kernels[0].schedule
    keys = {ruled.kernels[0].key}
    for changes in (*((change,) for change in all_changes(graph)), FAR):
        entry = entry_of(graph, *changes)
        if entry.kernels[0].key in keys:
            continue  # it has nothing that could change
        keys.add(entry.kernels[0].key)
        if len({k.text.split("\n", 1)[1] for k in (*ruled.kernels, *entry.kernels)}) == len(ruled.kernels):
            continue  # other warps or stages, which the interpreter does not have
        expected = function(*inputs)
        expected = list(expected) if isinstance(expected, tuple) else [expected]
        for ours, exact in zip(values(graph, entry, inputs), expected, strict=True):
            torch.testing.assert_close(ours, exact, rtol=2e-5, atol=2e-5, msg=lambda m: f"{changes}: {m}")  # noqa: B023
    assert len(keys) >= 4, "too little to choose from"


@pytest.mark.rotating
@pytest.mark.parametrize("name", CASES)
def test_neighbours_build(name: str) -> None:
    function, shapes, _ = CASES[name]
    graph = planned(function, *(torch.randn(s) for s in shapes), target="sm_90")
    ruled = entry_of(graph)
    sources = {s.key: s for change in all_changes(graph) for s in entry_of(graph, change).kernels}
    built = [k.function.built for k in build_kernels(list(sources.values()), builder_for(graph.target))]  # type: ignore[attr-defined]
    assert all(b.registers and b.shared <= find_target("sm_90").shared_bytes for b in built)
    assert {s.warps for s in sources.values()} > {ruled.kernels[0].warps}


def test_neighbours_of_products_build() -> None:
    """Each fits the chip; other loads in flight, rows and steps take more or less of its shared memory."""
    with FakeTensorMode():
        inputs = [torch.empty(4, 16, 1024, 128, dtype=torch.float16) for _ in range(3)]
        graph = planned(PRODUCTS["attention"][0], *inputs, target="sm_90")
    assert [g.products for g in graph.names.values()] == [True]
    shared: dict[str, int] = {}
    for change in ("", "stages +1", "stages -1", "block x 2", "block / 2", "lanes x 2", "lanes / 2"):
        (kernel,) = build_kernels(entry_of(graph, change).kernels, builder_for(graph.target))
        shared[change] = kernel.function.built.shared  # type: ignore[attr-defined]
    assert max(shared.values()) <= find_target("sm_90").shared_bytes
    ruled = shared.pop("")
    assert all((n > ruled) == ("+" in change or "x" in change) for change, n in shared.items()), (ruled, shared)


def test_a_program_has_at_most_1024_threads_and_at_least_one_warp() -> None:
    graph = planned(lambda x: x + 1, torch.randn(1 << 20), target="sm_90")
    assert [entry_of(graph, *[change] * 9).kernels[0].warps for change in ("warps / 2", "warps x 2")] == [1, 32]


def test_tiles_too_large_for_any_thread_are_not_made() -> None:
    graph = planned(lambda x: x.softmax(-1), torch.randn(4000, 4096), target="sm_90")
    (kernel,) = entry_of(graph, *["block x 2"] * 9).kernels
    (rows,) = re.findall(r"tl\.arange\(0, (\d+)\)\[:, None\]", kernel.text) or ["1"]
    assert int(rows) * 4096 <= 128 * 32 * kernel.warps


def test_a_neighbour_of_a_neighbour_is_the_schedule() -> None:
    graph = planned(lambda x: x + 1, torch.randn(1 << 20), target="sm_90")
    (name,) = graph.names
    ruled = graph.names[name].schedule
    for there, back in (("warps x 2", "warps / 2"), ("block / 2", "block x 2")):
        other = graph.neighbours(name)[there]
        assert other != ruled and graph.neighbours(name, other)[back] == ruled
