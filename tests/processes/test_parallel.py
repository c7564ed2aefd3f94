"""Programs over several processes: tensor-parallel, in stages, a compiled backward; one process compiles for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checking import DEVICE

SCRIPT = Path(__file__).parent / "parallel.py"
pytestmark = [pytest.mark.rotating, pytest.mark.skipif(DEVICE != "cpu", reason="processes share no GPU")]


def launched(*arguments: str, processes: int = 2, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, str(SCRIPT), *arguments]
    own = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=own)


def found(*arguments: str, processes: int = 2, **environment: str) -> dict[str, Any]:
    done = launched(*arguments, processes=processes, **environment)
    # With compiled autograd a process may abort when Python ends, its results printed (docs/guide/distributed.md).
    aborted = arguments == ("autograd",) and "terminate called without an active exception" in done.stderr
    assert done.returncode == 0 or (aborted and done.stdout), done.stderr[-3000:]
    data: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert data["compiled"] == pytest.approx(data["eager"], rel=1e-4)
    for rank in data["ranks"]:
        assert not rank["fallbacks"] and rank["kernels"] > 3
    return data


def test_tensor_parallel(tmp_path: Path) -> None:
    """Exchanges run in program order on every rank, started early and waited for late; one process compiles."""
    data = found("tensor", ONEPASS_CACHE_DIR=str(tmp_path))
    first, second = (rank["calls"] for rank in data["ranks"])
    assert first == second
    forward, backward = first[0], first[-1]
    assert forward.count("all_reduce") == forward.count("wait_tensor") == 2
    start, wait = backward.index("all_reduce"), backward.index("wait_tensor")
    assert "mm" in backward[start:wait], backward  # a product of a weight's gradient runs meanwhile
    for ways in zip(*(rank["hits"] for rank in data["ranks"]), strict=True):
        assert sorted(ways) == ["hit", "miss"]
    again = found("tensor", ONEPASS_CACHE_DIR=str(tmp_path))
    assert all(rank["hits"] == ["hit", "hit"] for rank in again["ranks"])


@pytest.mark.parametrize(("program", "processes"), [("pipeline", 2), ("autograd", 2), ("tensor", 4), ("pipeline", 3)])
def test_losses_are_those_of_eager(program: str, processes: int, tmp_path: Path) -> None:
    found(program, processes=processes, ONEPASS_CACHE_DIR=str(tmp_path))


def test_a_process_that_dies_inside_an_exchange_ends_the_others() -> None:
    done = launched("tensor", "dies")
    assert done.returncode != 0 and "exitcode" in done.stderr
