"""Small hand-written kernels and programs, so that the runtime is tested without the compiler above it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from onepass.ir.source import Allocate, HostProgram, KernelSource, Launch, Ref

ROOT = Path(__file__).resolve().parents[2]

# out[i] = x[i] * factor, over threads; the status has the bits of `status` where an element is negative.
_TEXT = """
#include <stdint.h>
int {entry}(float *restrict out, const float *restrict x, int64_t n, int64_t threads) {{
    int status = 0;
    #pragma omp parallel for num_threads(threads) reduction(|:status)
    for (int64_t i = 0; i < n; i++) {{
        out[i] = x[i] * {factor}f;
        status |= x[i] < 0 ? {status} : 0;
    }}
    return status;
}}
"""


def scale_kernel(factor: float = 2.0, status: int = 0, entry: str = "scale") -> KernelSource:
    """out = x * factor over n elements; a negative element gives `status`."""
    text = _TEXT.format(entry=entry, factor=float(factor), status=status)
    return KernelSource(f"scale_{factor}", "c", text, entry, f"{entry}-{factor}-{status}", 2, 1, bool(status))


def scale_program(kernels: int = 1, size: str = "s0") -> HostProgram:
    """The kernels one after the other on a vector: inputs (vector, its length)."""
    instructions = []
    previous = "a0"
    for number in range(kernels):
        instructions += [
            Allocate(f"b{number}", (size,), ("1",), "float32", "cpu"),
            Launch(number, (f"b{number}", previous), (size,)),
        ]
        previous = f"b{number}"
    return HostProgram(("a0", "s0"), tuple(instructions), (Ref(previous),))


def logging_compiler(folder: Path) -> tuple[str, Path]:
    """A compiler for CC that notes each start in a file before it compiles; and that file."""
    log, script = folder / "compiler.log", folder / "logging-cc"
    script.write_text(f'#!/bin/sh\necho started >> "{log}"\nexec cc "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    log.touch()
    return str(script), log


def start_python(code: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    """A Python process that sees the package and the tests."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **environment}
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_python(code: str, *args: str, **environment: str) -> str:
    """What such a process prints; it must end well."""
    process = start_python(code, *args, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out
