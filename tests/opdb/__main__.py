"""`python -m tests.opdb`: every sample of every operator, resumable; results in tests/opdb/results/.

One line of JSON per operator and type: how many samples were right, could not be judged (eager or
aot_eager fails on them) or were wrong, with the first message. Lines already there are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..checking import BACKEND, Mismatch, backend_callable
from ..workers import Failure, progress, run_jobs
from .cases import DTYPES, pairs, samples, short, skip_reason
from .check import Skipped, check_case

RESULTS = Path(__file__).parent / "results"
BATCH = 40  # samples in one job
COUNTS = ("right", "drawn", "unjudged", "wrong")  # drawn: right only by eager's error over several roundings
HANDLER = "tests.opdb.__main__:check_batch"


def check_batch(job: tuple[str, str, int, int]) -> dict[str, Any]:
    """Samples [start, start + BATCH) of one operator and type; training where it is differentiable, and inference."""
    name, dtype_name, seed, start = job
    found: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "message": "", "more": False}
    compiler = backend_callable()
    for number, case in enumerate(samples(name, getattr(torch, dtype_name), seed)):
        if number < start:
            continue
        if number >= start + BATCH:
            found["more"] = True
            break
        try:
            ways = (True, False) if case.differentiable else (False,)
            alone = [check_case(case, compiler, training) for training in ways]
            found["right"] += 1
            found["drawn"] += not all(alone)
        except Skipped as skipped:
            found["unjudged"] += 1
            found["note"] = str(skipped)
        except Mismatch as mismatch:
            found["wrong"] += 1
            found["message"] = found["message"] or f"sample {number}: {mismatch}"
    return found


def main() -> int:
    options = _arguments()
    os.environ["ONEPASS_STRICT"] = "1"
    os.environ.setdefault("ONEPASS_CACHE_DIR", tempfile.mkdtemp(prefix="onepass-opdb-"))
    RESULTS.mkdir(exist_ok=True)
    if options.fresh:
        for dtype in DTYPES:
            _file(dtype).unlink(missing_ok=True)
    done = {(line["operator"], line["dtype"]) for line in _forget_wrong()}
    wanted = [
        (name, short(dtype))
        for name, dtype in pairs()
        if re.search(options.only, name) and (name, short(dtype)) not in done and not skip_reason(name, dtype)
    ]
    print(f"backend {BACKEND}, seed {options.seed}: {len(wanted)} operators and types to do, {len(done)} done before")
    _run(wanted, options)
    return _report()


def _run(wanted: list[tuple[str, str]], options: argparse.Namespace) -> None:
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    jobs = [(name, dtype, options.seed, 0) for name, dtype in wanted]
    finished = 0

    def next_job() -> Any:
        # Operators with many samples come back as further jobs, so the list grows while it is read.
        return jobs.pop(0) if jobs else None

    for job, found in run_jobs(next_job, HANDLER, options.workers, options.seconds):
        name, dtype, seed, start = job
        total = totals.setdefault((name, dtype), {**dict.fromkeys(COUNTS, 0), "message": ""})
        if isinstance(found, Failure):
            message = f"from sample {start}: {found.why}"
            found = {**dict.fromkeys(COUNTS, 0), "wrong": 1, "message": message, "more": False}
        for key in COUNTS:
            total[key] += found[key]
        total["message"] = total["message"] or found["message"]
        if "note" in found:
            total["note"] = found["note"]
        if found["more"]:
            jobs.insert(0, (name, dtype, seed, start + BATCH))
            continue
        finished += 1
        progress(f"{finished}/{len(wanted)} {name} {dtype}")
        line = {"operator": name, "dtype": dtype, **totals.pop((name, dtype))}
        with _file(getattr(torch, dtype)).open("a") as out:
            out.write(json.dumps(line) + "\n")
        if line["wrong"]:
            print(f"\nWRONG {name} {dtype}: {line['message'][:400]}")


def _file(dtype: torch.dtype) -> Path:
    return RESULTS / f"{short(dtype)}.jsonl"


def _lines() -> list[dict[str, Any]]:
    files = [_file(dtype) for dtype in DTYPES if _file(dtype).exists()]
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def _forget_wrong() -> list[dict[str, Any]]:
    """The lines without a mistake: resuming after a fix tries the others again."""
    kept = [line for line in _lines() if not line["wrong"]]
    _write(kept)
    return kept


def _write(lines: list[dict[str, Any]]) -> None:
    for dtype in DTYPES:
        mine = sorted((line for line in lines if line["dtype"] == short(dtype)), key=lambda line: line["operator"])
        _file(dtype).write_text("".join(json.dumps(line) + "\n" for line in mine))


def _report() -> int:
    """Sort the files and write the summary; 1 if anything is wrong."""
    lines = _lines()
    _write(lines)
    counts = {key: sum(line.get(key, 0) for line in lines) for key in COUNTS}
    wrong = [line for line in lines if line["wrong"]]
    text = [f"operators and types: {len(lines)}", *(f"samples {key}: {count}" for key, count in counts.items())]
    text += [f"wrong: {line['operator']} {line['dtype']} ({line['wrong']})" for line in wrong]
    (RESULTS / "summary.txt").write_text("\n".join(text) + "\n")
    print("\n".join(text))
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.opdb")
    parser.add_argument("--only", default="", help="a regular expression for operator names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit of one job")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
