"""`python -m tests.fuzz`: many random programs over several processes; resumable; results in tests/fuzz/results/.

Programs are seeds SEED, SEED + 1, ...; one line of JSON per batch says which were run and what was wrong.
A failing program is shrunk and written beside it as a file that runs on its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..checking import BACKEND
from ..workers import Failure, progress, run_jobs
from .check import failure, shrink
from .generate import generate

RESULTS = Path(__file__).parent / "results"
BATCH = 20
HANDLER = "tests.fuzz.__main__:check_batch"


def check_batch(job: tuple[int, int]) -> list[dict[str, Any]]:
    """Programs [start, start + count): those that are wrong, shrunk."""
    start, count = job
    wrong = []
    for seed in range(start, start + count):
        program = generate(seed)
        if failure(program):
            small, message = shrink(program)
            wrong.append({"seed": seed, "message": message, "repro": small.repro(message)})
    return wrong


def main() -> int:
    options = _arguments()
    os.environ["ONEPASS_STRICT"] = "1"
    os.environ.setdefault("ONEPASS_CACHE_DIR", tempfile.mkdtemp(prefix="onepass-fuzz-"))
    RESULTS.mkdir(exist_ok=True)
    log = RESULTS / f"seed-{options.seed}.jsonl"
    if options.fresh:
        log.unlink(missing_ok=True)
    _forget_wrong(log)
    done = {line["start"] + i for line in _lines(log) for i in range(line["count"])}
    last = options.seed + options.n
    jobs = _batches([seed for seed in range(options.seed, last) if seed not in done])
    print(
        f"backend {BACKEND}: programs {options.seed} to {last - 1}, {len(jobs)} batches to do, {len(done)} done before"
    )
    stop_at = time.monotonic() + 60 * options.minutes if options.minutes else None
    _run(jobs, log, options, stop_at)
    lines = _lines(log)
    count, wrong = sum(line["count"] for line in lines), [w for line in lines for w in line["wrong"]]
    print(f"{count} programs, {len(wrong)} wrong")
    return 1 if wrong else 0


def _run(jobs: list[tuple[int, int]], log: Path, options: argparse.Namespace, stop_at: float | None) -> None:
    finished = 0

    def next_job() -> Any:
        return jobs.pop(0) if jobs else None

    for (start, count), found in run_jobs(next_job, HANDLER, options.workers, options.seconds, stop_at):
        if isinstance(found, Failure) and count > 1:
            # Something crashed or hung: one by one, so that the others count and the culprit is known.
            jobs[:0] = [(seed, 1) for seed in range(start, start + count)]
            continue
        if isinstance(found, Failure):
            program = generate(start)
            found = [{"seed": start, "message": found.why, "repro": program.repro(found.why)}]
        for wrong in found:
            (RESULTS / f"failure-{wrong['seed']}.py").write_text(wrong["repro"])
            print(f"\nWRONG, program {wrong['seed']}: {wrong['message']}\n{wrong['repro']}")
        line = {"start": start, "count": count, "wrong": [{k: w[k] for k in ("seed", "message")} for w in found]}
        with log.open("a") as out:
            out.write(json.dumps(line) + "\n")
        finished += count
        progress(f"{finished} programs")


def _batches(seeds: list[int]) -> list[tuple[int, int]]:
    """(start, count) of runs of consecutive seeds, none longer than a batch."""
    found: list[tuple[int, int]] = []
    for seed in seeds:
        start, count = found[-1] if found else (seed, 0)
        if found and seed == start + count and count < BATCH:
            found[-1] = (start, count + 1)
        else:
            found.append((seed, 1))
    return found


def _forget_wrong(log: Path) -> None:
    """What was wrong is tried again: resuming after a fix must not repeat the old verdict."""
    lines = _lines(log)
    for wrong in (w for line in lines for w in line["wrong"]):
        (RESULTS / f"failure-{wrong['seed']}.py").unlink(missing_ok=True)
    if lines:
        log.write_text("".join(json.dumps(line) + "\n" for line in lines if not line["wrong"]))


def _lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("--n", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of one batch")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
