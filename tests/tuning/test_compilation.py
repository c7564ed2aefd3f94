"""Tuning inside a compilation: what is chosen runs, is stored with the graph, and a warm start measures nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onepass import tuning
from onepass.compilation import compile_graph
from onepass.ir.options import Options
from onepass.ir.source import Trial
from onepass.ir.target import Target, find_target
from onepass.runtime import kernels as built_kernels
from onepass.runtime.cache import default_cache
from onepass.runtime.kernels import LoadedKernel
from onepass.runtime.stopwatch import Timing, stopwatch_for
from tests.tuning.planned import traced

ROWS, COLUMNS = 2048, 4096  # predicted to take 19 us, so that it is measured


@dataclass
class FewerPrograms:
    """The fewer programs, the faster."""

    chip: str
    asked: int = 0

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        self.asked += 1
        return Timing(100.0 * int(trial.launches[0].programs))


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * w + 1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))


def target() -> Target:
    return find_target("triton-interpret")


def test_what_is_chosen_is_stored_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS)]
    options, stopwatch = Options.make({"strict": True, "tune": "quick"}), FewerPrograms("stored")
    cold = compile_graph(traced(function, *inputs), target(), options, "inference", stopwatch)
    (kernel,) = cold.record.kernels
    assert cold.record.cache == "miss" and stopwatch.asked > 1 and "tune" in cold.record.stage_seconds
    assert kernel.trials[0].change == "as the rules say" and not kernel.trials[0].chosen
    assert [t.change for t in kernel.trials if t.chosen] == ["block x 2"] and "block x 2" in kernel.tuning
    plain = compile_graph(traced(function, *inputs), target(), Options.make({"tune": "off"}), "inference", stopwatch)
    assert plain.record.kernels[0].schedule != kernel.schedule and not plain.record.kernels[0].tuning

    asked = stopwatch.asked
    monkeypatch.setattr(built_kernels, "_functions", {})  # as in a new process
    monkeypatch.setattr(built_kernels, "_build_all", None)  # nothing is built
    warm = compile_graph(traced(function, *inputs), target(), options, "inference", stopwatch)
    assert warm.record.cache == "hit" and stopwatch.asked == asked
    assert warm.record.kernels[0].source == kernel.source and warm.record.kernels[0].trials == kernel.trials


def test_the_choice_of_one_chip_is_not_anothers() -> None:
    inputs = [torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS)]
    options = Options.make({"strict": True, "tune": "quick"})
    records = [
        compile_graph(traced(function, *inputs), target(), options, "inference", FewerPrograms(chip)).record
        for chip in ("one", "another", "one")
    ]
    assert [r.cache for r in records] == ["miss", "miss", "hit"]


def test_values_are_right() -> None:
    """Small inputs run by the kernel that was chosen; a graph that is not measured says why."""
    inputs = [torch.randn(64, 300), torch.randn(300)]
    compiled = compile_graph(
        traced(function, *inputs),
        target(),
        Options.make({"strict": True, "tune": "quick"}),
        "inference",
        FewerPrograms("values"),
    )
    assert "mostly launching" in compiled.record.kernels[0].tuning
    (ours,) = compiled.call(list(inputs))
    torch.testing.assert_close(ours, function(*inputs))


def test_later_graphs_and_processes_do_not_tune_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was tuned in one graph is known in others."""
    inputs = [torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS)]
    options, stopwatch = Options.make({"strict": True, "tune": "quick"}), FewerPrograms("known")
    first = compile_graph(traced(function, *inputs), target(), options, "inference", stopwatch)
    asked = stopwatch.asked
    monkeypatch.setattr(tuning, "_decided", {})  # as in a new process
    other = traced(lambda x, w: function(x, w).view(-1), *inputs)
    second = compile_graph(other, target(), options, "inference", stopwatch)
    assert second.record.cache == "miss" and stopwatch.asked == asked
    assert second.record.kernels[0].schedule == first.record.kernels[0].schedule
    assert second.record.kernels[0].trials == first.record.kernels[0].trials
    for path in (default_cache().root / "times").glob("*.json"):
        default_cache().write("times", path.stem, {"trials": [{"none": 1}]})
    monkeypatch.setattr(tuning, "_decided", {})
    compile_graph(traced(lambda x, w: function(x, w).view(-1, 2), *inputs), target(), options, "inference", stopwatch)
    assert stopwatch.asked > asked


@dataclass
class ByTensors:
    """A time for each number of tensors."""

    chip: str
    times: dict[int, float]

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        return Timing(self.times[len(trial.stand_ins)])


@pytest.mark.parametrize(("apart_us", "kernels"), [(20.0, 2), (249.0, 2), (260.0, 1)])
def test_no_kernel_survives_that_is_slower_than_its_parts(
    apart_us: float, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two results of one tensor in one kernel, predicted to take 5 us."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x) * 2, torch.cos(x) * 3

    monkeypatch.setattr(tuning, "SMALLEST_US", 0.0)
    x, options = torch.randn(64, 300), Options.make({"strict": True, "tune": "quick"})
    stopwatch = ByTensors(f"{apart_us}", {3: 500, 2: apart_us})
    made = compile_graph(traced(both, x), target(), options, "inference", stopwatch)
    assert len(made.record.kernels) == kernels
    note = next(d for d in made.record.decisions if d.kind == "parts")
    assert note.accepted == (kernels == 2)
    assert note.reason == f"measured 500.0 us for all kernels, {2 * apart_us:.1f} us with slow ones in parts"
    assert all(k.tuning and k.trials for k in made.record.kernels)
    for ours, eager in zip(made.call([x]), both(x), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(("times", "kernels"), [(1.9, 1), (2.1, 2)])
def test_what_is_near_its_price_stays_in_one_kernel(times: float, kernels: int) -> None:
    """Twice its price is far; each of its results should take less than that in a kernel of its own."""
    x = torch.randn(ROWS, COLUMNS)
    graph = traced(lambda x: (torch.sin(x) * 2, torch.cos(x) * 3), x)
    ruled = compile_graph(graph, target(), Options.make({"tune": "off"}), "inference")
    stopwatch = ByTensors(f"near {times}", {3: times * ruled.record.kernels[0].predicted_us, 2: 20.0})
    made = compile_graph(graph, target(), Options.make({"strict": True, "tune": "quick"}), "inference", stopwatch)
    assert len(ruled.record.kernels) == 1 and len(made.record.kernels) == kernels


@pytest.mark.parametrize("name", ["cpu", "triton-interpret"])
def test_nothing_is_measured_but_on_a_gpu(name: str) -> None:
    assert stopwatch_for(find_target(name), "cpu") is None
    assert stopwatch_for(find_target(name), "cuda") is None


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "gfx942"])
def test_absent_chips_are_not_measured(name: str) -> None:
    assert stopwatch_for(find_target(name), "cpu") is None
    if not torch.cuda.is_available():
        assert stopwatch_for(find_target(name), "cuda") is None
