"""Time inside kernels beside a count by hand: machine code of an absent GPU, times of small sizes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.issue import CASES, Found, dearest, exposed_agrees, issue_agrees, main

from onepass.profiling.issue import MEMORY, POSITIONS


def test_one_kernel_from_machine_code_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    status = main(["--only", "softmax", "--part", "0.004", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    if "could not be read" in text:
        pytest.skip("no disassembler")
    (kernel,) = json.loads((tmp_path / "cpu-issue.json").read_text())["kernels"]
    assert status == 0 and (tmp_path / "cpu-issue.md").read_text().startswith("# Time inside six kernels")
    assert "| softmax | exp, memory, max | exp, " in text and issue_agrees(Found(**kernel))
    slower = {name for name, reason in kernel["refused"].items() if "slower" in reason}  # small ones, by noise
    assert {"exp", "max", "sum", "div"} <= {*kernel["removed_us"]} & {*kernel["exposed_us"], *slower}


def test_what_agrees() -> None:
    counts = {"exp": 9.0, "sum": 4.0, MEMORY: 4.0, "max": 3.5, "sub": 1.0}
    found = Found("", "", {POSITIONS: 0.5, "exp": 0.2, "max": 0.15, "sum": 0.1, "sub": 0.05}, counts, time_us=100.0)
    assert dearest(found.issue) == ["exp", "max", "sum"] and issue_agrees(found)
    found.issue = {"exp": 0.5, "sub": 0.3, "sum": 0.2}
    assert not issue_agrees(found) and not issue_agrees(Found("", "", {}, counts))
    found.exposed_us, found.spread_us, found.removed_us = (
        {"exp": 40.0, "log": 9.0},
        {"exp": 2.0, "log": 0.0},
        {"exp": 45.0},
    )
    assert exposed_agrees(found)
    found.removed_us = {"exp": 55.0}
    assert not exposed_agrees(found)


def test_six_kernels() -> None:
    assert len(CASES) == 6 and all(len(c.counts) >= 3 for c in CASES)
