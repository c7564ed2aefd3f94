"""Measured numbers as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .systems import CEILING

OTHERS = ("inductor", "inductor-max", "eager", "xla", "hand", "sdpa-cudnn", "sdpa-flash", "flex")


def markdown(result: dict[str, Any]) -> str:
    """The whole report of one run."""
    title = "# CPU speed" if result["device"] == "cpu" else "# GPU speed"
    title += f", {result['set']}" if result["set"] != "memory" else ""
    parts = [facts_lines(result), _method(result), _speed(result), _launches(result)]
    parts.append(_compile(result) if result["set"] == "memory" else _first_calls(result))
    return "\n\n".join([title, *("\n".join(part) for part in parts if part)])


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def floor_seconds(workload: dict[str, Any], ceilings: dict[str, Any]) -> float:
    """The fewest bytes at the copy's bandwidth or the fewest FLOPs at the matmul's rate, whichever takes longer."""
    by_bytes: float = workload["minimum_bytes"] / ceilings["bytes_per_second"]
    by_flops: float = workload["minimum_flops"] / ceilings["flops_per_second"]
    return max(by_bytes, by_flops)


def measured_systems(result: dict[str, Any]) -> list[str]:
    """The systems that gave a number or a problem, in the order asked for."""
    found = {s for w in result["workloads"].values() for key in ("seconds", "problems") for s in w[key]}
    return [system for system in result["systems"] if system in found]


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """Markdown lines; all columns but the first are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def facts_lines(result: dict[str, Any]) -> list[str]:
    """Hardware, versions, date and commit."""
    facts = result["facts"]
    chip = f"{facts['device']} ({facts['device_memory_gib']} GiB), " if result["device"] == "cuda" else ""
    versions = "".join(f", {p} {facts[p]}" for p in ("triton", "jax") if facts.get(p))
    return [
        f"{facts['date']}; {chip}{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, "
        f"{facts['memory_gib']} GiB, {facts['system']}; Python {facts['python']}, torch {facts['torch']}{versions}, "
        f"{facts['compiler']}; onepass {facts['onepass']}."
    ]


def ceilings_text(result: dict[str, Any]) -> str:
    """The two ceilings, in a form for people."""
    ceilings = result["ceilings"]
    return (
        f"copy {ceilings['bytes_per_second'] / 1e9:.1f} GB/s, matmul ({ceilings['matmul']}) "
        f"{ceilings['flops_per_second'] / 1e12:.2f} TFLOP/s, measured in the same run"
    )


def quick_text(result: dict[str, Any]) -> str:
    return "" if result["scale"] == 1 else " QUICK RUN: small sizes, not a measurement."


def _method(result: dict[str, Any]) -> list[str]:
    facts = result["facts"]
    if result["device"] == "cpu":
        how = (
            f"Median of {result['rounds']} interleaved rounds, the same environment for all: "
            f"{', '.join(f'`{k}={v}`' for k, v in facts['environment'].items())}, transparent huge pages "
            f"`{facts['huge_pages']}`."
        )
    else:
        how = (
            f"Device time by events, median of {result['rounds']} interleaved rounds, the L2 cache flushed before each "
            "run (xla: the span of its kernels in a profile)."
        )
    floor = f" Floor = max(fewest bytes / bandwidth, fewest FLOPs / rate): {ceilings_text(result)}."
    absent = [f"\nNot measured, {system}: {reason}." for system, reason in result["missing"].items()]
    return [how + floor + quick_text(result), *_libraries_text(result), *absent]


def _libraries_text(result: dict[str, Any]) -> list[str]:
    """What the contractions are and what stands beside them."""
    if result["set"] != "contractions":
        return []
    text = (
        "In bfloat16. Attention is plain math over 4 x 16 heads of 4096 x 128 unless the name says otherwise. FLOPs "
        "are those of the matrix products, of masked ones only the part inside. SDPA and flex_attention compute the "
        "same; what stands around them is compiled by Inductor. A sample of the values is checked against a wide type, "
        "all against eager."
    )
    if CEILING in result["systems"]:
        text += (
            f" {CEILING}*: the bare matmuls without their neighbours, int8 operands dequantised and weights joined "
            "before: not the same work, a ceiling and not a competitor."
        )
    return ["", text]


def _ms(seconds: float, device: str) -> str:
    digits = 4 if device == "cuda" else 1 if seconds >= 1e-3 else 3
    return f"{1e3 * seconds:.{digits}f}"


def cell(workload: dict[str, Any], system: str, text: str | None) -> str:
    """A number, or why there is none."""
    if text is not None:
        return text
    return "–" if system in workload.get("skipped", {}) else "failed"


def _speed(result: dict[str, Any]) -> list[str]:
    systems, device = measured_systems(result), result["device"]
    others = [s for s in OTHERS if s in systems and "onepass" in systems]
    last = "onepass" if "onepass" in systems else systems[-1] if systems else ""
    rows = []
    for name, workload in result["workloads"].items():
        seconds, floor = workload["seconds"], floor_seconds(workload, result["ceilings"])
        row = [name, _ms(floor, device)]
        row += [cell(workload, s, _ms(seconds[s], device) if s in seconds else None) for s in systems]
        row.append(f"{seconds[last] / floor:.2f}" if last in seconds else "")
        row += [f"{seconds[o] / seconds[last]:.2f}" if o in seconds and last in seconds else "" for o in others]
        rows.append(row)
    shown = [f"{s}*" if s == CEILING else s for s in systems]
    head = ["workload", "floor ms", *(f"{s} ms" for s in shown), f"{last} / floor", *(f"over {o}" for o in others)]
    lines = table(head, rows)
    for other in others:
        lines += ["", _summary(result, other)]
        if any(other in w.get("waiting_seconds", {}) for w in result["workloads"].values()):
            lines[-1] += f" {_summary(result, other, 'waiting_seconds', 'Where the device may wait for the host')}"
    for name, workload in result["workloads"].items():
        lines += [f"\n**{name}, {system}: {text}**" for system, text in workload["problems"].items()]
    return lines


