"""Tensors without memory can be explained, again and again, and the process ends as it should."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch, onepass
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    x = torch.empty(3, 1 << 20, dtype=torch.bfloat16)
    for _ in range(2):
        print(len(onepass.explain(lambda x: x.sum(-1), x, options={"cache": False}).kernels))
"""


def test_twice_in_one_process() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.split()
    assert first == second != "0"
