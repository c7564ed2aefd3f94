"""The explanation as text for a terminal: what each kernel does, what was refused, and the totals."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ..ir.rates import CPU, UNMEASURED
from ..ir.record import CompileRecord, Decision, ExternRecord, KernelRecord, SavedRecord, TrialRecord
from ..ir.target import targets
from .flow import peak_of

SAVED_SHOWN = 8  # of what is kept for backward, the largest
REJECTED_SHOWN = 12  # the rest is in the JSON; the largest missed savings come first
SHORT, HOLDERS_SHOWN = 3, 3  # steps, below which memory is no question; buffers that hold it
SMALLEST_PART = 0.02  # of the cycles of a kernel that is named
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render_text(graphs: Sequence[CompileRecord]) -> str:
    """The full report."""
    if not graphs:
        return "onepass: nothing was compiled (no tensor operation was captured)"
    lines = list(_totals(graphs))
    for number, graph in enumerate(graphs, 1):
        lines += ["", *_graph(graph, number, len(graphs))]
    return "\n".join(lines)


def advice_text(advice: Sequence[str]) -> str:
    """The last lines of a report; empty where there is no advice."""
    return "\nadvice:" + "".join(f"\n  {sentence}" for sentence in advice) if advice else ""


def byte_text(count: int) -> str:
    """A byte count for people: 1536 -> "1.5 KiB"."""
    size, unit = float(count), 0
    # 1023.95 would print as "1024.0" of the smaller unit.
    while abs(size) >= 1023.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def time_text(microseconds: float) -> str:
    """A duration for people, three figures."""
    if abs(microseconds) >= 1e6:
        return f"{microseconds / 1e6:.3g} s"
    return f"{microseconds / 1e3:.3g} ms" if abs(microseconds) >= 1e3 else f"{microseconds:.3g} us"


def counted(count: int, noun: str) -> str:
    """A count with its noun: 1 kernel, 2 kernels."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counts_text(graphs: Sequence[CompileRecord]) -> str:
    """How much was compiled: 1 graph, 2 kernels, 0 externs."""
    kernels, externs = sum(len(g.kernels) for g in graphs), sum(len(g.externs) for g in graphs)
    return f"{counted(len(graphs), 'graph')}, {counted(kernels, 'kernel')}, {counted(externs, 'extern')}"


def total(graphs: Iterable[CompileRecord], field: str) -> int:
    """The sum of a field that counts bytes."""
    return sum(int(getattr(graph, field)) * graph.repeats for graph in graphs)


def ratio_text(part: int, whole: int) -> str:
    """How many times `whole` the part is; empty where there is nothing to compare."""
    return f"{part / whole:.2f}x" if whole else ""


def sizes_text(sizes: dict[str, int]) -> str:
    """What was assumed of sizes known at run time: "s0 = 64, s1 = 10"."""
    return ", ".join(f"{one_line(name)} = {size}" for name, size in sizes.items())


def short_operation(name: str) -> str:
    """An operation as people call it: "aten.add.Tensor" -> "add"; other namespaces are kept."""
    parts = name.split(".")
    if len(parts) == 3:
        return one_line(parts[1] if parts[0] in ("aten", "prims") else ".".join(parts[:2]))
    return one_line(name)


def user_line(line: str) -> str:
    """A line of the user's, its path relative to the current folder where it is inside."""
    return one_line(line.removeprefix(os.getcwd() + os.sep))


def rejected_by_size(decisions: Iterable[Decision]) -> list[Decision]:
    """Rejected fusions, each once, the largest missed saving first."""
    rejected = dict.fromkeys(d for d in decisions if not d.accepted)
    return sorted(rejected, key=lambda d: (-d.bytes_saved, d.producer, d.consumer))


def decision_line(decision: Decision) -> str:
    """One decision with the numbers that decided; where it was not legal there are none."""
    numbers = [f"{decision.saved_us:+.3g} us"] if decision.saved_us else []
    numbers += [byte_text(decision.bytes_saved)] if decision.bytes_saved else []
    shown = f" [{', '.join(numbers)}]" if numbers else ""
    return one_line(f"{decision.producer} -> {decision.consumer} ({decision.kind}): {decision.reason}{shown}")


