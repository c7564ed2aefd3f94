"""Measured numbers as markdown tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """The whole report of one run."""
    lines = ["# CPU speed", "", *_facts(result), "", *_speed(result), "", *_compile(result)]
    return "\n".join(lines).rstrip()


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _facts(result: dict[str, Any]) -> list[str]:
    facts = result["facts"]
    return [
        f"{facts['date']}; {facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, "
        f"{facts['memory_gib']} GiB, {facts['system']}; Python {facts['python']}, torch {facts['torch']}, "
        f"{facts['compiler']}; onepass {facts['onepass']}.",
        "",
        f"Median of {result['rounds']} interleaved rounds, the same environment for all: "
        f"{', '.join(f'`{k}={v}`' for k, v in facts['environment'].items())}, transparent huge pages "
        f"`{facts['huge_pages']}`. Floor = each input read and each output written once at copy speed "
        f"({result['copy_bytes_per_second'] / 1e9:.1f} GB/s, measured in the same run)."
        + ("" if result["scale"] == 1 else f" QUICK RUN: sizes scaled by {result['scale']:.3g}, not a measurement."),
    ]


def _speed(result: dict[str, Any]) -> list[str]:
    systems = list(dict.fromkeys(s for w in result["workloads"].values() for s in w["seconds"]))
    compare = "inductor" in systems and "onepass" in systems
    last = "onepass" if "onepass" in systems else systems[-1] if systems else ""
    head = ["workload", *(f"{s} ms" for s in systems), f"{last} / floor"]
    head += ["over inductor", "over eager"] if compare else []
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for name, workload in result["workloads"].items():
        seconds = workload["seconds"]
        floor = workload["minimum_bytes"] / result["copy_bytes_per_second"]
        cells = [name, *(f"{1e3 * seconds[s]:.1f}" if s in seconds else "failed" for s in systems)]
        cells.append(f"{seconds[last] / floor:.2f}" if last in seconds else "")
        for other in ("inductor", "eager") if compare else ():
            both = other in seconds and last in seconds
            cells.append(f"{seconds[other] / seconds[last]:.2f}" if both else "")
        lines.append("| " + " | ".join(cells) + " |")
    for other in ("inductor", "eager") if compare else ():
        lines += ["", _summary(result, other)]
    for name, workload in result["workloads"].items():
        lines += [f"\n**{name}, {system}: {text}**" for system, text in workload["problems"].items()]
    return lines


def _summary(result: dict[str, Any], other: str) -> str:
    ratios = {
        name: w["seconds"][other] / w["seconds"]["onepass"]
        for name, w in result["workloads"].items()
        if other in w["seconds"] and "onepass" in w["seconds"]
    }
    if not ratios:
        return f"onepass over {other}: nothing to compare."
    worst = min(ratios, key=lambda name: ratios[name])
    return (
        f"onepass over {other}: geometric mean **{geometric_mean(ratios.values()):.2f}** over {len(ratios)} "
        f"workloads, lowest {ratios[worst]:.2f} ({worst})."
    )


def _compile(result: dict[str, Any]) -> list[str]:
    compiled = result.get("compile")
    if not compiled:
        return []
    lines = [
        "## Compile time", "",
        "First call less a later one, in a fresh process; cold = empty caches, warm = a second process.", "",
        "| system | first, cold s | others, cold s | first, warm s | others, warm s | programs started, cold | warm |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for system, states in compiled.items():
        cells = [system]
        for state in ("cold", "warm"):
            times = list(states[state].get("seconds", {}).values())
            cells += [f"{times[0]:.2f}", f"{sum(times[1:]):.2f}"] if times else ["failed", "failed"]
        cells += [str(len(states[state].get("started", []))) for state in ("cold", "warm")]
        lines.append("| " + " | ".join(cells) + " |")
    problems = [
        f"\n**{s}, {state}: {r['problem']}**" for s, t in compiled.items() for state, r in t.items() if "problem" in r
    ]
    return [*lines, *_compile_summary(compiled), *problems]


def _compile_summary(compiled: dict[str, Any]) -> list[str]:
    def times(system: str, state: str) -> list[float]:
        return list(compiled.get(system, {}).get(state, {}).get("seconds", {}).values())

    ours, theirs = times("onepass", "cold"), times("inductor", "cold")
    warm, base = times("onepass", "warm"), times("aot_eager", "warm")
    lines = []
    if ours and theirs:
        first = f"first workload {ours[0] / theirs[0]:.2f} of Inductor's time"
        others = f", the others {sum(ours[1:]) / sum(theirs[1:]):.2f}" if ours[1:] and theirs[1:] else ""
        lines += ["", f"onepass, cold: {first}{others}."]
    if warm and base:
        started = compiled["onepass"]["warm"]["started"]
        shown = "no program was started" if not started else f"started {', '.join(sorted(set(started)))}"
        lines += ["", f"onepass, warm: {sum(warm) - sum(base):+.2f} s over aot_eager for all workloads "
                  f"({warm[0] - base[0]:+.2f} s for the first); {shown}."]  # fmt: skip
    return lines
