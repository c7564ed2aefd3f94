"""Training over several processes: losses as eager's, and one that dies ends the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checking import DEVICE

TRAIN = Path(__file__).parent / "train.py"
pytestmark = [pytest.mark.rotating, pytest.mark.skipif(DEVICE != "cpu", reason="processes share no GPU")]


def launched(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, str(TRAIN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("processes", "how", "dtype", "batches"),
    [(2, "ddp", "float32", 1), (2, "fsdp", "float32", 2), (2, "ddp", "bfloat16", 2), (4, "fsdp", "bfloat16", 1)],
)
def test_losses_are_those_of_eager(processes: int, how: str, dtype: str, batches: int) -> None:
    done = launched(processes, how, dtype, str(batches))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["fallbacks"] and found["kernels"] > 4
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    assert found["compiled"] == pytest.approx(found["eager"], rel=tolerance)
    assert found["compiled"][-1] < found["compiled"][0]


def test_a_process_that_dies_ends_the_others() -> None:
    done = launched(2, "ddp", "float32", "1", "dies")
    assert done.returncode != 0
    assert "exitcode" in done.stderr
