"""Speed beside eager, Inductor, XLA and hand-written kernels: `python -m benchmarks` writes benchmarks/results/.

One process on one device measures all systems in interleaved rounds and checks every value; the floor of a
workload is its fewest bytes and FLOPs at the copy bandwidth and matmul rate of the same run. Compile times
come from fresh processes with empty, then filled, caches. `--set contractions` measures attention, matmuls with
neighbours and a transformer block instead, beside SDPA, flex_attention and cuBLAS; `--set models` whole models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from . import timing
from .compile_time import compile_times
from .kept import Kept
from .measure import forget, measure
from .models.report import markdown as models_markdown
from .models.run import Settings, part_of, run_rows
from .plots import floor_plot, roofline_plot
from .report import markdown
from .sets import MEMORY, MODELS, SETS, select
from .sweep import run_sweep
from .systems import TORCH_SYSTEMS, facts, missing, result_name, same_environment
from .turns import apart

QUICK_SCALE, QUICK_ROUNDS = 1 / 64, 3
# Of the source repository; an installed package writes where it is called.
RESULTS = Path(__file__).parent / "results" if __package__ == "benchmarks" else Path("onepass-bench")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.splitlines()[0] if __doc__ else "")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help=f"here: {here}")
    parser.add_argument("--set", choices=tuple(SETS), default=MEMORY, help=f"which workloads; {MEMORY} unless given")
    parser.add_argument("--only", default="", help="words of workload names, separated by ';'")
    for_help = "; ".join(f"{name}: of {', '.join(s.available)}" for name, s in SETS.items())
    parser.add_argument("--systems", help=for_help)
    parser.add_argument("--quick", action="store_true", help="small sizes, 3 rounds: does it work, not how fast")
    parser.add_argument(
        "--rounds", type=int, help="timed rounds; 9 on the CPU, 30 on a GPU, contractions 12, models 100 and 15"
    )
    parser.add_argument("--no-compile-time", action="store_true", help="skip the fresh-process measurements")
    parser.add_argument("--sweep", action="store_true", help="60 odd shapes beside Inductor instead of the workloads")
    parser.add_argument(
        "--resume", type=Path, help="file that keeps every row as it is measured; rows in it are not repeated"
    )
    parser.add_argument("--shard", default="", help="models: part K of N of the cases, as K/N")
    parser.add_argument("--minutes", type=float, default=0, help="models: start no case that would end later")
    parser.add_argument(
        "--at-once", type=int, default=1, help="rows that compile side by side and are measured in turns"
    )
    parser.add_argument("--lock", default="", help="a file by which runs at the same time take turns, with --at-once")
    parser.add_argument("--note", default="", help="models: a sentence for the report, of the machine's state, say")
    parser.add_argument("--out", type=Path, help="folder for the results; a partial run writes none without it")
    arguments = parser.parse_args()
    chosen = SETS[arguments.set]
    arguments.systems = list(dict.fromkeys(arguments.systems.split(",") if arguments.systems else chosen.systems))
    if unknown := set(arguments.systems) - set(chosen.available):
        parser.error(f"unknown systems {', '.join(sorted(unknown))}; there are {', '.join(chosen.available)}")
    if arguments.set != MEMORY and arguments.sweep:
        parser.error("--sweep has shapes of its own and takes no --set")
    if arguments.set == "contractions" and arguments.device == "cpu" and not arguments.quick:
        parser.error("the contractions are measured on a GPU; on the CPU --quick shows that they work")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds is 1 or more")
    return arguments


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _start(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is the same for both kinds of run: facts, sizes, ceilings."""
    device, quick = arguments.device, arguments.quick
    _say("measuring the ceilings")
    return {
        "facts": facts(device),
        "device": device,
        "set": arguments.set,
        "rounds": arguments.rounds or (QUICK_ROUNDS if quick else SETS[arguments.set].rounds[device]),
        "scale": QUICK_SCALE if quick else 1.0,
        "ceilings": timing.ceilings(device, quick),
    }


def _kept(arguments: argparse.Namespace, result: dict[str, Any], what: list[str]) -> Kept:
    settings = {k: result[k] for k in ("facts", "device", "set", "rounds", "scale")}
    return Kept(arguments.resume, {**settings, "systems": what})


