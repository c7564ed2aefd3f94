"""Compile each workload, check its values, time it beside eager, and print a table and one report.

Right means: at most twice eager's distance from float64, plus the dtype's tolerance.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backend import make_backend, record_compilations
from ..explain import Explanation
from ..explain.text import byte_text
from ..progress import Progress
from .workloads import WORKLOADS, Function, Program, Workload

ROUNDS = 5
SLOWER = 1.02  # times eager's time, from which on a workload is named
_SEED = 20
_HEAD = ("workload", "eager ops", "kernels", "externs", "moved", "unfused", "eager ms", "onepass ms", "speed-up")


@dataclass(frozen=True, slots=True)
class Row:
    """One workload's outcome; `problem` is empty where every value was right."""

    name: str
    eager_operations: int
    explanation: Explanation
    eager_ms: float
    onepass_ms: float
    problem: str

    def cells(self) -> tuple[str, ...]:
        e = self.explanation
        moved, unfused = byte_text(e.bytes_moved), byte_text(e.bytes_unfused)
        counts = (str(self.eager_operations), str(len(e.kernels)), str(len(e.externs)))
        times = (f"{self.eager_ms:.1f}", f"{self.onepass_ms:.1f}", f"{self.eager_ms / self.onepass_ms:.2f}x")
        return self.name, *counts, moved, unfused, *times


def run_demo(show: Callable[[str], None] = print) -> int:
    """Run everything; the exit status is 1 if a value was wrong."""
    # dynamo warns that it ignores the optimiser's profiler annotation, which is of no use to a reader here.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    show(f"torch {torch.__version__}, {torch.get_num_threads()} threads; each workload runs beside eager")
    show("")
    show(_line(_HEAD))
    rows = []
    with Progress(sys.stderr, len(WORKLOADS)) as progress:
        for workload in WORKLOADS:
            progress.step(workload.name)
            rows.append(run_workload(workload))
            progress.clear()
            show(_line(rows[-1].cells()))
    show("")
    wrong = [row for row in rows if row.problem]
    for row in wrong:
        show(f"WRONG  {row.name}: {row.problem}")
    for row in rows:
        if row.onepass_ms > SLOWER * row.eager_ms:
            times = f"{row.onepass_ms:.1f} ms against {row.eager_ms:.1f}"
            show(f"SLOWER {row.name}: {times}; `onepass profile` says where the time goes")
    if not wrong:
        show(f"values: all {len(rows)} workloads agree with eager and float64")
    show(f"\nhow `{rows[0].name}` was compiled:\n\n{rows[0].explanation}")
    return 1 if wrong else 0


def run_workload(workload: Workload) -> Row:
    """Compile, check and time one workload."""
    torch.compiler.reset()  # two workloads share code: the second would be compiled for dynamic shapes
    eager, ours, exact = (_made(workload, dtype) for dtype in (torch.float32, torch.float32, torch.float64))
    with record_compilations() as records:
        compiled: Function = torch.compile(ours.function, backend=make_backend({"strict": True}))
        got = ours.run(compiled)
    explanation = Explanation(list(records))
    operations, expected = _counted_run(eager)
    problem = _problem(workload, got, expected, exact.run(exact.function))
    del got, expected
    eager_ms, onepass_ms = _times(lambda: eager.run(eager.function), lambda: ours.run(compiled))
    return Row(workload.name, operations, explanation, eager_ms, onepass_ms, problem)


def _made(workload: Workload, dtype: torch.dtype) -> Program:
    torch.manual_seed(_SEED)
    return workload.make(dtype)


def _counted_run(program: Program) -> tuple[int, list[Tensor]]:
    """The operators eager dispatches, those called by other operators not counted."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    with torch.autograd.profiler.profile() as profile:
        outputs = program.run(program.function)
    events = [event for event in profile.function_events if event.name.startswith("aten::")]
    inner = {id(child) for event in events for child in event.cpu_children}
    return sum(id(event) not in inner for event in events), outputs


def _problem(workload: Workload, got: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> str:
    if workload.dropped:
        return _dropout_problem(got[0], exact[0], workload.dropped)
    for number, (ours, theirs, reference) in enumerate(zip(got, eager, exact, strict=True)):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"output {number} is {ours.dtype} {tuple(ours.shape)}"
        tolerance = 1e-5 * max(reference.abs().max().item(), 1e-30)
        error, allowed = _distance(ours, reference), 2 * _distance(theirs, reference) + tolerance
        if not error <= allowed:
            return f"output {number} is {error:.3g} from float64, allowed {allowed:.3g}"
    return ""


def _dropout_problem(got: Tensor, kept: Tensor, fraction: float) -> str:
    """Kept elements must be right, and as many dropped as chance allows (6 deviations)."""
    dropped = got == 0
    share, slack = dropped.double().mean().item(), 6 * (fraction * (1 - fraction) / got.numel()) ** 0.5
    if abs(share - fraction) > slack:
        return f"dropped {share:.5f} of the elements, expected {fraction}"
    error = _distance(got, torch.where(dropped, 0.0, kept))
    return "" if error <= 1e-5 * kept.abs().max().item() else f"a kept element is {error:.3g} from float64"


def _distance(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference).abs().max().item())


def _times(*runs: Callable[[], object]) -> list[float]:
    """Median milliseconds of each, in interleaved rounds; the first round warms up and does not count."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS + 1):
        for run, measured in zip(runs, times, strict=True):
            start = time.perf_counter()
            output = run()
            measured.append(1e3 * (time.perf_counter() - start))
            del output
    return [statistics.median(measured[1:]) for measured in times]


def _line(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:<34}" + "".join(
        f"{cell:>{max(11, len(head) + 2)}}" for cell, head in zip(cells[1:], _HEAD[1:], strict=True)
    )
