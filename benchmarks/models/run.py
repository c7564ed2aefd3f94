"""The table of models: every case in processes of its own, rows kept as they are measured.

Per case: `aot_eager`, Inductor and onepass each make a first call in a fresh process with empty caches and another in a
second process with the filled ones; then one process measures all systems in turns. A case is the smallest part of a
run: `--minutes` starts no case that would end too late, `--shard 2/5` takes every fifth. With `--at-once 6` six cases
compile side by side, which takes most of the time, and take turns where something is measured.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from ..compile_time import in_fresh_process
from ..kept import Kept
from ..systems import cache_variables
from .cases import Case, Row

BASE = "aot_eager"  # compiles nothing: what dynamo and AOTAutograd take
TIMED_FIRST = (BASE, "inductor", "onepass")
EXTRA = ("inductor-max", "xla")  # systems that only some cases have
_PROCESS = f"{__package__}.process"
_LIMIT_SECONDS = 1200.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a case is measured."""

    device: str
    systems: list[str]
    rounds: int
    compile_time: bool
    at_once: int = 1  # cases; with more than one, compile times are those of a busy machine
    lock: str = ""  # a file that those take turns by


def measure_case(case: Case, modes: list[str], settings: Settings) -> dict[str, dict[str, Any]]:
    """A row per mode."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        first = _first_calls(case, modes, settings, caches) if settings.compile_time else {}
        systems = [s for s in settings.systems if s not in EXTRA or s in case.extra]
        arguments = [f"--systems={','.join(systems)}", f"--rounds={settings.rounds}", f"--caches={caches}"]
        arguments += [f"--lock={settings.lock}"] if settings.lock else []
        found = _process("measure", case, modes, settings.device, arguments, dict(os.environ))
    seconds = time.perf_counter() - start
    return {mode: _row(found, mode, first) | {"case_seconds": seconds} for mode in modes}


def _row(found: dict[str, Any], mode: str, first: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = found.get(mode) or {"problems": {"the model": found.get("problem", "no result")}}
    row["compile"] = {label: per_mode.get(mode, per_mode) for label, per_mode in first.items()}
    for label, state in row["compile"].items():
        if "problem" in state and "the model" not in row["problems"]:
            row["problems"][f"first call, {label}"] = state["problem"]
    return row


def _first_calls(case: Case, modes: list[str], settings: Settings, caches: str) -> dict[str, Any]:
    """`system, cold` and `system, warm`: first and later call, per mode."""
    found = {}
    for system in TIMED_FIRST:
        if system != BASE and system not in settings.systems:
            continue
        environment = {**os.environ, **cache_variables(caches, system)}
        for state in ("cold",) if system == BASE else ("cold", "warm"):
            found[f"{system}, {state}"] = _process(
                "first", case, modes, settings.device, [f"--systems={system}"], environment
            )
    return found


def _process(
    role: str, case: Case, modes: list[str], device: str, arguments: list[str], environment: dict[str, str]
) -> dict[str, Any]:
    given = [role, case.name, f"--device={device}", f"--modes={';'.join(modes)}", *arguments]
    return in_fresh_process(_PROCESS, given, {**environment, "KINETO_LOG_LEVEL": "99"}, _LIMIT_SECONDS)


# --- all cases ---


def absent_library(row: Row) -> str:
    """The library that a row needs and that is not here; empty if there is none."""
    needed = row.case.model.needs
    return needed if needed and importlib.util.find_spec(needed) is None else ""


def part_of(rows: Sequence[Row], shard: str) -> list[Row]:
    """The rows of the cases that belong to part K of N, given as `K/N`; all without one."""
    cases = list(dict.fromkeys(row.case for row in rows))
    number, count = (int(word) for word in (shard or "1/1").split("/"))
    if not 1 <= number <= count:
        raise SystemExit(f"--shard {shard}: the first number is 1 to {count}")
    chosen = set(cases[number - 1 :: count])
    return [row for row in rows if row.case in chosen]


def run_rows(
    rows: Sequence[Row], settings: Settings, kept: Kept, minutes: float, say: Callable[[str], None],
    measure: Callable[[Case, list[str], Settings], dict[str, dict[str, Any]]] = measure_case,
) -> dict[str, Any]:  # fmt: skip
    """Rows by name, those kept included; which are missing for want of a library; which are left for the next run."""
    absent = {row.name: f"{library} is not installed" for row in rows if (library := absent_library(row))}
    for name, reason in absent.items():
        say(f"{name} is not measured: {reason}")
    there = [row for row in rows if row.name not in absent]
    start, longest = time.perf_counter(), 0.0
    cases = list(dict.fromkeys(row.case for row in there if row.name not in kept.rows))

    def measured(case: Case) -> dict[str, dict[str, Any]]:
        nonlocal longest
        began = time.perf_counter()
        if minutes and longest and began - start + longest > 60 * minutes:
            say(f"stopped before {case.name}: it would end after {minutes:g} minutes")
            return {}
        modes = [row.mode for row in there if row.case == case and row.name not in kept.rows]
        found = measure(case, modes, settings)
        longest = max(longest, time.perf_counter() - began)
        return found

    with ThreadPoolExecutor(settings.at_once) as pool:
        waiting = {pool.submit(measured, case): case for case in cases}
        for number, ended in enumerate(as_completed(waiting), 1):
            for mode, values in ended.result().items():
                name = Row(waiting[ended], mode).name
                kept.row(name, lambda values=values: values)
                say(f"[{number}/{len(cases)}] {name}: {progress_text(values)}")
    done = {row.name: kept.rows[row.name] for row in there if row.name in kept.rows}
    left = [row.name for row in there if row.name not in kept.rows]
    return {"rows": done, "absent": absent, "left": left}


def progress_text(measured: dict[str, Any]) -> str:
    """One row's times and problems in a line."""
    wall, device = measured.get("wall_seconds", {}), measured.get("device_seconds", {})
    shown = [f"{s} {1e3 * t:.2f} ms" + (f" ({1e3 * device[s]:.2f})" if s in device else "") for s, t in wall.items()]
    return "  ".join(shown) + "".join(f"  PROBLEM {where}: {text}" for where, text in measured["problems"].items())
