"""Price against measurement: `python -m benchmarks.prices` on a GPU writes benchmarks/results/<chip>-prices.*.

Every kernel of the benchmark sets and of layers of models, forward and backward, is compiled without tuning and timed
alone, on tensors that stand in for its own, the chip's cache emptied before each launch and the device never waiting
for the host. Half of the kernels (by content) may serve to fit constants; the other half is what a claim rests on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.oracle.corpus import corpus
from tests.oracle.planning import compiled, without_compilers
from tests.oracle.program import Program

from onepass.analysis.nest import Refusal
from onepass.building import Building, Made
from onepass.codegen.trial import emit_trial
from onepass.ir.record import CompileRecord, KernelRecord
from onepass.ir.source import KernelSource, Launch, Trial
from onepass.ir.target import Target
from onepass.pipeline import emit_kernels, schedule_named
from onepass.runtime.builders import builder_for
from onepass.runtime.device import current_chip
from onepass.runtime.kernels import Builder, LoadedKernel, build_each
from onepass.runtime.stopwatch import Stopwatch, alone, stopwatch_for

from .kept import Kept
from .plots import price_plot
from .report import facts_lines, geometric_mean, table
from .systems import facts, result_name

RESULTS = Path(__file__).parent / "results"
SETS = ("memory gpu", "memory cpu", "sweep", "contraction", "layer", "count")
NEAR, LONG_US, WORST = 1.5, 10.0, 25  # a good price; what is no mere launch; kernels that the report lists
HALVES = ("fitted", "reported")


@dataclass(frozen=True, slots=True)
class Priced:
    """One kernel: its price, and what the device took. `content` is equal for equal kernels on equal sizes."""

    graph: str
    kernel: str
    content: str
    schedule: str
    price_us: float
    measured_us: float  # 0 where `problem` says why nothing was measured
    bytes_moved: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    programs: int
    problem: str = ""


# --- one program ---


@contextmanager
def kept_plans() -> Iterator[dict[int, Made]]:
    """The plan of every graph compiled here, with the schedules of its groups, by the identity of its record."""
    found: dict[int, Made] = {}
    original = Building.run

    def remembered(building: Building) -> Made:
        found[id(building.record)] = original(building)
        return found[id(building.record)]

    with mock.patch.object(Building, "run", remembered):
        yield found


def priced_program(
    program: Program, target: Target, device: str, builder: Builder, stopwatch: Stopwatch
) -> dict[str, Any]:
    """Every kernel of a program's graphs, or why it could not be compiled."""
    with kept_plans() as plans:
        records = compiled(program, target.name, device)
    fallbacks = [record.fallback for record in records if record.fallback]
    graphs = [(record, plans[id(record)]) for record in records if not record.fallback]
    with alone:
        kernels = [asdict(row) for graph in graphs for row in _priced_graph(*graph, builder, stopwatch)]
    return {"kernels": kernels, "problems": fallbacks}


def _priced_graph(record: CompileRecord, made: Made, builder: Builder, stopwatch: Stopwatch) -> Iterator[Priced]:
    planned = made.planned
    records = {kernel.name: kernel for kernel in record.kernels}
    for name in planned.names:
        scheduled = schedule_named(planned, name, made.choices.get(name))
        sources, numbers = emit_kernels(planned, list(scheduled.kernels), name == next(iter(planned.names)))
        texts = [sources[numbers[kernel]] for kernel in scheduled.kernels]
        trial = emit_trial(scheduled)
        if isinstance(trial, Refusal):
            for kernel, text in zip(scheduled.kernels, texts, strict=True):
                yield _row(record, records[kernel.name], text, problem=trial.reason)
            continue
        built = build_each(texts, builder)
        for kernel, text, launch in zip(scheduled.kernels, texts, trial.launches, strict=True):
            time_us, problem = _measured(trial, launch, built, stopwatch)
            yield _row(record, records[kernel.name], text, trial, launch, time_us, problem)


