"""The systems compared, and the environment that is the same for all of them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

SYSTEMS = ("eager", "inductor", "onepass", "aot_eager")

# Freed pages go back to the process, not to the kernel: otherwise page faults of fresh outputs
# dominate every system alike.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(256 << 20)}
# One thread per core for every system: left to itself the kernel may wake both threads on one core and
# part them only at its next tick, so that every time is a multiple of 4 ms.
THREADS = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
ENVIRONMENT = {**MALLOC, **THREADS}


def compiled(system: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as that system runs it."""
    if system == "eager":
        return function
    options = None
    if system == "onepass":
        import onepass  # noqa: F401  (registers the backend when run from the source folder)

        options = {"strict": True}  # a graph that quietly ran as eager would be no measurement
    result: Callable[..., Any] = torch.compile(function, backend=system, options=options)
    return result


def same_environment(module: str) -> None:
    """Start `python -m module` again with the settings above, unless they are there already."""
    if all(os.environ.get(name) == value for name, value in ENVIRONMENT.items()):
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **ENVIRONMENT})


def facts() -> dict[str, Any]:
    """Hardware, versions and date, for the result files."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "huge_pages": _first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": _output_line(os.environ.get("CC", "cc"), "--version"),
        "onepass": _output_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "environment": ENVIRONMENT,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _first_line(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return "unknown"


def _output_line(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.splitlines()[0] if result.stdout else "unknown"
