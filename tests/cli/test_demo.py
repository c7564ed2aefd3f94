"""The demo's own checks: right values pass, wrong ones are found."""

from __future__ import annotations

import pytest
import torch

from onepass.demo.run import _problem, run_demo, run_workload
from onepass.demo.workloads import WORKLOADS, Program, Workload


def _small(dtype: torch.dtype) -> Program:
    x = torch.randn(64, 64).to(dtype).requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).square().sum()

    def run(f: object) -> list[torch.Tensor]:
        assert callable(f)
        value = f(x)
        return [value.detach(), *torch.autograd.grad(value, [x])]

    return Program(loss, run)


def test_a_workload_is_checked_and_explained() -> None:
    row = run_workload(Workload("small", _small))
    assert row.problem == ""
    assert [graph.direction for graph in row.explanation.graphs] == ["forward", "backward"]
    assert row.eager_operations >= 4 and row.eager_ms > 0 and row.onepass_ms > 0


def test_a_wrong_value_is_found() -> None:
    exact = torch.randn(100, dtype=torch.float64)
    eager = exact.float()
    assert _problem(WORKLOADS[1], [eager], [eager], [exact]) == ""
    wrong = eager.clone()
    wrong[3] += 0.01
    assert "from float64" in _problem(WORKLOADS[1], [wrong], [eager], [exact])
    wrong[3] = float("nan")
    assert "nan" in _problem(WORKLOADS[1], [wrong], [eager], [exact])


def test_wrong_dropout_is_found() -> None:
    workload = WORKLOADS[0]
    kept = torch.randn(100_000, dtype=torch.float64)
    mask = torch.rand(100_000) >= workload.dropped
    right = torch.where(mask, kept, 0.0).float()
    assert _problem(workload, [right], [], [kept]) == ""
    assert "dropped" in _problem(workload, [kept.float()], [], [kept])
    assert "kept element" in _problem(workload, [right * 1.01], [], [kept])


def test_the_exit_status_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("onepass.demo.run.WORKLOADS", (Workload("small", _small),))
    assert run_demo(shown.append) == 0
    assert any("all 1 workloads agree" in line for line in shown)
    monkeypatch.setattr("onepass.demo.run._problem", lambda *_: "made wrong on purpose")
    assert run_demo(shown.append) == 1
    assert any("WRONG  small: made wrong on purpose" in line for line in shown)