def _measured(
    trial: Trial, launch: Launch, built: Sequence[LoadedKernel | BaseException], stopwatch: Stopwatch
) -> tuple[float, str]:
    kernels = [kernel for kernel in built if isinstance(kernel, LoadedKernel)]
    if len(kernels) < len(built):
        return 0.0, "not built"
    timing = stopwatch.time(replace(trial, launches=(launch,)), kernels)
    return timing.time_us, timing.problem


def _row(
    record: CompileRecord,
    kernel: KernelRecord,
    source: KernelSource,
    trial: Trial | None = None,
    launch: Launch | None = None,
    time_us: float = 0.0,
    problem: str = "",
) -> Priced:
    sizes = (trial.stand_ins, launch.symbols, launch.programs) if trial and launch else ()
    return Priced(
        graph=record.direction,
        kernel=kernel.name,
        content=hashlib.sha256(f"{source.key} {sizes}".encode()).hexdigest()[:16],
        schedule=kernel.schedule,
        price_us=kernel.predicted_us,
        measured_us=time_us,
        bytes_moved=kernel.bytes_read + kernel.bytes_written,
        registers=kernel.registers,
        spilled_bytes=kernel.spilled_bytes,
        shared_bytes=kernel.shared_bytes,
        warps=source.warps,
        programs=int(launch.programs) if launch else 0,
        problem=problem,
    )


# --- all programs ---


def chosen(only: str) -> list[Program]:
    """Programs of the sets whose name contains one of the semicolon-separated words; all if there are none."""
    words = [word.strip().lower() for word in only.split(";") if word.strip()]
    there = [p for name, p in corpus().items() if name.split("/")[0] in SETS]
    return [p for p in there if not words or any(word in p.name.lower() for word in words)]


def build_ahead(programs: Iterable[Program], target: Target, device: str, builder: Builder) -> int:
    """Build the first schedules of all programs at once, so that every core has one; how many there were."""
    sources: dict[str, KernelSource] = {}
    for program in programs:
        with without_compilers() as collector:
            compiled(program, target.name, device)
        sources |= collector.sources
    build_each(list(sources.values()), builder)  # an error is met again where the kernel is wanted
    return len(sources)


