"""CPU speed beside eager and Inductor: `python -m benchmarks.cpu` writes benchmarks/results/cpu.{json,md}.

One process measures all systems in interleaved rounds (median of 9) with the same malloc settings and
checks every value; compile times come from fresh processes with empty, then filled, caches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .report import markdown
from .systems import SYSTEMS, compiled, facts, same_environment
from .workloads import WORKLOADS, Prepared, Workload, check_values

ROUNDS = 9
RESULTS = Path(__file__).parent / "results"


def select(only: str) -> list[Workload]:
    """Workloads whose name contains one of the semicolon-separated words; all if there are none."""
    words = [word.strip().lower() for word in only.split(";") if word.strip()]
    chosen = [w for w in WORKLOADS if not words or any(word in w.name.lower() for word in words)]
    if not chosen:
        sys.exit(f"no workload matches {only!r}; there are: {'; '.join(w.name for w in WORKLOADS)}")
    return chosen


def copy_bandwidth(scale: float) -> float:
    """Bytes per second of a plain copy (read + write), the best of 15: what memory gives."""
    source = torch.zeros(max(1 << 20, int((64 << 20) * scale)))
    target = torch.zeros_like(source)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def measure(workload: Workload, systems: list[str], scale: float, rounds: int) -> dict[str, Any]:
    """Median seconds per system, checked; a system that fails is reported, not hidden."""
    prepared = Prepared(workload, scale)
    eager = prepared.call(workload.function)
    result: dict[str, Any] = {"minimum_bytes": prepared.minimum_bytes(eager), "seconds": {}, "problems": {}}
    functions = {}
    for system in systems:
        try:
            functions[system] = compiled(system, workload.function)
            problem = check_values(prepared, prepared.call(functions[system]), eager)
        except Exception as error:
            functions.pop(system, None)
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        if problem:
            result["problems"][system] = problem
    del eager
    times: dict[str, list[float]] = {system: [] for system in functions}
    order = list(functions)
    for round_number in range(rounds + 2):  # the first two warm caches and allocator, and do not count
        for system in order:
            start = time.perf_counter()
            output = prepared.call(functions[system])
            elapsed = time.perf_counter() - start
            del output
            if round_number >= 2:
                times[system].append(elapsed)
        order = order[1:] + order[:1]
    result["seconds"] = {system: statistics.median(values) for system, values in times.items()}
    torch._dynamo.reset()
    return result


def compile_times(systems: list[str], only: str, scale: float) -> dict[str, Any]:
    """Cold and warm first-call times per system, each in a fresh process."""
    results: dict[str, Any] = {}
    for system in systems:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"ONEPASS_CACHE_DIR": f"{folder}/onepass", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            results[system] = {state: _compile_child(system, only, scale, caches) for state in ("cold", "warm")}
            _say(f"compile time of {system}: done")
    return results


def _compile_child(system: str, only: str, scale: float, caches: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.compile_time", system, f"--scale={scale}", f"--only={only}"]
    result = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=1800)
    if result.returncode:
        return {"problem": (result.stderr.strip().splitlines() or ["no output"])[-1]}
    loaded: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return loaded


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="words of workload names, separated by ';'")
    parser.add_argument("--systems", default="eager,inductor,onepass", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, 3 rounds: does it work, not how fast")
    parser.add_argument("--no-compile-time", action="store_true", help="skip the fresh-process measurements")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--markdown", type=Path, help="where to write the tables")
    arguments = parser.parse_args()
    unknown = set(arguments.systems.split(",")) - set(SYSTEMS)
    if unknown:
        parser.error(f"unknown systems {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    return arguments


def main() -> int:
    arguments = _arguments()
    same_environment("benchmarks.cpu")
    torch.set_num_threads(os.cpu_count() or 1)
    systems, workloads = arguments.systems.split(","), select(arguments.only)
    scale, rounds = (1 / 64, 3) if arguments.quick else (1.0, ROUNDS)
    result: dict[str, Any] = {"facts": facts(), "rounds": rounds, "scale": scale, "workloads": {}}
    result["copy_bytes_per_second"] = copy_bandwidth(scale)
    for number, workload in enumerate(workloads, 1):
        measured = measure(workload, systems, scale, rounds)
        result["workloads"][workload.name] = measured
        shown = "  ".join(f"{system} {1e3 * s:.1f} ms" for system, s in measured["seconds"].items())
        problems = "".join(f"  PROBLEM {system}: {text}" for system, text in measured["problems"].items())
        _say(f"[{number}/{len(workloads)}] {workload.name}: {shown}{problems}")
    if not arguments.no_compile_time:
        compilers = [s for s in systems if s != "eager"]
        result["compile"] = compile_times(["aot_eager", *compilers], arguments.only, scale)
    text = markdown(result)
    print(text)
    partial = arguments.quick or arguments.only or arguments.no_compile_time
    default = None if partial else RESULTS / "cpu"
    for path, content in (
        (arguments.json or (default and default.with_suffix(".json")), json.dumps(result, indent=1) + "\n"),
        (arguments.markdown or (default and default.with_suffix(".md")), text + "\n"),
    ):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, "utf-8")
    return 1 if any(w["problems"] for w in result["workloads"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