def run_workloads(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every workload by every system that is here."""
    device, workloads = arguments.device, select(arguments.device, arguments.only, arguments.set)
    result = _start(arguments)
    absent = {system: reason for system in arguments.systems if (reason := missing(system, device))}
    systems = [system for system in arguments.systems if system not in absent]
    result |= {"systems": arguments.systems, "missing": absent, "workloads": {}}
    for system, reason in absent.items():
        _say(f"{system} is not measured: {reason}")
    kept = _kept(arguments, result, systems)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        if (
            device == "cuda" and SETS[arguments.set].processes and not arguments.only
        ):  # before any profile, which makes launches dearer
            result["host"], result["host_problems"] = timing.host_cost([s for s in systems if s in TORCH_SYSTEMS])
            forget(device)
        settings = systems, result["scale"], result["rounds"], device, caches
        left = [w for w in workloads if w.name not in kept.rows]
        rows = ((w.name, measure(w, *settings)) for w in left)
        if arguments.at_once > 1:
            rows = apart(arguments.set, [w.name for w in left], arguments.at_once, arguments.lock, *settings)
        for number, (row, measured) in enumerate(rows, 1):
            kept.row(row, lambda measured=measured: measured)
            _say(f"[{number}/{len(left)}] {row}: {progress_text(measured)}")
        result["workloads"] = {w.name: kept.rows[w.name] for w in workloads}
    return result


def run_models(arguments: argparse.Namespace) -> dict[str, Any]:
    """Whole models by every system that is here: those asked for now, and those kept in the same file before."""
    device, quick, name = arguments.device, arguments.quick, arguments.set
    result: dict[str, Any] = {
        "facts": facts(device),
        "device": device,
        "set": name,
        "rounds": arguments.rounds or (QUICK_ROUNDS if quick else SETS[name].rounds[device]),
        "scale": QUICK_SCALE if quick else 1.0,
        "systems": arguments.systems,
        "note": arguments.note,
    }
    kept = _kept(arguments, result, arguments.systems)
    chosen = part_of(select(device, arguments.only, name, quick), arguments.shard)
    with tempfile.NamedTemporaryFile() as lock:
        turns = (arguments.at_once, arguments.lock or lock.name) if arguments.at_once > 1 else ()
        settings = Settings(device, arguments.systems, result["rounds"], not arguments.no_compile_time, *turns)
        found = run_rows(chosen, settings, kept, arguments.minutes, _say)
    everything = [row.name for row in select(device, "", name, quick)]
    return result | found | {"rows": {row: kept.rows[row] for row in everything if row in kept.rows}}


def run_compile_times(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Add every system's compile times, in fresh processes."""
    result["compile"] = {}
    there = [s for s in arguments.systems if s not in ("eager", "hand") and s not in result["missing"]]
    for system in ["aot_eager", *there]:
        result["compile"][system] = compile_times(system, arguments.device, arguments.only, result["scale"])
        _say(f"compile time of {system}: done")


def progress_text(measured: dict[str, Any]) -> str:
    """One workload's times and problems in a line."""
    times = "  ".join(f"{system} {1e3 * s:.4g} ms" for system, s in measured["seconds"].items())
    return times + "".join(f"  PROBLEM {system}: {text}" for system, text in measured["problems"].items())


def _files(name: str, result: dict[str, Any]) -> dict[str, str]:
    files = {f"{name}.json": json.dumps(result, indent=1), f"{name}.md": markdown(result)}
    return files | {f"{name}-floor.svg": floor_plot(result), f"{name}-roofline.svg": roofline_plot(result)}


def _write(folder: Path | None, files: dict[str, str]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text.rstrip("\n") + "\n", "utf-8")
        _say(f"wrote {folder / name}")


def main() -> int:
    arguments = _arguments()
    same_environment(__package__ or "benchmarks", arguments.device)
    torch.set_num_threads(os.cpu_count() or 1)
    name = result_name(arguments.device)
    if arguments.sweep:
        result = _start(arguments)
        result, text = run_sweep(result, _kept(arguments, result, ["sweep"]), arguments.only, arguments.quick, _say)
        files = {f"{name}-sweep.json": json.dumps(result, indent=1), f"{name}-sweep.md": text}
        part, rows = arguments.quick or arguments.only, result["cases"]
    elif arguments.set == MODELS:
        result = run_models(arguments)
        text, rows = models_markdown(result), result["rows"]
        files = {f"{name}-models.json": json.dumps(result, indent=1), f"{name}-models.md": text}
        part = arguments.quick or len(rows) < len(SETS[MODELS].workloads[arguments.device])
    else:
        chosen = SETS[arguments.set]
        name += "" if arguments.set == MEMORY else f"-{arguments.set}"
        result = run_workloads(arguments)
        if chosen.processes and not arguments.no_compile_time:
            _write(arguments.out, _files(name, result))  # what is there, should the rest be cut short
            run_compile_times(arguments, result)
        files, rows = _files(name, result), result["workloads"]
        text = files[f"{name}.md"]
        part = arguments.quick or arguments.only or arguments.systems != list(chosen.systems)
        part = part or (chosen.processes and arguments.no_compile_time)
    print(text)
    _write(arguments.out or (None if part else RESULTS), files)
    return 1 if any(row["problems"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
