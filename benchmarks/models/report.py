"""The table of models as Markdown: times, ratios, first calls, memory, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..report import facts_lines, summary_text, table
from .cases import MODES

OTHERS = ("inductor", "inductor-max", "eager", "xla")
LONG_US, FAR = 20.0, 2.0  # kernels above this time should not take longer than this times their price
_TOP = 8  # kernels listed per row


def markdown(result: dict[str, Any]) -> str:
    """The whole report of one run."""
    title = f"# Whole models on {'the CPU' if result['device'] == 'cpu' else 'a GPU'}"
    parts = [facts_lines(result), _method(result)]
    parts += [_speed(result, mode) for mode in MODES]
    parts += [_problems(result), _compile(result), _memory(result), _prices(result), _by_time(result)]
    return "\n\n".join([title, *("\n".join(part) for part in parts if part)])


def _rows(result: dict[str, Any], mode: str) -> dict[str, dict[str, Any]]:
    """Measured rows of a mode, by the name of their case."""
    ending = f", {mode}"
    found = {name.removesuffix(ending): row for name, row in result["rows"].items() if name.endswith(ending)}
    return {name: row for name, row in found.items() if row.get("wall_seconds")}


def _method(result: dict[str, Any]) -> list[str]:
    how = (
        f"Random weights, dropout 0, one process per model, {result['rounds']} interleaved rounds, median wall time. "
        "Every output, the loss, every gradient and AdamW's change of every parameter are compared with float64: at "
        "most twice eager's error plus the dtype's tolerance."
    )
    if result["device"] == "cuda":
        how += " In brackets the time that at least one kernel ran, by the profiler (median of 3 calls)."
    else:
        how += (
            " Ratio of best: of the quickest rounds, which other work on the machine disturbs least. Load: programs "
            "that wanted a core in the minute before, this one included; where it is above the number of cores, the "
            "times are those of a shared machine."
        )
    if narrow := [name for name, row in result["rows"].items() if row.get("reference") == "float32"]:
        how += f" In float32, for want of memory or operators: {'; '.join(narrow)}."
    lines = [how, *(["", result["note"]] if result.get("note") else [])]
    if result["absent"]:
        lines += ["", "Not measured: " + "; ".join(f"{name} ({why})" for name, why in result["absent"].items()) + "."]
    if result["left"]:
        lines += ["", f"Left for the next run: {len(result['left'])} rows, from {result['left'][0]}."]
    return lines


# --- speed ---


def _speed(result: dict[str, Any], mode: str) -> list[str]:
    rows = _rows(result, mode)
    if not rows:
        return []
    systems = [s for s in result["systems"] if any(s in row["wall_seconds"] for row in rows.values())]
    others = [s for s in OTHERS if s in systems]
    device = result["device"] == "cuda"
    kinds = {"wall": "wall_seconds"} | ({"device": "device_seconds"} if device else {"best": "best_seconds"})
    body = []
    for name, row in rows.items():
        cells = [_time(row, system) for system in systems]
        for other in others:
            cells += [_shown(_ratio(row, other, key)) for key in kinds.values()]
        body.append([name, *cells, *([] if device else [_shown(row.get("load"))])])
    head = ["model", *(f"{s} ms" for s in systems), *(f"over {o}, {kind}" for o in others for kind in kinds)]
    head += [] if device else ["load"]
    lines = [f"## {mode.capitalize()}", "", *table(head, body)]
    for other in others:
        for kind, key in kinds.items():
            ratios = {n: r for n, row in rows.items() if (r := _ratio(row, other, key)) is not None}
            lines += ["", summary_text(f"onepass over {other}, {kind}", ratios, "models")]
    return lines


def _time(row: dict[str, Any], system: str) -> str:
    if system not in row["wall_seconds"]:
        return "failed" if system in row["problems"] else "–"
    device = row["device_seconds"].get(system)
    wrong = " WRONG" if system in row["problems"] else ""
    return f"{1e3 * row['wall_seconds'][system]:.2f}" + (f" ({1e3 * device:.2f})" if device else "") + wrong


def _ratio(row: dict[str, Any], other: str, key: str) -> float | None:
    seconds = row.get(key, {})
    return seconds[other] / seconds["onepass"] if {other, "onepass"} <= seconds.keys() else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _problems(result: dict[str, Any]) -> list[str]:
    found = [(n, where, text) for n, row in result["rows"].items() for where, text in row["problems"].items()]
    return ["## Problems", "", *(f"- **{name}, {where}: {text}**" for name, where, text in found)] if found else []


# --- compiling ---


def added(row: dict[str, Any], label: str) -> float | None:
    """What a system's first call takes above a later one, in seconds."""
    state = row.get("compile", {}).get(label, {})
    return state["first_seconds"] - state["later_seconds"] if "first_seconds" in state else None