def run(
    only: str, target: Target, device: str, builder: Builder, stopwatch: Stopwatch, kept: Kept,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """The rows of every program, those that are kept included."""
    programs = chosen(only)
    missing = [program for program in programs if program.name not in kept.rows]
    say(f"planning {len(missing)} of {len(programs)} programs, and building their kernels")
    say(f"{build_ahead(missing, target, device, builder)} kernels built")
    found: dict[str, Any] = {}
    for number, program in enumerate(programs, 1):
        measure = partial(priced_program, program, target, device, builder, stopwatch)
        found[program.name] = kept.row(program.name, measure)
        say(f"[{number}/{len(programs)}] {program.name}: {_progress(found[program.name])}")
    return {"target": target.name, "programs": found}


def _progress(row: dict[str, Any]) -> str:
    shown = [k["problem"] or f"{k['measured_us']:.1f} us for {k['price_us']:.1f}" for k in row["kernels"]]
    return "; ".join([*shown, *row["problems"]])


# --- what it comes to ---


def distinct(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Measured kernels by content, each once, with the program that has it first."""
    found: dict[str, dict[str, Any]] = {}
    for program, row in result["programs"].items():
        for kernel in row["kernels"]:
            if not kernel["problem"]:
                found.setdefault(kernel["content"], {**kernel, "program": program})
    return found


def half_of(kernel: Mapping[str, Any]) -> str:
    """Which half a kernel belongs to; equal kernels to the same, in every run."""
    return HALVES[int(kernel["content"], 16) % 2]


def ratio(kernel: Mapping[str, Any]) -> float:
    """Measured over price."""
    return float(kernel["measured_us"]) / max(float(kernel["price_us"]), 1e-3)


def distance(kernel: Mapping[str, Any]) -> float:
    return max(ratio(kernel), 1 / ratio(kernel))


def is_long(kernel: Mapping[str, Any]) -> bool:
    return max(kernel["measured_us"], kernel["price_us"]) > LONG_US


def summary(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cells: how many, the share that is near, the mean ratio, how many long ones, their worst ratio."""
    near = sum(distance(k) <= NEAR for k in kernels)
    long = [k for k in kernels if is_long(k)]
    worst = max(long, key=distance, default=None)
    return [
        str(len(kernels)),
        f"{100 * near / len(kernels):.0f} %" if kernels else "",
        f"{geometric_mean(map(ratio, kernels)):.2f}",
        str(len(long)),
        f"{100 * sum(distance(k) <= NEAR for k in long) / len(long):.0f} %" if long else "",
        "" if worst is None else f"{ratio(worst):.2f}",
    ]


def markdown(result: dict[str, Any]) -> str:
    """The report."""
    kernels = list(distinct(result).values())
    refused = [k["problem"] for row in result["programs"].values() for k in row["kernels"] if k["problem"]]
    long = f"above {LONG_US:g} us"
    head = ["kernels", "number", f"within {NEAR:g} x", "mean measured / price", long, f"within {NEAR:g} x, {long}"]
    parts = {half: [k for k in kernels if half_of(k) == half] for half in HALVES} | {"all": kernels}
    parts |= {name: [k for k in kernels if k["program"].startswith(f"{name}/")] for name in SETS}
    rows = [[name, *summary(part)] for name, part in parts.items() if part]
    worst = sorted(filter(is_long, kernels), key=distance, reverse=True)[:WORST]
    columns = [
        "program",
        "kernel",
        "measured us",
        "price us",
        "ratio",
        "MB",
        "registers",
        "shared",
        "programs",
        "schedule",
    ]
    return "\n\n".join(
        [
            "# Price against measurement",
            *facts_lines(result),
            f"Kernels planned for {result['target']} without tuning, each timed alone; {len(refused)} kernels could "
            "not be: what they read depends on values, or they were not built.",
            "\n".join(table([*head, f"worst ratio, {long}"], rows)),
            f"The {len(worst)} kernels {long} whose price is farthest off:",
            "\n".join(table(columns, [_worst_row(k) for k in worst])),
        ]
    )


def _worst_row(kernel: Mapping[str, Any]) -> list[str]:
    times = [f"{kernel['measured_us']:.1f}", f"{kernel['price_us']:.1f}", f"{ratio(kernel):.2f}"]
    resources = [
        f"{kernel['bytes_moved'] / 1e6:.1f}",
        *(str(kernel[k]) for k in ("registers", "shared_bytes", "programs")),
    ]
    return [kernel["program"], f"{kernel['graph']} {kernel['kernel']}", *times, *resources, kernel["schedule"]]


def files(name: str, result: dict[str, Any]) -> dict[str, str]:
    """What is written of a run."""
    kernels = [(k["price_us"], k["measured_us"], k["program"]) for k in distinct(result).values()]
    return {
        f"{name}-prices.json": json.dumps(result, indent=1),
        f"{name}-prices.md": markdown(result),
        f"{name}-prices.svg": price_plot(f"Price against measurement, {result['facts']['device']}", kernels, NEAR),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.prices", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="words of program names, separated by ';'")
    parser.add_argument("--resume", type=Path, help="file that keeps every program as it is measured")
    parser.add_argument("--out", type=Path, help="folder for the results; a partial run writes none without it")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels are timed on a GPU, and there is none here")
    target = current_chip()
    stopwatch = stopwatch_for(target, "cuda")
    if stopwatch is None:
        parser.error(f"kernels for {target.name} do not run here")
    about = facts("cuda")
    kept = Kept(arguments.resume, {"facts": about, "target": target.name})
    say = partial(print, file=sys.stderr, flush=True)
    result = {"facts": about, **run(arguments.only, target, "cuda", builder_for(target), stopwatch, kept, say)}
    written = files(result_name("cuda"), result)
    folder = arguments.out or (None if arguments.only else RESULTS)
    for name, text in written.items() if folder is not None else ():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.rstrip("\n") + "\n", "utf-8")
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
