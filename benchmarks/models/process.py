"""One model in this fresh process: `python -m benchmarks.models.process first "Llama, large, bf16" --systems onepass`.

`first` gives one system's first call and a later one, per mode; `measure` runs all systems in turns, checks their
values, times them and profiles one call. The parent names the folder of the caches, and gives it empty or filled.
Prints JSON last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import timing
from ..systems import cache_variables, compiled, first_line, missing
from ..turns import MEASURING, turn
from .cases import INFERENCE, MODES, STEP, find_case
from .profiles import kernels_by_time, operations_by_time, prices
from .subject import Subject, Values

_PROFILES = 3
_PER_SYSTEM = (
    "wall_seconds", "best_seconds", "device_seconds", "first_call_seconds", "kernels", "peak_bytes", "by_time",
    "problems", "skipped",
)  # fmt: skip


def first_calls(subject: Subject, system: str, modes: list[str]) -> dict[str, Any]:
    """Seconds of the first call and of a later one, per mode, after eager has run."""
    found: dict[str, Any] = {}
    for mode in modes:
        try:
            subject.set_mode(mode)
            subject.runner(mode, "eager").call()
            call = subject.runner(mode, system).call
            found[mode] = {"first_seconds": _elapsed(call, subject), "later_seconds": _elapsed(call, subject)}
        except Exception as error:
            found[mode] = {"problem": first_line(error)}
    return found


def _elapsed(call: Callable[[], Any], subject: Subject) -> float:
    _synchronize(subject)
    start = time.perf_counter()
    call()
    _synchronize(subject)
    return time.perf_counter() - start


def _synchronize(subject: Subject) -> None:
    if subject.device == "cuda":
        torch.cuda.synchronize()


class Measuring:
    """Every mode of one model by every system. `records`: of the graphs that onepass compiled for a mode.

    `lock`: a file by which processes take turns; they compile side by side where nothing is measured.
    """

    def __init__(self, subject: Subject, systems: list[str], rounds: int, caches: str, lock: str = "") -> None:
        self.subject, self.systems, self.rounds, self.caches = subject, systems, rounds, caches
        self.lock = lock
        self.records: list[Any] = []

    def measure(self, mode: str) -> dict[str, Any]:
        row: dict[str, Any] = {key: {} for key in _PER_SYSTEM} | {"prices": []}
        try:
            self._measure_into(row, mode)
        except Exception as error:  # eager itself, or the clock
            row["problems"]["the model"] = first_line(error)
        return row

    def _measure_into(self, row: dict[str, Any], mode: str) -> None:
        self.subject.set_mode(mode)
        if mode != STEP:
            self.records = []
        with turn(self.lock):
            eager = self.subject.runner(mode, "eager").values()
            gradients = {name: value for name, value in eager.items() if name.startswith("gradient")}
            expected = gradients, eager, self._reference(row, mode, gradients)
        calls = self._ready(row, mode, [s for s in self.systems if s not in MEASURING], expected)
        with turn(self.lock):
            calls |= self._ready(row, mode, [s for s in self.systems if s in MEASURING], expected)
            self._time(row, calls)

    def _time(self, row: dict[str, Any], calls: timing.Calls) -> None:
        row["load"] = os.getloadavg()[0]  # above 1 or 2, other programs take part of the cores
        found = timing.clocked(calls, self.rounds, flushed=self.subject.device == "cuda")
        row["wall_seconds"] = {system: statistics.median(seconds) for system, seconds in found.items()}
        row["best_seconds"] = {system: min(seconds) for system, seconds in found.items()}
        for system, call in calls.items():
            try:
                self._profile(row, system, call)
            except Exception as error:
                row["problems"][f"{system}, profile"] = first_line(error)

    def _ready(
        self, row: dict[str, Any], mode: str, systems: list[str], expected: tuple[Values, Values, Values]
    ) -> timing.Calls:
        """Each system's call after its first one, which gave the values that were checked."""
        calls: timing.Calls = {}
        for system in systems:
            if reason := self._nothing_to_run(system, mode):
                row["skipped"][system] = reason
                continue
            os.environ.update(cache_variables(self.caches, system))
            try:
                with self._recording(system):
                    calls[system] = self._first(row, mode, system, *expected)
            except Exception as error:
                row["problems"][system] = first_line(error)
        return calls

    def _reference(self, row: dict[str, Any], mode: str, gradients: Values) -> Values:
        """In float64; where memory or an operator does not allow it, in float32."""
        row["reference"] = "float64"
        try:
            return self.subject.reference(mode, gradients)
        except (RuntimeError, NotImplementedError):
            row["reference"] = "float32"
        return self.subject.reference(mode, gradients, torch.float32)

    def _first(
        self, row: dict[str, Any], mode: str, system: str, gradients: Values, eager: Values, exact: Values
    ) -> Callable[[], Any]:
        runner = self.subject.runner(mode, system, gradients)
        _synchronize(self.subject)
        start = time.perf_counter()
        values = runner.values()
        _synchronize(self.subject)
        row["first_call_seconds"][system] = time.perf_counter() - start
        if problem := self.subject.problem(values, eager, exact):
            row["problems"][system] = problem  # wrong values are timed, too, so that the row says how far it is
        return runner.call

    @contextmanager
    def _recording(self, system: str) -> Iterator[None]:
        if system != "onepass":
            yield
            return
        from onepass.backend import record_compilations

        with record_compilations() as records:
            yield
        self.records += records

    def _nothing_to_run(self, system: str, mode: str) -> str:
        if system == "xla":
            return missing("xla", self.subject.device) or ("not written in JAX" if mode == STEP else "")
        return ""

    def _profile(self, row: dict[str, Any], system: str, call: Callable[[], Any]) -> None:
        """Device time, launches, memory, and what took how long."""
        if self.subject.device == "cpu":
            row["by_time"][system] = operations_by_time(call)
            if system == "onepass":
                row["kernels"][system] = sum(len(record.kernels) for record in self.records)
            return
        profiles = [spans for _ in range(_PROFILES) if (spans := timing.kernel_spans(call))]
        if profiles:
            row["device_seconds"][system] = statistics.median(map(timing.busy_seconds, profiles))
            row["kernels"][system] = timing.launches(profiles[-1])
            row["by_time"][system] = kernels_by_time(profiles[-1])
        if system == "onepass" and profiles:
            row["prices"] = prices(profiles, self.records)
        if system != "xla":
            row["peak_bytes"][system] = timing.peak_bytes(call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("first", "measure"))
    parser.add_argument("case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--systems", required=True)
    parser.add_argument("--modes", default=INFERENCE, help=f"separated by ';', of {'; '.join(MODES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caches", default="")
    parser.add_argument("--lock", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    systems, modes = arguments.systems.split(","), arguments.modes.split(";")
    try:
        subject = Subject(find_case(arguments.case, arguments.device), arguments.device)
        if arguments.role == "first":
            compiled(systems[0], torch.relu)  # its import is no compilation
            found: dict[str, Any] = first_calls(subject, systems[0], modes)
        else:
            measuring = Measuring(subject, systems, arguments.rounds, arguments.caches, arguments.lock)
            found = {mode: measuring.measure(mode) for mode in modes}
    except Exception as error:
        found = {"problem": first_line(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