def _summary(result: dict[str, Any], other: str, which: str = "seconds", label: str = "") -> str:
    found = {name: w.get(which, {}) for name, w in result["workloads"].items()}
    ratios = {n: s[other] / s["onepass"] for n, s in found.items() if other in s and "onepass" in s}
    return summary_text(label or f"onepass over {other}", ratios, "workloads")


def summary_text(label: str, ratios: dict[str, float], noun: str) -> str:
    """The mean and the lowest ratio, named."""
    if not ratios:
        return f"{label}: nothing to compare."
    worst = min(ratios, key=lambda name: ratios[name])
    return (
        f"{label}: geometric mean **{geometric_mean(ratios.values()):.2f}** over {len(ratios)} "
        f"{noun}, lowest {ratios[worst]:.2f} ({worst})."
    )


def _launches(result: dict[str, Any]) -> list[str]:
    """Wall time, kernels and peak memory per call; the CPU knows only onepass's kernels, which the JSON has."""
    if result["device"] == "cpu":
        return []
    systems = measured_systems(result)
    rows = []
    for name, workload in result["workloads"].items():
        row = [name]
        for system in systems:
            wall, peak = workload["wall_seconds"].get(system), workload["peak_bytes"].get(system)
            parts = [
                f"{1e3 * wall:.3f}" if wall is not None else "?",
                str(workload["kernels"].get(system, "?")),
                f"{peak / 2**20:.0f}" if peak is not None else "?",
            ]
            row.append(cell(workload, system, " / ".join(parts) if wall is not None else None))
        rows.append(row)
    lines = ["## Launches and memory", "", "Wall time in ms / kernels launched / peak MiB above the inputs, per call."]
    lines += ["", *table(["workload", *systems], rows)]
    for label, row in result.get("host", {}).items():
        shown = ", ".join(f"{system} {1e6 * s:.1f} us" for system, s in row.items())
        lines += ["", f"Host time per call, {label}: {shown}."]
    lines += [f"\n**Host time, {which}: {text}**" for which, text in result.get("host_problems", {}).items()]
    return lines


def _first_calls(result: dict[str, Any]) -> list[str]:
    """What the first calls took, where no fresh processes measured compile times."""
    totals: dict[str, list[float]] = {}
    for workload in result["workloads"].values():
        for system, seconds in workload["first_call_seconds"].items():
            totals.setdefault(system, []).append(seconds)
    shown = ", ".join(f"{s} {sum(totals[s]):.1f} s ({len(totals[s])})" for s in result["systems"] if s in totals)
    return [f"First calls, which compile, of all workloads that a system ran (how many): {shown}."] if shown else []


def _compile(result: dict[str, Any]) -> list[str]:
    compiled = result.get("compile")
    if not compiled:
        return []
    rows = []
    for system, states in compiled.items():
        row = [system]
        for state in ("cold", "warm"):
            times = list(states[state].get("seconds", {}).values())
            row += [f"{times[0]:.2f}", f"{sum(times[1:]):.2f}"] if times else ["failed", "failed"]
        rows.append(row + [str(len(states[state].get("started", []))) for state in ("cold", "warm")])
    head = ["system", "first, cold s", "others, cold s", "first, warm s", "others, warm s"]
    lines = [
        "## Compile time", "",
        "First call less a later one, in a fresh process; cold = empty caches, warm = a second process.", "",
        *table([*head, "programs started, cold", "warm"], rows),
    ]  # fmt: skip
    for system, states in compiled.items():
        for state, found in states.items():
            if "problem" in found:
                lines.append(f"\n**{system}, {state}: {found['problem']}**")
            lines += [f"\n**{system}, {state}, {name}: {text}**" for name, text in found.get("problems", {}).items()]
    return [*lines, *_compile_summary(compiled)]


def _compile_summary(compiled: dict[str, Any]) -> list[str]:
    def times(system: str, state: str) -> dict[str, float]:
        seconds: dict[str, float] = compiled.get(system, {}).get(state, {}).get("seconds", {})
        return seconds

    def paired(one: dict[str, float], two: dict[str, float]) -> tuple[list[float], list[float]]:
        names = [name for name in one if name in two]
        return [one[n] for n in names], [two[n] for n in names]

    ours, theirs = paired(times("onepass", "cold"), times("inductor", "cold"))
    warm, base = paired(times("onepass", "warm"), times("aot_eager", "warm"))
    lines = []
    if ours:
        first = f"first workload {ours[0] / theirs[0]:.2f} of Inductor's time"
        others = f", the others {sum(ours[1:]) / sum(theirs[1:]):.2f}" if ours[1:] else ""
        lines += ["", f"onepass, cold: {first}{others}."]
    if warm:
        started = compiled["onepass"]["warm"]["started"]
        shown = "no program was started" if not started else f"started {', '.join(sorted(set(started)))}"
        lines += ["", f"onepass, warm: {sum(warm) - sum(base):+.2f} s over aot_eager for all workloads "
                  f"({warm[0] - base[0]:+.2f} s for the first); {shown}."]  # fmt: skip
    return lines
