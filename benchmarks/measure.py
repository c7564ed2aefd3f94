"""One workload by every system: compiled, checked, timed. A system that fails is reported, never hidden."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
from torch import Tensor

from . import timing
from .systems import CEILING, LIBRARIES, cache_variables, first_line, runner, skipped
from .turns import MEASURING, turn
from .workloads import Prepared, Workload, check_values

_PER_SYSTEM = (
    "seconds",
    "wall_seconds",
    "waiting_seconds",
    "first_call_seconds",
    "kernels",
    "peak_bytes",
    "problems",
    "skipped",
)


def measure(
    workload: Workload, systems: list[str], scale: float, rounds: int, device: str, caches: str, lock: str = ""
) -> dict[str, Any]:
    """Median seconds per system with its compile time, launches and memory; values checked.

    `lock`: a file by which processes take turns; they compile side by side where nothing is measured.
    """
    result = nothing_measured()
    try:
        _measure_into(result, Prepared(workload, scale, device), systems, rounds, device, caches, lock)
    except Exception as error:  # eager itself, or the clock
        result["problems"]["the workload"] = first_line(error)
    forget(device)
    return result


def nothing_measured() -> dict[str, Any]:
    """A row without times."""
    return {"minimum_bytes": 0, "minimum_flops": 0.0, **{key: {} for key in _PER_SYSTEM}}


def _measure_into(
    result: dict[str, Any], prepared: Prepared, systems: list[str], rounds: int, device: str, caches: str, lock: str
) -> None:
    torch._dynamo.reset()
    with turn(lock):
        eager, reference = prepared.call(prepared.workload.function), prepared.reference()
        _finish(eager)
        if device == "cuda":
            torch.cuda.empty_cache()  # processes beside this one need the memory
    checked_by = str(prepared.reference_type()).removeprefix("torch.")
    result |= {
        "minimum_bytes": prepared.minimum_bytes(eager),
        "minimum_flops": prepared.minimum_flops(),
        "reference": "distribution" if prepared.workload.random else checked_by,
    }
    others = [s for s in systems if s not in MEASURING]
    calls = _ready(prepared, others, eager, reference, caches, result)
    with turn(lock):
        calls |= _ready(prepared, [s for s in systems if s in MEASURING], eager, reference, caches, result)
        del eager, reference
        result |= timing.times({s: calls[s] for s in systems if s in calls}, rounds, device)
        _count(prepared, calls, device, result)


def _ready(
    prepared: Prepared,
    systems: list[str],
    eager: tuple[Tensor, ...],
    reference: tuple[Tensor, ...],
    caches: str,
    result: dict[str, Any],
) -> timing.Calls:
    """Each system's call after its first one, which compiled it and gave the values that were checked.

    A system whose values are wrong has no time: a fast wrong answer is no result.
    """
    calls: timing.Calls = {}
    for system in systems:
        if reason := skipped(system, prepared.workload):
            result["skipped"][system] = reason
            continue
        problem = ""
        if caches:
            os.environ.update(cache_variables(caches, system))
        try:
            ready = runner(system, prepared)
            start = time.perf_counter()
            values = ready.values()
            _finish(values)
            result["first_call_seconds"][system] = time.perf_counter() - start
            if system != CEILING:
                problem = check_values(prepared, values, eager, reference, same_layout=system not in LIBRARIES)
            del values
        except Exception as error:
            problem = first_line(error)
        if problem:
            result["problems"][system] = problem
        else:
            calls[system] = ready.call
    return calls


def _finish(values: tuple[Tensor, ...]) -> None:
    if any(v.is_cuda for v in values):
        torch.cuda.synchronize()


def _count(prepared: Prepared, calls: timing.Calls, device: str, result: dict[str, Any]) -> None:
    """Launches and memory per call; on the CPU only onepass can say how many kernels it has."""
    for system, call in calls.items():
        try:
            if device == "cuda":
                if spans := timing.kernel_spans(call):
                    result["kernels"][system] = timing.launches(spans)
                if system != "xla":
                    result["peak_bytes"][system] = timing.peak_bytes(call)
            elif system == "onepass":
                import onepass

                explained = onepass.explain(prepared.workload.function, *prepared.arguments)
                result["kernels"][system] = len(explained.kernels)
        except Exception as error:
            result["problems"][f"{system}, counting"] = first_line(error)


def forget(device: str) -> None:
    """Give back what the last workload held."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
