"""What is chosen, what is skipped and what it may take, with times that the tests make up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from onepass import tuning
from onepass.errors import KernelBuildError
from onepass.explain import Explanation
from onepass.ir.record import CompileRecord
from onepass.ir.source import KernelSource, Trial
from onepass.pipeline import PlannedGraph, compile_entry
from onepass.runtime.builders import InterpretedBuilder
from onepass.runtime.kernels import Function, LoadedKernel
from onepass.runtime.stopwatch import Timing
from onepass.tuning import EFFORTS, Outcome, Workshop, tune_groups
from tests.tuning.planned import planned

LARGE = (4096, 1024)  # float32: read and written in 11 us or a little more by the interpreter's target


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@dataclass
class Scripted:
    """Gives times in the order of a script, the last one again and again; counts who asks."""

    script: Sequence[float | str]
    chip: str
    asked: int = 0
    seconds: float = 0.0  # that a measurement takes
    clock: float = 0.0
    met: dict[int, int] = field(default_factory=dict)
    worst: list[float] = field(default_factory=list)  # that callers still cared about

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        assert len(kernels) == len(trial.launches)
        self.worst.append(worst_us)
        answer = self.script[min(self.asked, len(self.script) - 1)]
        self.asked += 1
        self.clock += self.seconds
        return Timing(problem=answer) if isinstance(answer, str) else Timing(answer)

    def now(self) -> float:
        return self.clock


class Falling(Scripted):
    """Each kernel is faster than the one before."""

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        place = self.met.setdefault(id(kernels[0].function), len(self.met))
        return Timing(1000 * 0.9**place)


@pytest.fixture
def chip(request: pytest.FixtureRequest) -> str:
    """A chip of the test's own: what one test found is not known to the next."""
    return str(request.node.nodeid)


class Spilling(InterpretedBuilder):
    """Kernels of some warps spill, those of others cannot be built."""

    def __init__(self, spilling: Sequence[int] = (), failing: Sequence[int] = ()) -> None:
        self.spilling, self.failing = spilling, failing

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {self.spilling} {self.failing}"

    def build(self, source: KernelSource, output: Path) -> None:
        if source.warps in self.failing:
            raise KernelBuildError("the test", "no such kernel", "")
        super().build(source, output)

    def load(self, path: Path, source: KernelSource) -> Function:
        return WithResources(super().load(path, source), 200, 64 if source.warps in self.spilling else 0)


@dataclass
class WithResources:
    """A function that says what its compiler said."""

    function: Function
    registers: int
    spills: int
    built: Any = field(init=False)

    def __post_init__(self) -> None:
        self.built = self

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def tuned(graph: PlannedGraph, stopwatch: Scripted, builder: InterpretedBuilder | None = None) -> dict[str, Outcome]:
    record = CompileRecord()
    compile_entry(graph, record, {})
    return tune_groups(graph, {}, record, Workshop(builder or InterpretedBuilder(), None, stopwatch, stopwatch.now))


def one(graph: PlannedGraph, stopwatch: Scripted, builder: InterpretedBuilder | None = None) -> Outcome:
    (outcome,) = tuned(graph, stopwatch, builder).values()
    return outcome


def test_the_fastest_is_taken(chip: str) -> None:
    stopwatch = Scripted([50, 60, 30, 70, 40, 30, 50], chip)
    outcome = one(planned(scaled, torch.randn(LARGE)), stopwatch)
    assert outcome.changes == ("warps / 2",)
    assert [t.time_us for t in outcome.trials] == [50, 60, 30, 70, 40]
    assert [t.chosen for t in outcome.trials] == [False, False, True, False, False]
    assert outcome.summary == "30 us with warps / 2; 50 us as the rules say"
    assert stopwatch.asked == 7  # the rules' own, four others, and the best two again


@pytest.mark.parametrize("script", [[50, 49.5], [50, 50, 40, 50, 50, 60, 40], [50, 51]])
def test_the_rules_stay_where_no_other_is_clearly_faster(script: list[float], chip: str) -> None:
    """Also where one was, once."""
    outcome = one(planned(scaled, torch.randn(LARGE)), Scripted(script, chip))
    assert not outcome.changes and [t.chosen for t in outcome.trials] == [True, *[False] * 4]
    assert "none is better" in outcome.summary


@pytest.mark.parametrize("tune", ["quick", "max"])
def test_kernels_that_draw(tune: str, chip: str) -> None:
    """Instructions bound them, whatever the layout: only who asks for everything has them measured."""
    graph = planned(lambda x: torch.nn.functional.dropout(x, 0.5), torch.randn(LARGE), tune=tune)
    stopwatch = Scripted([1e3], chip)
    outcome = one(graph, stopwatch)
    assert bool(stopwatch.asked) == (tune == "max")
    assert ("random numbers" in outcome.summary) == (tune == "quick")


