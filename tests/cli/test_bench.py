"""The benchmark harness: it runs, checks what it measures, and reports what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.report import geometric_mean, markdown
from benchmarks.workloads import WORKLOADS, Prepared, check_values

from onepass.cli import main


def test_a_quick_run_writes_checked_numbers(tmp_path: Path) -> None:
    numbers, tables = tmp_path / "cpu.json", tmp_path / "cpu.md"
    arguments = ["--quick", "--no-compile-time", "--systems", "eager,onepass", "--only", "log-softmax"]
    assert main(["bench", *arguments, "--json", str(numbers), "--markdown", str(tables)]) == 0
    data = json.loads(numbers.read_text())
    (workload,) = data["workloads"].values()
    assert set(workload["seconds"]) == {"eager", "onepass"} and not workload["problems"]
    assert data["facts"]["torch"] == torch.__version__
    assert "| log-softmax |" in tables.read_text() and "QUICK RUN" in tables.read_text()


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_eager_passes_the_check_and_a_wrong_value_does_not(workload: Any) -> None:
    prepared = Prepared(workload, 1 / 256)
    eager = prepared.call(workload.function)
    other = prepared.call(workload.function)
    assert check_values(prepared, other, eager) == ""
    wrong = (other[0] * 1.1 + 0.01, *other[1:])
    assert check_values(prepared, wrong, eager) != ""


def test_every_workload_has_an_input_of_64_mib() -> None:
    for workload in WORKLOADS:
        largest = max(a.nbytes for a in workload.build(1.0))
        assert largest >= 64 << 20, workload.name
    assert len(WORKLOADS) >= 12


def _result() -> dict[str, Any]:
    def workload(inductor: float, ours: float) -> dict[str, Any]:
        return {
            "seconds": {"eager": 0.2, "inductor": inductor, "onepass": ours},
            "problems": {},
            "minimum_bytes": 10**8,
        }

    def process(*seconds: float, started: int = 0) -> dict[str, Any]:
        return {"seconds": dict(zip("ab", seconds, strict=True)), "started": ["cc"] * started, "import_seconds": 1.0}

    facts = dict.fromkeys(
        ("date", "processor", "cores", "threads", "memory_gib", "system", "python", "torch", "compiler", "onepass"), "x"
    )
    return {
        "facts": {**facts, "environment": {}, "huge_pages": "never"},
        "rounds": 9,
        "scale": 1.0,
        "copy_bytes_per_second": 1e10,
        "workloads": {"one": workload(0.04, 0.02), "two": workload(0.01, 0.02)},
        "compile": {
            "aot_eager": {"cold": process(0.2, 0.2), "warm": process(0.2, 0.2)},
            "inductor": {"cold": process(10, 4, started=9), "warm": process(1, 1)},
            "onepass": {"cold": process(1, 2, started=3), "warm": process(0.5, 0.4)},
        },
    }


def test_the_report_compares() -> None:
    text = markdown(_result())
    assert "| one | 200.0 | 40.0 | 20.0 | 2.00 | 2.00 | 10.00 |" in text
    assert "onepass over inductor: geometric mean **1.00** over 2 workloads, lowest 0.50 (two)" in text
    assert "first workload 0.10 of Inductor's time, the others 0.50" in text
    assert "+0.50 s over aot_eager for all workloads (+0.30 s for the first); no program was started" in text


def test_the_report_does_not_hide_problems() -> None:
    result = _result()
    result["workloads"]["one"]["problems"] = {"onepass": "error 3"}
    del result["workloads"]["one"]["seconds"]["onepass"]
    result["compile"]["onepass"]["warm"] = {"problem": "it crashed"}
    text = markdown(result)
    assert "**one, onepass: error 3**" in text and "failed" in text
    assert "**onepass, warm: it crashed**" in text
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
