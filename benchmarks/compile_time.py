"""Compile time of one system in this fresh process: `python -m benchmarks.compile_time onepass`.

Prints JSON: per workload the first call less a later one, and which programs were started meanwhile.
The parent gives it empty or filled cache folders.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STARTED: list[str] = []
_EVENTS = {"subprocess.Popen": 0, "os.posix_spawn": 0, "os.exec": 0, "os.system": 0}


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        STARTED.append(Path(os.fsdecode(arguments[_EVENTS[event]] or arguments[1][0])).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    import_start = time.perf_counter()
    import torch

    from .cpu import select
    from .systems import compiled
    from .workloads import Prepared

    compiled(arguments.system, torch.relu)
    import_seconds = time.perf_counter() - import_start
    sys.addaudithook(_watch)
    seconds: dict[str, float] = {}
    for workload in select(arguments.only):
        prepared = Prepared(workload, arguments.scale)
        start = time.perf_counter()
        function = compiled(arguments.system, workload.function)
        prepared.call(function)
        first = time.perf_counter() - start
        start = time.perf_counter()
        prepared.call(function)
        seconds[workload.name] = first - (time.perf_counter() - start)
    print(json.dumps({"import_seconds": import_seconds, "seconds": seconds, "started": STARTED}))


if __name__ == "__main__":
    main()
