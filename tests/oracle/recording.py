"""Decisions as lines of text: one line per kernel, library call and fusion, sorted, without unstable names.

    = program
    forward
    kernel mul sum_1 | c0[64]: grid; c1[1000]: held; 4 warps | 3.2 us, 256000 read, 256 written
    library mm aten.mm.default | why | 14432 moved
    + vertical mul > sum_1 |  | 3.1 us, 256000 bytes
    - sibling mul > add | reason | 0 us, 0 bytes

A kernel is named by the operations of the graph that it computes. Of a pair of operations the last verdict counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from onepass.ir.record import CompileRecord, KernelRecord
from tests.oracle.planning import Planned

KEY_LETTERS = 10  # of a content key
UNASKED = "its only reader"  # a fusion that no number decides: the kernels show it
_SAVES = re.compile(r"^saves [\d.]+ us and \d+ bytes$")  # a reason that only repeats the numbers


@dataclass(frozen=True, slots=True)
class Line:
    """`value` is what was decided for the subject, `numbers` what the decision expects."""

    subject: str
    value: str
    numbers: str

    def __str__(self) -> str:
        return f"{self.subject} | {self.value} | {self.numbers}"

    @staticmethod
    def parse(text: str) -> Line:
        subject, rest = text.split(" | ", 1)
        value, numbers = rest.rsplit(" | ", 1)
        return Line(subject, value, numbers)


Graphs = dict[str, dict[str, Line]]  # direction of a graph, then subject


def decisions(planned: Planned) -> Graphs:
    """What was decided for a program, by graph."""
    graphs: Graphs = {}
    for record in planned.records:
        graphs[_unused(record.direction, graphs)] = _keyed(_lines(record))
    return graphs


def _keyed(lines: Iterable[Line]) -> dict[str, Line]:
    """Lines by subject; a number tells those of one subject apart, in the order of their text."""
    found: dict[str, Line] = {}
    for line in sorted(lines, key=str):
        subject = _unused(line.subject, found)
        found[subject] = Line(subject, line.value, line.numbers)
    return found


def _unused(name: str, taken: Mapping[str, object]) -> str:
    return next(n for n in (name, *(f"{name} #{k}" for k in range(2, len(taken) + 3))) if n not in taken)


def _lines(record: CompileRecord) -> Iterator[Line]:
    if record.fallback:
        yield Line("fallback", record.fallback, "")
    if record.saved_bytes:
        yield Line("saved", "", f"{record.saved_bytes} bytes")
    for k in record.kernels:
        numbers = f"{_us(k.predicted_us)}, {k.bytes_read} read, {k.bytes_written} written"
        yield Line(" ".join(_kernel_subject(k)), k.schedule, numbers)
    for e in record.externs:
        yield Line(f"library {e.name} {e.op}", e.why, f"{e.bytes_moved} moved")
    pairs = {(d.kind, d.producer, d.consumer): d for d in record.decisions}
    for d in pairs.values():
        if not d.reason.startswith(UNASKED):
            subject = f"{'+' if d.accepted else '-'} {d.kind} {d.producer} > {d.consumer}"
            yield Line(subject, _SAVES.sub("", d.reason), f"{_us(d.saved_us)}, {d.bytes_saved} bytes")


def _kernel_subject(kernel: KernelRecord) -> Iterator[str]:
    yield "kernel"
    if part := re.search(r"_(partial|finish)\d*$", kernel.name):
        yield f"({part.group(1)})"
    yield from sorted({operation["node"] for operation in kernel.operations})


def _us(time_us: float) -> str:
    """Four digits: more would record the order of additions."""
    return f"{time_us:.4g} us" if abs(time_us) >= 5e-4 else "0 us"


def texts(planned: Planned) -> tuple[str, ...]:
    """The content keys of a program's kernels, shortened."""
    return tuple(key[:KEY_LETTERS] for key in planned.keys)


# --- files ---


def written_decisions(programs: Mapping[str, Graphs]) -> str:
    """The file of one target."""
    lines: list[str] = []
    for name in sorted(programs):
        lines.append(f"= {name}")
        for direction, graph in programs[name].items():
            lines += [direction, *(str(line) for line in graph.values())]
    return "\n".join(lines) + "\n"


def read_decisions(text: str) -> dict[str, Graphs]:
    programs: dict[str, Graphs] = {}
    graphs: Graphs = {}
    graph: dict[str, Line] = {}
    for line in text.splitlines():
        if line.startswith("= "):
            graphs = programs[line[2:]] = {}
        elif " | " not in line:
            graph = graphs[line] = {}
        else:
            parsed = Line.parse(line)
            graph[parsed.subject] = parsed
    return programs


def written_texts(programs: Mapping[str, tuple[str, ...]]) -> str:
    return "".join(f"{name} | {' '.join(programs[name])}\n" for name in sorted(programs))


def read_texts(text: str) -> dict[str, tuple[str, ...]]:
    pairs = (line.split(" | ") for line in text.splitlines())
    return {name: tuple(keys.split()) for name, keys in pairs}