@pytest.mark.parametrize("tune", ["quick", "max"])
def test_what_is_at_its_floor_is_left_alone(tune: str, chip: str) -> None:
    graph = planned(scaled, torch.randn(LARGE), tune=tune)
    record = CompileRecord()
    compile_entry(graph, record, {})
    near, floor_us = EFFORTS[tune].near_floor, record.kernels[0].predicted_us
    stopwatch = Scripted([floor_us * (near - 0.01)], chip)
    outcome = one(graph, stopwatch)
    assert stopwatch.asked == 1 and not outcome.changes and "of its floor" in outcome.summary
    above = Scripted([floor_us * (near + 0.01)], chip + " that is slower")
    one(graph, above)
    assert above.asked > 1


def test_what_is_mostly_launching_is_not_measured(chip: str) -> None:
    stopwatch = Scripted([1.0], chip)
    outcome = one(planned(scaled, torch.randn(64, 64)), stopwatch)
    assert stopwatch.asked == 0 and "mostly launching" in outcome.summary


def test_what_cannot_be_measured_stays(chip: str) -> None:
    """Until the next graph asks."""
    stopwatch = Scripted(["no memory", 50], chip)
    graph = planned(scaled, torch.randn(LARGE))
    assert one(graph, stopwatch) == Outcome((), "not measured: no memory")
    assert one(graph, stopwatch).trials


def test_alternatives_that_fail_are_passed_over(chip: str) -> None:
    """One that cannot be built, one that cannot be launched."""
    graph = planned(scaled, torch.randn(LARGE))
    warps = compile_entry(graph, CompileRecord(), {})[0].kernels[0].warps
    outcome = one(graph, Scripted([50, "out of shared memory", 40, 45, 40, 50], chip), Spilling(failing=[2 * warps]))
    assert outcome.trials[1].problem.startswith("not built: ")
    assert outcome.trials[2].problem == "out of shared memory"
    assert outcome.changes == ("block x 2",)


