"""Processes that compile side by side and take turns where something is measured, by a lock on a file.

`python -m benchmarks.turns training "causal" --systems onepass --lock FILE` measures one workload; prints JSON last.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

MEASURING = ("inductor-max", "xla", "onepass")  # systems that measure while they compile
_LIMIT_SECONDS = 1200.0


@contextmanager
def turn(lock: str) -> Iterator[None]:
    """Alone among the processes that share the lock; without one, at once."""
    with open(lock or os.devnull, "w") as file:
        if lock:
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if lock:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked compiler may hold the file, too


def apart(
    name: str, workloads: list[str], at_once: int, lock: str, systems: list[str], *settings: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of the set `name`, each measured in a fresh process, as they are ready. `settings`: scale, rounds, device,
    folder of the caches."""
    from .compile_time import in_fresh_process
    from .measure import nothing_measured

    environment = {**os.environ, "KINETO_LOG_LEVEL": "99"}
    flags = ("scale", "rounds", "device", "caches", "lock")
    with ThreadPoolExecutor(at_once) as pool, tempfile.NamedTemporaryFile() as own:
        given = [f"--systems={','.join(systems)}"]
        given += [f"--{flag}={value}" for flag, value in zip(flags, (*settings, lock or own.name), strict=True)]
        run = lambda w: in_fresh_process(f"{__package__}.turns", [name, w, *given], environment, _LIMIT_SECONDS)  # noqa: E731
        waiting = {pool.submit(run, workload): workload for workload in workloads}
        for ended in as_completed(waiting):
            found = ended.result()
            problem = {"problems": {"the workload": found.get("problem")}}
            yield waiting[ended], nothing_measured() | problem if "problem" in found else found


def main() -> None:
    import torch

    from .measure import measure
    from .sets import SETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set")
    parser.add_argument("workload")
    parser.add_argument("--systems", required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--caches", default="")
    parser.add_argument("--lock", default="")
    a = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    chosen = next(w for w in SETS[a.set].workloads[a.device] if w.name == a.workload)
    print(json.dumps(measure(chosen, a.systems.split(","), a.scale, a.rounds, a.device, a.caches, a.lock)))


if __name__ == "__main__":
    main()