def trial_line(trial: TrialRecord) -> str:
    """One schedule that was timed: what differs from the rules' own, and what came of it."""
    if trial.problem:
        return one_line(f"{trial.change}: {trial.problem}")
    spilled = f", {trial.spilled_bytes} bytes spilled" if trial.spilled_bytes else ""
    return one_line(f"{trial.change}: {time_text(trial.time_us)}{spilled}{', chosen' if trial.chosen else ''}")


def kernel_facts(kernel: KernelRecord) -> str:
    """The bytes and the predicted time of a kernel."""
    read, written = byte_text(kernel.bytes_read), byte_text(kernel.bytes_written)
    return f"reads {read}, writes {written}, predicted {time_text(kernel.predicted_us)}"


def issue_text(kernel: KernelRecord) -> str:
    """Which part of the machine code's cycles is whose; empty where nobody counted."""
    shown = [f"{one_line(name)} {100 * part:.0f} %" for name, part in kernel.issue.items() if part >= SMALLEST_PART]
    rest = sum(part for part in kernel.issue.values() if part < SMALLEST_PART)
    return ", ".join([*shown, *([f"others {100 * rest:.0f} %"] if rest >= SMALLEST_PART else [])])


def _totals(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    moved, saved = total(graphs, "bytes_moved"), total(graphs, "saved_bytes")
    yield f"onepass: {counts_text(graphs)}"
    yield f"  moved    {byte_text(moved):>10}"
    for name in ("unfused", "minimum"):
        count = total(graphs, f"bytes_{name}")
        yield f"  {name}  {byte_text(count):>10}  {ratio_text(count, moved)} of moved"
    if saved:
        yield f"  saved    {byte_text(saved):>10}  kept for backward, beyond the inputs"


def _graph(graph: CompileRecord, number: int, total: int) -> Iterator[str]:
    seconds = sum(graph.stage_seconds.values())
    spent = f", compiled before, in {seconds:.2f} s" if graph.cache == "hit" else f", compiled in {seconds:.2f} s"
    compiled = spent if seconds else ""
    direction = f"{graph.direction}, {counted(graph.repeats, 'time')}" if graph.direction == "rows" else graph.direction
    yield f"graph {number} of {total}: {direction}, target {graph.target}, cache {graph.cache}{compiled}"
    if graph.fallback:
        yield f"  runs as eager: {one_line(graph.fallback)}"
    if graph.graph:
        yield f"  CUDA graph: {one_line(graph.graph)}"
    known = targets().get(graph.target)
    if known is not None and known.rates in (UNMEASURED, CPU) and graph.kernels:
        yield f"  predicted times: {known.rates.source}"
    if graph.sizes:
        yield f"  any sizes; numbers are for {sizes_text(graph.sizes)}"
    for kernel in graph.kernels:
        yield from _kernel(kernel, graph.target)
    for extern in graph.externs:
        yield from _extern(extern)
    yield from _peak(graph)
    yield from _saved(graph)
    yield from _orders(graph)
    yield from _rejected(graph)


def _peak(graph: CompileRecord) -> Iterator[str]:
    """The most memory, and what holds it, where there is a choice of several steps."""
    if len(graph.flow.steps) < SHORT or (found := peak_of(graph)) is None:
        return
    during, held = found
    made = {b: s.name for s in graph.flow.steps for b in s.writes}
    largest = sorted(held, key=lambda b: -held[b])
    shown = ", ".join(f"{made[b]} {byte_text(held[b])}" for b in largest[:HOLDERS_SHOWN])
    more = f" and {len(held) - HOLDERS_SHOWN} more" if len(held) > HOLDERS_SHOWN else ""
    inputs = byte_text(sum(graph.flow.inputs.values()))
    most = f"{byte_text(sum(held.values()))} beside inputs of {inputs}, during {during.name}"
    yield one_line(f"  memory: at most {most}; results of {shown}{more}")


def saved_rows(graph: CompileRecord) -> list[tuple[int, str, str, str]]:
    """Bytes, operation and type, why and line of what is kept for backward, the most bytes first, equal ones as one."""
    equal: dict[tuple[str, str, str], list[SavedRecord]] = {}
    for saved in graph.saved:
        equal.setdefault((f"{short_operation(saved.op)} {saved.type}", saved.why, user_line(saved.line)), []).append(
            saved
        )
    rows = [
        (sum(s.bytes for s in same), f"{len(same)} x {what}" if len(same) > 1 else what, why, line)
        for (what, why, line), same in equal.items()
    ]
    return sorted(rows, key=lambda row: -row[0])


def _saved(graph: CompileRecord) -> Iterator[str]:
    if graph.saved:
        yield f"  kept for backward: {counted(len(graph.saved), 'tensor')}, {byte_text(graph.saved_bytes)}"
    rows = saved_rows(graph)
    for count, what, why, line in rows[:SAVED_SHOWN]:
        yield one_line(f"    {byte_text(count)} {what}{f': {why}' if why else ''}{f'  {line}' if line else ''}")
    if len(rows) > SAVED_SHOWN:
        yield f"    and {len(rows) - SAVED_SHOWN} smaller ones (all of them: to_json())"
    for decision in graph.decisions:
        if decision.accepted and decision.kind in ("memory", "row loop", "asked"):
            yield one_line(f"  {decision.kind}: {decision.reason}")


def asked_rows(graph: CompileRecord) -> list[tuple[str, str, str]]:
    """What was asked of the plan, by what and in which line of the user's, each once."""
    return list(dict.fromkeys((o.what, o.by, user_line(o.line)) for o in graph.orders))


def _orders(graph: CompileRecord) -> Iterator[str]:
    for what, by, line in asked_rows(graph):
        yield one_line(f"  {what}: {by}{f', {line}' if line else ''}")


def resources_text(kernel: KernelRecord, target: str) -> str:
    """What a built kernel of a GPU takes of a processor; empty where nobody counts."""
    if not kernel.registers:
        return ""
    shared = f", {byte_text(kernel.shared_bytes)} of shared memory" if kernel.shared_bytes else ""
    spilled = f", {kernel.spilled_bytes} bytes spilled" if kernel.spilled_bytes else ", nothing spilled"
    chip = targets().get(target)
    count = chip.resident_programs(kernel.registers, kernel.shared_bytes, kernel.threads) if chip is not None else 0
    resident = f", {counted(count, 'program')} at once on a processor" if count else ""
    return f"{kernel.registers} registers{spilled}{shared}{resident}"


def _kernel(kernel: KernelRecord, target: str) -> Iterator[str]:
    yield f"  kernel {one_line(kernel.name)}: {kernel_facts(kernel)}"
    if kernel.schedule:
        yield f"    schedule  {one_line(kernel.schedule)}"
    if resources := resources_text(kernel, target):
        yield f"    resources {resources}"
    if kernel.issue:
        yield f"    issue     {issue_text(kernel)}"
    if kernel.tuning:
        yield f"    tuning    {one_line(kernel.tuning)}"
        yield from (f"      {trial_line(t)}" for t in kernel.trials[1:])  # the first is in the line above
    for (count, _), part in groupby(kernel.operations, lambda o: (o.get("parts", ""), o.get("kind", ""))):
        if count:
            yield f"    {count} equal parts:"
        rows = _by_line(list(part))
        width = min(max((len(names) for names, _ in rows), default=0), 48)
        for names, line in rows:
            yield "    " + "  " * bool(count) + f"{names:<{width}}  {line}".rstrip()


def _by_line(operations: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Operations in a row that come from one line of the user's, together with that line."""
    named = [(short_operation(o.get("op", "")), user_line(o.get("line", ""))) for o in operations]
    return [(", ".join(name for name, _ in row), line) for line, row in groupby(named, lambda found: found[1])]


def _extern(extern: ExternRecord) -> Iterator[str]:
    moved, why = byte_text(extern.bytes_moved), one_line(extern.why)
    yield f"  extern {short_operation(extern.op)}: moves {moved}; {why}"
    if extern.line:
        yield f"    {user_line(extern.line)}"


def _rejected(graph: CompileRecord) -> Iterator[str]:
    rejected = rejected_by_size(graph.decisions)
    accepted = sum(d.accepted for d in graph.decisions)
    if graph.decisions:
        yield f"  fusions: {accepted} made, {len(rejected)} rejected"
    for decision in rejected[:REJECTED_SHOWN]:
        yield f"    {decision_line(decision)}"
    if len(rejected) > REJECTED_SHOWN:
        yield f"    and {len(rejected) - REJECTED_SHOWN} smaller ones (all of them: to_json())"


def one_line(text: str) -> str:
    """Text of the user's without what would break a line."""
    # Names come from the user's program; a newline in one must not break the report's lines.
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
