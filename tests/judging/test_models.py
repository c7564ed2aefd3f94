"""Whole models, with every question asked and every answer given: what is measured changes times, never values."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from onepass import judging, tuning
from onepass.backend import record_compilations
from onepass.ir.record import CompileRecord
from onepass.ir.source import Trial
from onepass.planner import close_calls
from onepass.runtime.kernels import LoadedKernel
from onepass.runtime.stopwatch import Timing
from tests.judging.models import MODELS
from tests.judging.racing import Running, Scripted

FIRST, SECOND = (40.0, 50.0), (50.0, 40.0)
VERDICTS = {"first": [FIRST], "second": [SECOND], "in turns": [FIRST, SECOND] * 1000, "unknown": ["out of memory"]}


@pytest.fixture(autouse=True)
def everything_is_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """Every question is asked, as many are foreseen as on a large machine, and what goes wrong is seen."""
    problems: list[BaseException] = []
    monkeypatch.setattr(close_calls, "CLOSE", 1e9)
    monkeypatch.setattr(close_calls, "SMALLEST_US", 0.0)
    monkeypatch.setattr(tuning, "SMALLEST_US", 0.0)
    monkeypatch.setattr(judging, "_known", {})
    monkeypatch.setattr(tuning, "_decided", {})
    monkeypatch.setattr(judging, "FAR", 1e9)
    monkeypatch.setattr(judging, "MANY", 1)
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))
    for part in ("_planned", "_measured"):
        monkeypatch.setattr(judging.Judge, part, watched(getattr(judging.Judge, part), problems))
    yield problems
    assert not problems


def watched(function: Callable[..., Any], problems: list[BaseException]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as problem:
            problems.append(problem)
            raise

    return call


@dataclass
class Timed(Scripted):
    """Gives every kernel the same time: a second, where the rules' versions are slow."""

    us: float = 1e6
    timed: list[Trial] = field(default_factory=list)

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        assert len(kernels) == len(trial.launches)
        self.timed.append(trial)
        return Timing(self.us)


def trained(name: str, stopwatch: Scripted, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[CompileRecord]:
    """The records of a model compiled for training; its loss and its gradients are eager's."""
    torch.manual_seed(1)
    make, example = MODELS[name]
    model, x = make(), example()
    ours, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    monkeypatch.setattr("onepass.compilation.stopwatch_for", lambda *_: stopwatch)
    options = {"target": "triton-interpret", "strict": True, **settings}
    torch._dynamo.reset()
    with record_compilations() as records:
        loss = torch.compile(ours, backend="onepass", options=options, fullgraph=True)(x)
        loss.backward()
    exact = wide(x.double() if x.is_floating_point() else x)
    exact.backward()
    assert {r.direction for r in records} == {"forward", "backward"} and not any(r.fallback for r in records)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=1e-4)
    for (what, mine), other in zip(ours.named_parameters(), wide.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(
            mine.grad.double(), other.grad, rtol=1e-3, atol=1e-4, msg=lambda m, w=what: f"{w}: {m}"
        )
    return records


@pytest.mark.rotating
@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right_whatever_is_measured(name: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = Scripted(f"{name} {verdict}", VERDICTS[verdict])
    records = trained(name, stopwatch, monkeypatch)
    reasons = [d.reason for r in records for d in r.decisions]
    assert stopwatch.races and any(r.startswith("measured ") for r in reasons) == (verdict != "unknown")
    assert not any("Error" in reason for reason in reasons)


@pytest.mark.rotating
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_of_every_question_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, without backward: as models are served."""
    torch.manual_seed(1)
    make, example = MODELS[name]
    model, x = make().bfloat16().eval(), example()
    x = x.bfloat16() if x.is_floating_point() else x
    stopwatch = Running(f"running {name}", VERDICTS["in turns"])
    monkeypatch.setattr("onepass.compilation.stopwatch_for", lambda *_: stopwatch)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="onepass", options={"target": "triton-interpret", "strict": True})(x)
        torch.testing.assert_close(
            found.double(),
            copy.deepcopy(model).double()(x.double() if x.is_floating_point() else x),
            rtol=0.02,
            atol=0.02,
        )
    compared = 0
    for (together, apart), taken in zip(stopwatch.values, stopwatch.taken, strict=True):
        first, second = (sorted(str(t.shape) for t in inputs) for inputs in taken)
        if first == second:  # one way may compute again what the other reads
            compared += 1
            for mine, others in zip(together, apart, strict=True):
                largest = float(others.double().nan_to_num(0, 0, 0).abs().max())  # of a root of a stand-in, say
                torch.testing.assert_close(mine, others, rtol=0.02, atol=0.02 * largest, equal_nan=True)
    assert compared


@pytest.mark.rotating
@pytest.mark.parametrize("verdict", ["first", "second"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right_where_every_kernel_is_slow(name: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours of every schedule are tried, and slow kernels are compared with their parts."""
    stopwatch = Timed(f"slow {name} {verdict}", VERDICTS[verdict])
    records = trained(name, stopwatch, monkeypatch, tune="max")
    assert any(d.kind == "parts" for r in records for d in r.decisions)
    assert any(len(k.trials) > 1 for r in records for k in r.kernels)
    assert not any("Error" in d.reason for r in records for d in r.decisions)
    assert not any(t.problem for r in records for k in r.kernels for t in k.trials)
