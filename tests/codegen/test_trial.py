"""Groups as launches of their own: they run on stand-ins, and stay inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.tuning.planned import planned, traced

from onepass.analysis.nest import Refusal
from onepass.codegen.trial import emit_trial
from onepass.ir.options import Options
from onepass.ir.record import CompileRecord
from onepass.ir.source import HostProgram, Trial
from onepass.ir.target import find_target
from onepass.pipeline import PlannedGraph, emit_kernels, lower, plan_graph, schedule_named
from onepass.runtime.builders import builder_for
from onepass.runtime.executable import Executable
from onepass.runtime.kernels import build_kernels
from onepass.runtime.stopwatch import stand_ins

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "rows": (lambda x: x.softmax(-1), (torch.zeros(20, 50, dtype=torch.float64),)),
    "split": (lambda x: (x * x).sum(), (torch.zeros(300, 1000),)),
    "an expanded view": (lambda x: (x * 2).sum(-1), (torch.zeros(40, 1).expand(40, 100),)),
    "a transposed one": (lambda x: x.exp(), (torch.zeros(30, 40).t(),)),
    "embedding": (lambda w, i: w[i] + 1, (torch.zeros(50, 16), torch.zeros(9, dtype=torch.int64))),
    "cross entropy": (F.cross_entropy, (torch.zeros(30, 70), torch.zeros(30, dtype=torch.int64))),
    "dropout": (lambda x: F.dropout(x, 0.25), (torch.zeros(40, 64, dtype=torch.bfloat16),)),
}


def trials(graph: PlannedGraph) -> list[tuple[Trial | Refusal, list[Any]]]:
    """Of every group: its trial, and its kernels as they are launched."""
    found = []
    for name in graph.names:
        scheduled = schedule_named(graph, name)
        sources, numbers = emit_kernels(graph, list(scheduled.kernels))
        found.append((emit_trial(scheduled), [sources[numbers[k]] for k in scheduled.kernels]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_trials_run(name: str) -> None:
    """Through the interpreter: every launch has its arguments, and every tensor is large enough."""
    function, inputs = CASES[name]
    graph = planned(function, *inputs)
    state = torch.get_rng_state()
    for trial, sources in trials(graph):
        assert isinstance(trial, Trial)
        tensors = stand_ins(trial.stand_ins, torch.device("cpu"))
        for tensor, wanted in zip(tensors, trial.stand_ins, strict=True):
            assert tensor.shape == tuple(map(int, wanted.shape)) and tensor.stride() == tuple(map(int, wanted.strides))
            assert tensor.dtype is getattr(torch, wanted.dtype)
            assert tensor.dtype.is_floating_point or not tensor.any()
        host = HostProgram(tuple(a.name for a in trial.stand_ins), trial.launches, ())
        Executable(host, build_kernels(sources, builder_for(graph.target))).call(tensors)
    assert torch.equal(torch.get_rng_state(), state)


REFUSED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "shifted": (lambda w, i: w[i - 5] + 1, (torch.zeros(50, 16), torch.full((9,), 7))),
    "checked only": (lambda x, i: x.scatter(1, i - 5, 1.0), (torch.zeros(9, 50), torch.full((9, 1), 7))),
    "from a float": (lambda w, i: w[i.long()] + 1, (torch.zeros(50, 16), torch.zeros(9))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_indices_that_may_leave_a_buffer_are_refused(name: str) -> None:
    function, inputs = REFUSED[name]
    found = [trial for trial, _ in trials(planned(function, *inputs))]
    assert any(isinstance(trial, Refusal) and "depends on values" in trial.reason for trial in found)


def test_sizes_known_at_run_time_are_those_seen_first() -> None:
    graph = traced(lambda x: x.exp() + 1, torch.zeros(37, 41), dynamic=True)
    planned_graph = plan_graph(
        lower(graph, find_target("triton-interpret"), Options.make({}), CompileRecord()), CompileRecord()
    )
    ((trial, _),) = trials(planned_graph)
    assert isinstance(trial, Trial)
    assert {"37", "41"} <= {size for a in trial.stand_ins for size in a.shape}
    assert all(size.isdigit() for launch in trial.launches for size in (*launch.symbols, launch.programs))
