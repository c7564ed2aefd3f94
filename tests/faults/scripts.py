"""Programs in processes of their own, with an environment to suit the fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# What most scripts begin with: a program, its eager result, and the warnings it caused.
PRELUDE = """
import sys, warnings
import torch
import onepass

def function(x, w):
    return torch.nn.functional.gelu(x * w + 1).softmax(-1)

x, w = torch.randn(33, 65), torch.randn(65)

def check(**settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = torch.compile(function, backend="onepass", **settings)
        for _ in range(3):
            torch.testing.assert_close(run(x, w), function(x, w), rtol=1e-5, atol=1e-6)
    return [str(c.message) for c in caught if "onepass" in str(c.message) or "cache" in str(c.message)]
"""


def environment(cache: Path, **changes: str) -> dict[str, str]:
    """This process's environment with a cache of its own and without strictness."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ONEPASS_")}
    path = os.pathsep.join([str(ROOT / "src"), env.get("PYTHONPATH", "")])
    return {**env, "PYTHONPATH": path, "ONEPASS_CACHE_DIR": str(cache), **changes}


def start(body: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """A process group of its own, so that what hangs can be ended with all it started."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 180) -> str:
    """The output of a process that must end well."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err[-4000:]}"
    return out


def run(body: str, env: dict[str, str]) -> str:
    return finish(start(body, env))


def logging_compiler(folder: Path) -> tuple[Path, Path]:
    """A C compiler that notes each start in a file: (the program, the file)."""
    log, program = folder / "started", folder / "cc"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\nexec gcc "$@"\n')
    program.chmod(0o755)
    return program, log


def builds(log: Path) -> int:
    """How many kernels the compiler built (asking for its version builds nothing)."""
    return sum(".so" in line or "-shared" in line for line in log.read_text().splitlines()) if log.exists() else 0
