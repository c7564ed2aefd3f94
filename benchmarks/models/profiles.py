"""Where a call's time went: its kernels by time, and onepass's kernels beside their prices."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..timing import Span, own_spans

LISTED = 15  # kernels of a call, those that take longest
ENTRY = re.compile(r"\b(onepass_\w+)\(")  # the name of a kernel's function, in its text
ByTime = list[dict[str, Any]]  # name, calls, microseconds of all calls together


def kernels_by_time(spans: Iterable[Span]) -> ByTime:
    """The kernels that take longest; all calls of one name together."""
    totals: dict[str, list[float]] = {}
    for name, start, end in own_spans(spans):
        totals.setdefault(name, []).append(end - start)
    return _longest({name: (len(times), sum(times)) for name, times in totals.items()})


def operations_by_time(call: Callable[[], Any]) -> ByTime:
    """On a CPU: operators by their own time; generated kernels are the own time of the compiled region."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    averages = profiler.key_averages()
    return _longest({e.key: (e.count, e.self_cpu_time_total) for e in averages})


def _longest(totals: dict[str, tuple[int, float]]) -> ByTime:
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])[:LISTED]
    return [{"name": name[:120], "calls": calls, "us": round(us, 1)} for name, (calls, us) in ordered]


def prices(profiles: Sequence[list[Span]], records: Sequence[Any]) -> list[dict[str, Any]]:
    """Each generated kernel's measured microseconds (median of the profiles) and its price.

    Kernels run on one stream in the order of their graphs, so the n-th launch is the n-th kernel of the records where
    the names agree. Where they do not (graphs run in another order), a name's kernels are compared by their means.
    """
    kernels = [(record.direction, _entry(k), k) for record in _in_order(records) for k in record.kernels]
    runs = [_ours(spans) for spans in profiles]
    names = [entry for _, entry, _ in kernels]
    if all([name for name, _ in run] == names for run in runs):
        times = [statistics.median(run[n][1] for run in runs) for n in range(len(kernels))]
        return [
            {"graph": direction, "kernel": k.name, "launches": 1, "measured_us": us, "price_us": k.predicted_us}
            for (direction, _, k), us in zip(kernels, times, strict=True)
        ]
    return _by_name(runs[-1], [(entry, k.predicted_us) for _, entry, k in kernels])


def _in_order(records: Sequence[Any]) -> list[Any]:
    """As they run: forward graphs, backward graphs from last to first, then the optimiser's."""
    forward = [r for r in records if r.direction == "forward"]
    backward = [r for r in records if r.direction == "backward"]
    return [*forward, *reversed(backward), *(r for r in records if r.direction not in ("forward", "backward"))]


def _ours(spans: Iterable[Span]) -> list[tuple[str, float]]:
    return [(name, end - start) for name, start, end in own_spans(spans) if name.startswith("onepass_")]


def _entry(kernel: Any) -> str:
    found = ENTRY.search(kernel.source)
    return found.group(1) if found else ""


def _by_name(run: list[tuple[str, float]], priced: list[tuple[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys(name for name, _ in run):
        measured = [us for other, us in run if other == name]
        price = [us for other, us in priced if other == name]
        rows.append(
            {
                "graph": "all of this name",
                "kernel": name,
                "launches": len(measured),
                "measured_us": statistics.mean(measured),
                "price_us": statistics.mean(price) if price else 0.0,
            }
        )
    return rows
