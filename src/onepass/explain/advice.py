"""What limits a program and what to do about it: sentences, each from a record or a measurement, with its number.

`advise` reads compile records, `advise_measured` a profile too. Where nothing is to be said there is no sentence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from ..ir.record import FEW_BYTES, CompileRecord
from .measured import CallTime, Measured, StepTime
from .text import byte_text, counted, counts_text, one_line, short_operation, time_text, total, user_line

LIBRARY_SHARE = 0.7  # of the time, from which on little is left for kernels
PART = 0.15  # of all bytes, or of the time, from which on one cause is worth a sentence
OUTSIDE = 0.5  # of a call, from which on its steps are not what takes the time
SLOWER = 1.05  # times eager's time, in the median and at best
MANY_CALLS = 100  # until compiling pays
NOTHING_SAVED = 1.02  # times the bytes that move, where fusing changes nothing


def advise(graphs: Sequence[CompileRecord]) -> list[str]:
    """What the records say."""
    found = [*_fallbacks(graphs), *_breaks(graphs), *_sizes(graphs), *_wide(graphs)]
    return [*found, *_calls(graphs), *_refused(graphs), *_spills(graphs), *_nothing(graphs)]


def advise_measured(profile: Measured) -> list[str]:
    """What a profile says beyond its records."""
    eager = profile.beside("eager")
    found = [*_library(profile), *_copies(profile), *_outside(profile)]
    return [*(_against(profile, eager) if eager is not None else ()), *found]


# --- from records ---


def _fallbacks(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    for number, graph in enumerate(graphs, 1):
        if graph.fallback:
            yield f"graph {number} of {len(graphs)} runs as eager does: {_first(graph.fallback)}"


def _breaks(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    for number, graph in enumerate(graphs, 1):
        facts = graph.facts
        if facts.broken:
            at = f" at {user_line(facts.broken_at)}" if facts.broken_at else ""
            again = f"{byte_text(facts.result_bytes)} of results are written and read again"
            yield f"a graph break ends graph {number}{at} ({_first(facts.broken)}): {again}"


def _sizes(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    alike: dict[tuple[object, ...], list[CompileRecord]] = {}
    for graph in graphs:
        lines = [o.get("line", "") for k in graph.kernels for o in k.operations]
        key = (graph.direction, re.sub(r"\d+", "0", graph.program), *lines)
        alike.setdefault(key, []).append(graph)
    for same in alike.values():
        programs = {g.program for g in same}
        if len(programs) > 1 and same[0].direction != "backward" and not any(g.sizes for g in same):
            seconds = sum(sum(g.stage_seconds.values()) for g in same)
            line = next((o["line"] for k in same[0].kernels for o in k.operations if o.get("line")), "")
            at = f" (first at {user_line(line)})" if line else ""
            yield (
                f"{len(programs)} graphs are the same operations at other sizes{at}, compiled in {seconds:.2f} s: "
                "use dynamic=True"
            )


def _wide(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    for graph in graphs:
        if graph.facts.widened_operations:
            what, line = counted(graph.facts.widened_operations, "operation"), user_line(graph.facts.widened_at)
            yield f"float64 enters at {line}: {what} in it, with twice the bytes of float32"


def _calls(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    """Operations between kernels that run as eager does, and what crosses memory for them."""
    moved = total(graphs, "bytes_moved")
    for graph in graphs:
        for e in graph.externs:
            count = e.bytes_moved * graph.repeats
            takes_apart = "." not in e.op  # a tuple of results
            if not e.flops and not takes_apart and moved and count > PART * moved and graph.kernels:
                at = f" at {user_line(e.line)}" if e.line else ""
                part = f"{byte_text(count)}, {100 * count / moved:.0f} % of all that moves"
                yield f"{short_operation(e.op)}{at} is not fused ({one_line(e.why)}): {part}"


def _refused(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    """Fusions that prediction wanted and a limit forbade."""
    predicted = sum(k.predicted_us for g in graphs for k in g.kernels)
    refused = [d for g in graphs for d in g.decisions if not d.accepted and d.saved_us > PART * predicted > 0]
    for d in sorted(refused, key=lambda d: -d.saved_us)[:2]:
        saved = f"predicted to save {time_text(d.saved_us)} of {time_text(predicted)}"
        yield f"{one_line(d.producer)} and {one_line(d.consumer)} are kept apart ({one_line(d.reason)}): {saved}"


def _spills(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    for graph in graphs:
        for k in graph.kernels:
            if k.spilled_bytes > FEW_BYTES:
                yield f"{one_line(k.name)} spills {k.spilled_bytes} bytes per thread at {k.registers} registers"


def _nothing(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    moved, unfused = total(graphs, "bytes_moved"), total(graphs, "bytes_unfused")
    if moved and unfused <= NOTHING_SAVED * moved and any(g.kernels for g in graphs):
        yield f"nothing is saved by fusing: {byte_text(moved)} move either way ({counts_text(graphs)})"


# --- from measurements ---


def _against(profile: Measured, eager: CallTime) -> Iterator[str]:
    ours = profile.call
    saved_us = eager.time_us - ours.time_us
    if -saved_us > (SLOWER - 1) * eager.time_us and ours.least_us > SLOWER * eager.least_us:
        times = f"{time_text(ours.time_us)} against {time_text(eager.time_us)}"
        yield f"slower than eager here: {times}; do not compile this"
    elif saved_us > 0 and ours.first_s:
        calls = math.ceil(1e6 * (ours.first_s - eager.first_s) / saved_us)
        if calls > MANY_CALLS:
            yield (
                f"compiling pays after {calls} calls: it took {ours.first_s:.2f} s, and a call takes "
                f"{time_text(saved_us)} less than eager"
            )


def _library(profile: Measured) -> Iterator[str]:
    whole, products = profile.steps_us, _time(s for s in profile.steps if s.kind == "extern" and s.flops)
    if whole and products >= LIBRARY_SHARE * whole:
        share = f"{100 * products / whole:.0f} % of the time is library products"
        yield f"{share}: expect at most {whole / products:.2f}x from fusing the rest"


def _copies(profile: Measured) -> Iterator[str]:
    whole, copies = profile.steps_us, _time(s for s in profile.steps if s.kind == "copy")
    if whole and copies > PART * whole:
        yield f"{100 * copies / whole:.0f} % of the time ({time_text(copies)}) is copies into inputs that are changed"


def _outside(profile: Measured) -> Iterator[str]:
    call, steps = profile.call.time_us, profile.steps_us
    if steps and call - steps > OUTSIDE * call:
        part = f"{time_text(call - steps)} of {time_text(call)}"
        yield f"{part} are spent outside kernels and calls (guards, Python, launches): larger or fewer calls help"


def _time(steps: Iterable[StepTime]) -> float:
    return sum(s.time_us for s in steps)


def _first(text: str) -> str:
    return one_line((text.strip().splitlines() or [""])[0])