def _compile(result: dict[str, Any]) -> list[str]:
    labels = ("aot_eager, cold", "inductor, cold", "onepass, cold", "inductor, warm", "onepass, warm")
    body, ours, theirs, warm = [], {}, {}, {}
    for name, row in result["rows"].items():
        times = {label: added(row, label) for label in labels}
        base = times["aot_eager, cold"]
        if all(seconds is None for seconds in times.values()):
            continue
        ratio = ""
        if base is not None and times["onepass, cold"] is not None and times["inductor, cold"] is not None:
            ours[name], theirs[name] = times["onepass, cold"] - base, times["inductor, cold"] - base
            ratio = f"{ours[name] / theirs[name]:.2f}"
        if base is not None and times["onepass, warm"] is not None:
            warm[name] = times["onepass, warm"] - base
        body.append([name, *("failed" if t is None else f"{t:.1f}" for t in times.values()), ratio])
    if not body:
        return []
    lines = [
        "## First calls", "",
        "Seconds of the first call less a later one, in a fresh process; cold: empty caches, warm: a second process. "
        "Added: above aot_eager, onepass over Inductor. A training step compiles the optimiser; the model is compiled.",
        "", *table(["row", *(f"{label} s" for label in labels), "added"], body),
    ]  # fmt: skip
    if ours:
        worst = max(ours, key=lambda n: ours[n] / theirs[n])
        lines += ["", f"Added in the sum: onepass {sum(ours.values()):.1f} s, Inductor {sum(theirs.values()):.1f} s, "
                  f"ratio **{sum(ours.values()) / sum(theirs.values()):.2f}**, "
                  f"highest {ours[worst] / theirs[worst]:.2f} ({worst})."]  # fmt: skip
    if warm:
        worst = max(warm, key=lambda n: warm[n])
        lines += ["", f"Warm start above aot_eager: at most {warm[worst]:+.2f} s ({worst})."]
    return lines


# --- memory and kernels ---


def _memory(result: dict[str, Any]) -> list[str]:
    if result["device"] == "cpu":
        return []
    systems = result["systems"]
    body = []
    for name, row in result["rows"].items():
        kernels, peak = row.get("kernels", {}), row.get("peak_bytes", {})
        shown = [
            f"{kernels.get(s, '?')} / {peak[s] / 2**20:.0f}" if s in peak else str(kernels.get(s, "–")) for s in systems
        ]
        body.append([name, *shown])
    return ["## Kernels launched / peak MiB above the model", "", *table(["row", *systems], body)] if body else []


def far_kernels(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Kernels that take long and longer than their price allows, the worst first."""
    far = [k for k in row.get("prices", ()) if k["measured_us"] > max(LONG_US, FAR * k["price_us"])]
    return sorted(far, key=lambda k: k["price_us"] / k["measured_us"])


def _prices(result: dict[str, Any]) -> list[str]:
    body, long = [], 0
    for name, row in result["rows"].items():
        long += sum(k["measured_us"] > LONG_US for k in row.get("prices", ()))
        for k in far_kernels(row):
            ratio = f"{k['measured_us'] / k['price_us']:.1f}" if k["price_us"] else "no price"
            shown = [f"{k['graph']} {k['kernel']}", f"{k['measured_us']:.1f}", f"{k['price_us']:.1f}", ratio]
            body.append([name, *shown, str(k["launches"])])
    if not long:
        return []
    text = f"{len(body)} of {long} generated kernels above {LONG_US:g} us take more than {FAR:g} x their price."
    head = ["row", "kernel", "measured us", "price us", "ratio", "launches"]
    return ["## Prices", "", text, *(["", *table(head, body)] if body else [])]


def _by_time(result: dict[str, Any]) -> list[str]:
    """The longest kernels of onepass and Inductor, in a folded part per row."""
    lines = ["## Where the time went", ""]
    for name, row in result["rows"].items():
        found = row.get("by_time", {})
        systems = [s for s in ("onepass", "inductor") if found.get(s)]
        if not systems:
            continue
        lines += [f"<details><summary>{name}</summary>", ""]
        for system in systems:
            lines += [
                f"{system}: " + _listed(found[system], lambda k: f"{k['name']} {k['us']:.0f} us ({k['calls']})"),
                "",
            ]
        lines += ["</details>", ""]
    return lines if len(lines) > 2 else []


def _listed(entries: Iterable[dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> str:
    return "; ".join(text(entry).replace("|", "/") for entry in list(entries)[:_TOP])
