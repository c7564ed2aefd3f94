"""Long runs: a crash or a hang costs one job; interrupted runs go on where they stopped."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.fuzz import __main__ as fuzz
from tests.workers import Failure, run_jobs


def work(job: str) -> str:
    """A job that may go wrong in every way."""
    if job == "raise":
        raise ValueError("no")
    if job == "die":
        os._exit(7)
    if job == "hang":
        time.sleep(60)
    return job.upper()


def test_faults_cost_one_job() -> None:
    jobs = ["a", "die", "b", "raise", "hang", "c"]
    results = dict(run_jobs(lambda: jobs.pop(0) if jobs else None, "tests.test_workers:work", 2, job_seconds=5))
    assert {k: v for k, v in results.items() if not isinstance(v, Failure)} == {"a": "A", "b": "B", "c": "C"}
    assert "exit code 7" in results["die"].why
    assert "ValueError: no" in results["raise"].why
    assert "time limit" in results["hang"].why


def test_batches_leave_out_what_is_done() -> None:
    assert fuzz._batches([]) == []
    assert fuzz._batches([*range(25), 30, 31]) == [(0, 20), (20, 5), (30, 2)]


def test_wrong_programs_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "RESULTS", tmp_path)
    log = tmp_path / "seed-0.jsonl"
    log.write_text(
        '{"start": 0, "count": 20, "wrong": []}\n{"start": 20, "count": 20, "wrong": [{"seed": 21, "message": ""}]}\n'
    )
    (tmp_path / "failure-21.py").write_text("")
    fuzz._forget_wrong(log)
    assert [line["start"] for line in fuzz._lines(log)] == [0]
    assert not list(tmp_path.glob("failure-*"))
