"""Compile time of one system in this fresh process: `python -m benchmarks.compile_time onepass`.

Prints JSON: per workload the first call less a later one, and which programs were started meanwhile.
The parent gives it empty or filled cache folders.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED: list[str] = []
_EVENTS = {"subprocess.Popen": 0, "os.posix_spawn": 0, "os.exec": 0, "os.system": 0}
_LIMIT_SECONDS = 1800


def compile_times(system: str, device: str, only: str, scale: float) -> dict[str, Any]:
    """First-call times with empty caches, then with filled ones, each in a fresh process."""
    from .systems import cache_variables

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **cache_variables(folder, system)}
        return {state: _child(system, device, only, scale, environment) for state in ("cold", "warm")}


def _child(system: str, device: str, only: str, scale: float, environment: dict[str, str]) -> dict[str, Any]:
    arguments = [system, f"--device={device}", f"--scale={scale}", f"--only={only}"]
    return in_fresh_process(f"{__package__}.compile_time", arguments, environment, _LIMIT_SECONDS)


def in_fresh_process(
    module: str, arguments: list[str], environment: dict[str, str], limit_seconds: float
) -> dict[str, Any]:
    """The JSON that `python -m module` prints last, or its problem."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return {"problem": f"not finished after {limit_seconds:.0f} s"}
    if result.returncode:
        return {"problem": (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]}
    loaded: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return loaded


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        STARTED.append(Path(os.fsdecode(arguments[_EVENTS[event]] or arguments[1][0])).name)


def _first_less_later(system: str, prepared: Any, device: str) -> float:
    import torch

    from .systems import runner

    elapsed = []
    start = time.perf_counter()
    ready = runner(system, prepared)
    for _ in range(2):
        ready.call()
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed.append(time.perf_counter() - start)
        start = time.perf_counter()
    return elapsed[0] - elapsed[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    import_start = time.perf_counter()
    import torch

    from .sets import select
    from .systems import compiled, first_line, skipped
    from .workloads import Prepared

    if arguments.system != "xla":
        compiled(arguments.system, torch.relu)
    torch.zeros(1, device=arguments.device)
    import_seconds = time.perf_counter() - import_start
    sys.addaudithook(_watch)
    seconds: dict[str, float] = {}
    problems: dict[str, str] = {}
    for workload in select(arguments.device, arguments.only):
        if skipped(arguments.system, workload):
            continue
        prepared = Prepared(workload, arguments.scale, arguments.device)
        try:
            seconds[workload.name] = _first_less_later(arguments.system, prepared, arguments.device)
        except Exception as error:
            problems[workload.name] = first_line(error)
    found = {"import_seconds": import_seconds, "seconds": seconds, "problems": problems, "started": STARTED}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
