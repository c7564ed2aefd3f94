"""Every candidate that a planner could choose for kernels with products: its price, and the time it takes.

`python -m benchmarks.candidates --plan FILE` plans the corpus without a GPU and writes the candidates of each region
that was asked for, and neighbours of the schedules of other groups. `--measure FILE` builds and times them on the GPU
at hand. `benchmarks.calibrate` fits the numbers of `ir/rates.py` to half of such kernels, those whose key is even.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.oracle.corpus import corpus
from tests.oracle.planning import compiled, without_compilers
from tests.oracle.program import Program

from onepass.analysis.contraction import Contraction
from onepass.analysis.nest import Refusal
from onepass.analysis.price import price
from onepass.codegen.trial import emit_trial
from onepass.codegen.triton import emit_triton
from onepass.ir.kernel import ScheduledGroup
from onepass.ir.source import KernelSource, Trial
from onepass.ir.target import Target, find_target
from onepass.ir.time import total_us
from onepass.pipeline import schedule_named
from onepass.planner.chooser import Chooser
from onepass.runtime.builders import builder_for
from onepass.runtime.cache import default_cache
from onepass.runtime.device import current_chip
from onepass.runtime.kernels import LoadedKernel, build_each
from onepass.runtime.stopwatch import alone, stopwatch_for
from onepass.schedule.complete import completed
from onepass.schedule.product_kernels import schedule_products
from onepass.schedule.product_schedules import candidates

from .prices import kept_plans

SLOWEST_US = 20_000.0  # kernels that take longer are timed once


def questions(program: Program, target: str) -> list[tuple[Contraction, ...]]:
    """The contractions that a planner asks the price of."""
    found: list[tuple[Contraction, ...]] = []
    original = Chooser.bound

    def noted(chooser: Chooser, c: Contraction) -> float:
        found.append((c,))
        return original(chooser, c)

    with mock.patch.object(Chooser, "bound", noted), without_compilers():
        compiled(program, target)
    return found


def with_products(program: Program, target: Target) -> Iterator[tuple[str, ScheduledGroup]]:
    """The kernels of every candidate of a program's regions."""
    for found in questions(program, target.name):
        for schedule in candidates(found[0], target):
            yield str(schedule), schedule_products(found, target, "k", (), [schedule])


def without_products(program: Program, target: Target) -> Iterator[tuple[str, ScheduledGroup]]:
    """The kernels of a program's other groups, and of neighbours of their schedules."""
    with kept_plans() as plans, without_compilers():
        records = compiled(program, target.name)
    for planned in [plans[id(r)].planned for r in records if not r.fallback]:
        for name in [n for n, g in planned.names.items() if not g.products]:
            yield "as the rules say", schedule_named(planned, name)
            for change, schedule in planned.neighbours(name).items():
                yield change, schedule_named(planned, name, schedule)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Kernels that could be chosen for a group of a program; `label`: its tiles, or how it differs from the rules."""

    program: str
    kind: str
    label: str
    group: ScheduledGroup
    trial: Trial
    sources: list[KernelSource]


def distinct(only: str, target: Target) -> dict[str, Candidate]:
    """Every distinct candidate of the corpus by its content. `only`: a part of program names."""
    found: dict[str, Candidate] = {}
    for name, program in corpus().items():
        if only not in name:
            continue
        for kind, kernels in (("products", with_products), ("others", without_products)):
            for label, group in kernels(program, target):
                group = replace(group, kernels=tuple(map(completed, group.kernels)))
                trial = emit_trial(group)
                if isinstance(trial, Refusal):
                    continue
                sources = [emit_triton(k, False, False) for k in group.kernels]
                sizes = trial.stand_ins, [(launch.symbols, launch.programs) for launch in trial.launches]
                key = hashlib.sha256(f"{[s.key for s in sources]} {sizes}".encode()).hexdigest()[:16]
                found.setdefault(key, Candidate(name, kind, label, group, trial, sources))
    return found


def rows(only: str, target: Target) -> dict[str, dict[str, Any]]:
    """The same as plain data: schedule, price, and all that is needed to measure it."""
    return {
        key: {
            "program": c.program, "kind": c.kind, "candidate": c.label, "schedule": str(c.group.kernels[0].schedule),
            "price_us": total_us(price(k, target) for k in c.group.kernels), "trial": c.trial, "sources": c.sources,
        }
        for key, c in distinct(only, target).items()
    }  # fmt: skip


def _build(source: Any) -> None:
    build_each([source], builder_for(current_chip()), default_cache())


def measured(found: dict[str, dict[str, Any]], target: Target, seconds: float) -> dict[str, dict[str, Any]]:
    """The rows with what the device took, as many as the time allows."""
    sources = {s.key: s for row in found.values() for s in row["sources"]}
    with multiprocessing.get_context("fork").Pool() as pool:  # before this process opens the device
        pool.map(_build, sources.values(), 4)
    built = dict(zip(sources, build_each(list(sources.values()), builder_for(target), default_cache()), strict=True))
    stopwatch, began = stopwatch_for(target, "cuda"), time.monotonic()
    assert stopwatch is not None
    for row in found.values():
        kernels = [built[s.key] for s in row.pop("sources")]
        trial = row.pop("trial")
        if time.monotonic() - began > seconds or not all(isinstance(k, LoadedKernel) for k in kernels):
            continue
        trial = replace(
            trial,
            stand_ins=tuple(replace(s, device="cuda") for s in trial.stand_ins),
            launches=tuple(replace(launch, device="cuda") for launch in trial.launches),
        )
        with alone:
            timing = stopwatch.time(trial, kernels, SLOWEST_US)
        row |= {"measured_us": timing.time_us, "problem": timing.problem}
    return {key: row for key, row in found.items() if row.get("measured_us")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.candidates", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, help="write the candidates for --target, without a GPU")
    parser.add_argument("--measure", type=Path, help="build and time the candidates of such a file on this GPU")
    parser.add_argument("--out", type=Path, help="where measured candidates go, as JSON")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--only", default="", help="a part of program names")
    parser.add_argument("--seconds", type=float, default=300.0, help="of measuring, at most")
    arguments = parser.parse_args()
    if arguments.plan is not None:
        arguments.plan.write_bytes(pickle.dumps(rows(arguments.only, find_target(arguments.target))))
        return 0
    if arguments.measure is None or arguments.out is None:
        parser.error("--plan FILE, or --measure FILE --out FILE")
    found = measured(pickle.loads(arguments.measure.read_bytes()), current_chip(), arguments.seconds)
    arguments.out.write_text(json.dumps(found))
    print(f"{len(found)} candidates measured", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