@pytest.mark.parametrize("ruled_spills", [False, True])
def test_nothing_that_spills_is_chosen_where_something_does_not(ruled_spills: bool, chip: str) -> None:
    graph = planned(scaled, torch.randn(LARGE))
    warps = compile_entry(graph, CompileRecord(), {})[0].kernels[0].warps
    if ruled_spills:  # and so do all but the slowest
        outcome = one(graph, Scripted([50, 90, 20], chip), Spilling(spilling=[warps, warps // 2]))
        assert outcome.changes == ("warps x 2",)
    else:
        outcome = one(graph, Scripted([50, 20, 45, 50, 50, 45, 50], chip), Spilling(spilling=[2 * warps]))
        assert outcome.trials[1].spilled_bytes == 64 and outcome.changes == ("warps / 2",)


def test_the_budget_is_kept(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = planned(scaled, torch.randn(LARGE))
    monkeypatch.setattr(tuning, "processors", lambda: 1)  # one is built at a time
    outcome = one(graph, Scripted([50], chip, seconds=0.4))
    assert len(outcome.trials) == 1 + 3  # after 1.2 s a second is over
    graphs_end = Scripted([50], chip + " slow", seconds=9.0)
    assert one(graph, graphs_end).summary.endswith("no other was tried") and graphs_end.asked == 1


def test_max_walks_on_while_it_gains(chip: str) -> None:
    graph = planned(lambda x: x.softmax(-1), torch.randn(64, 100_000), tune="max")
    outcome = one(graph, Falling((), chip))
    others = len(outcome.trials) - 1
    assert EFFORTS["quick"].alternatives < others <= EFFORTS["max"].alternatives
    assert outcome.trials[-1].chosen and len({t.change for t in outcome.trials}) == others + 1


def test_kernels_that_are_the_same_are_measured_once(chip: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y * 2

    stopwatch = Scripted([50], chip)
    graph = planned(function, torch.randn(LARGE), torch.randn(LARGE), fuse=False)
    outcomes = tuned(graph, stopwatch)
    first, second = outcomes.values()
    asked = stopwatch.asked
    assert first == second and asked == len(first.trials) > 1
    assert tuned(graph, stopwatch) == outcomes and stopwatch.asked == asked  # nor in another graph
    other = Scripted([50], chip + " of another kind")
    assert tuned(graph, other) == outcomes and other.asked > 0


def test_slow_candidates_are_dropped(chip: str) -> None:
    """After the first launch that takes 1.3 times the best so far."""
    stopwatch = Scripted([50, 60, 30, 70, 40, 30, 50], chip)
    one(planned(scaled, torch.randn(LARGE)), stopwatch)
    assert stopwatch.worst[0] == math.inf and stopwatch.worst[-2:] == [math.inf, math.inf]  # the best two again
    assert stopwatch.worst[1] == pytest.approx(1.3 * 50) and stopwatch.worst[4] == pytest.approx(1.3 * 30)


class ByShape(Scripted):
    """A time for every shape of the first tensor; keeps whose turn it was."""

    def __init__(self, chip: str, times: dict[str, float], seconds: float) -> None:
        super().__init__((), chip, seconds=seconds)
        self.times, self.turns = times, list[str]()

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        self.turns.append(trial.stand_ins[0].shape[0])
        self.clock += self.seconds
        return Timing(self.times[self.turns[-1]])


def test_seconds_go_where_most_is_gained(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time above the price, times the kernels that are equal."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.relu(), y.relu(), z.relu()

    monkeypatch.setattr(tuning, "processors", lambda: 1)
    monkeypatch.setitem(tuning.EFFORTS, "quick", replace(tuning.EFFORTS["quick"], graph_seconds=8.0))
    inputs = [torch.randn(n, 1024) for n in (4096, 5000, 5000)]
    stopwatch = ByShape(chip, {"4096": 100.0, "5000": 90.0}, 1.1)
    outcomes = list(tuned(planned(function, *inputs, fuse=False), stopwatch).values())
    assert stopwatch.turns == ["4096", "5000", "5000", "4096"]  # each once, then one other for a second
    assert [len(o.trials) for o in outcomes] == [2, 2, 2] and outcomes[1] == outcomes[2]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ k.mT).tanh() * 0.2, -1) @ v


def test_products_are_tuned(chip: str) -> None:
    with FakeTensorMode():
        inputs = [torch.empty(4, 16, 1024, 64, dtype=torch.float16) for _ in range(3)]
        graph = planned(attention, *inputs, target="sm_90", tune="max")
    assert [g.products for g in graph.names.values()] == [True]
    outcome = one(graph, Falling((), chip))
    tried = {t.change for t in outcome.trials}
    assert {"warps x 2", "lanes / 2", "block x 2", "block / 2", "stages +1", "stages -1"} <= tried
    assert outcome.trials[-1].chosen and outcome.changes


def test_a_split_is_measured_whole(chip: str) -> None:
    graph = planned(lambda x: (x * x).sum(), torch.randn(8192, 4096))
    record = CompileRecord()
    compile_entry(graph, record, {})
    assert len(record.kernels) == 2
    outcome = one(graph, Scripted([900, 900, 900, 900, 400, 400, 900], chip))
    assert outcome.changes


DYNAMIC: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "an index that is computed": (
        lambda x, i: x[i * 2 - 100] * 2, (torch.randn(5000, 1024), torch.full((4096,), 70)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DYNAMIC)
def test_what_reads_by_computed_indices_is_not_measured(name: str, chip: str) -> None:
    function, inputs = DYNAMIC[name]
    stopwatch = Scripted([50], chip)
    outcome = one(planned(function, *inputs), stopwatch)
    assert stopwatch.asked == 0 and "depends on values" in outcome.summary


def test_indices_that_are_read_may_be_zero(chip: str) -> None:
    table, rows = torch.randn(5000, 1024), torch.full((4096,), 70)
    stopwatch = Scripted([50], chip)
    one(planned(lambda x, i: x[i] * 2, table, rows), stopwatch)
    assert stopwatch.asked > 0


def test_the_report_says_what_was_tried(chip: str) -> None:
    graph = planned(scaled, torch.randn(LARGE))
    record = CompileRecord()
    compile_entry(graph, record, {})
    outcome = one(graph, Scripted([50, 60, "out of shared memory", 30, 40, 30, 50], chip))
    record.kernels[0].tuning, record.kernels[0].trials = outcome.summary, list(outcome.trials)
    explanation = Explanation([record])
    for expected in (
        "    tuning    30 us with block x 2; 50 us as the rules say",
        "      warps x 2: 60 us\n",
        "      warps / 2: out of shared memory\n",
        "      block x 2: 30 us, chosen\n",
    ):
        assert expected in str(explanation)
    assert "<li>block x 2: 30 us, chosen</li>" in explanation.to_html()
    assert CompileRecord.from_json(record.to_json()) == record
