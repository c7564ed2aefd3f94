"""What differs between two recordings, one flip after the other, and which flips are meant.

A flip has a layer: `groups` (which operations share a kernel, and which are the library's), `schedule` (factors of a
kernel's axes), `fusions` (accepted and rejected pairs, with their reasons), `numbers` (times and bytes alone).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.oracle.recording import Graphs, Line

GROUPS, SCHEDULE, FUSIONS, NUMBERS = "groups", "schedule", "fusions", "numbers"
LAYERS = (GROUPS, SCHEDULE, FUSIONS, NUMBERS)
_NUMBER = re.compile(r"-?\d[\d.e+-]*")
_MEANT = re.compile(r"^- `(?P<layers>[^`]+)` `(?P<targets>[^`]+)` `(?P<program>[^`]+)`: (?P<reason>.+)$")
MEANT, RECORDED = "## Meant", "## Recorded"


@dataclass(frozen=True, slots=True)
class Flip:
    """One decision that is not what it was."""

    program: str
    target: str
    graph: str
    layer: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.program}, {self.target}, {self.graph}, {self.layer}:\n  {self.before}\n  → {self.after}"


@dataclass(frozen=True, slots=True)
class Meant:
    """Flips that somebody answers for: layers and targets by name (`*`: all), programs by a pattern of the shell."""

    layers: tuple[str, ...]
    targets: tuple[str, ...]
    program: str
    reason: str

    def covers(self, flip: Flip) -> bool:
        wanted = (self.layers, flip.layer), (self.targets, flip.target)
        return all("*" in names or name in names for names, name in wanted) and fnmatchcase(flip.program, self.program)

    def __str__(self) -> str:
        return f"- `{' '.join(self.layers)}` `{' '.join(self.targets)}` `{self.program}`: {self.reason}"


# --- flips ---


def flips(target: str, before: Mapping[str, Graphs], after: Mapping[str, Graphs]) -> list[Flip]:
    """All that differs in programs that both recordings have."""
    return [
        Flip(program, target, graph, *difference)
        for program in sorted(before.keys() & after.keys())
        for graph in sorted(before[program].keys() | after[program].keys())
        for difference in _differences(before[program].get(graph, {}), after[program].get(graph, {}))
    ]


def _differences(old: Mapping[str, Line], new: Mapping[str, Line]) -> Iterator[tuple[str, str, str]]:
    gone, come = ([line for s, line in a.items() if s not in b] for a, b in ((old, new), (new, old)))
    steps = [[str(line) for line in lines if not _is_fusion(line)] for lines in (gone, come)]
    if any(steps):
        yield GROUPS, *("\n    ".join(lines) or "nothing" for lines in steps)
    yield from _fusions([x for x in gone if _is_fusion(x)], [x for x in come if _is_fusion(x)])
    for subject in sorted(old.keys() & new.keys()):
        was, now = old[subject], new[subject]
        if was == now:
            continue
        if _without_numbers(was) != _without_numbers(now):
            yield FUSIONS if _is_fusion(was) else SCHEDULE, str(was), str(now)
        elif subject.startswith("kernel") and was.value != now.value:  # the numbers of a schedule are factors
            yield SCHEDULE, str(was), str(now)
        else:
            yield NUMBERS, str(was), str(now)


def _fusions(gone: Sequence[Line], come: Sequence[Line]) -> Iterator[tuple[str, str, str]]:
    """Verdicts that turned, then pairs of which only one recording knows."""
    old, new = ({line.subject[2:]: str(line) for line in lines} for lines in (gone, come))
    for pair in sorted(old.keys() | new.keys()):
        yield FUSIONS, old.get(pair, "not asked"), new.get(pair, "not asked")


def _is_fusion(line: Line) -> bool:
    return line.subject[0] in "+-"


def _without_numbers(line: Line) -> str:
    return _NUMBER.sub("0", line.value)


def changed_texts(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> tuple[int, int, int]:
    """Kernels whose text is new, all kernels, and programs with a new one."""
    shared = before.keys() & after.keys()
    new = {name: set(after[name]) - set(before[name]) for name in shared}
    return sum(map(len, new.values())), sum(len(after[name]) for name in shared), sum(map(bool, new.values()))


# --- what is meant ---


def read_meant(text: str) -> list[Meant]:
    """The entries between the two headings; a line that looks like one but is none is an error."""
    listed = text.split(MEANT, 1)[1].split(RECORDED, 1)[0].splitlines()
    found: list[Meant] = []
    for line in (line for line in listed if line.startswith("-")):
        if (match := _MEANT.match(line)) is None:
            raise SystemExit(f"flips.md: not an entry: {line}")
        layers = tuple(match["layers"].split())
        if unknown := set(layers) - {*LAYERS, "*"}:
            raise SystemExit(f"flips.md: no such layer: {', '.join(sorted(unknown))}")
        found.append(Meant(layers, tuple(match["targets"].split()), match["program"], match["reason"]))
    return found


def answer(found: Sequence[Flip], meant: Sequence[Meant]) -> tuple[list[Flip], dict[Meant, list[Flip]]]:
    """The flips that nobody answers for, and those of each entry; the first entry that covers a flip has it."""
    open_flips: list[Flip] = []
    answered: dict[Meant, list[Flip]] = {entry: [] for entry in meant}
    for flip in found:
        entry = next((entry for entry in meant if entry.covers(flip)), None)
        (open_flips if entry is None else answered[entry]).append(flip)
    return open_flips, answered


def with_recorded(text: str, answered: Mapping[Meant, Sequence[Flip]]) -> str:
    """`flips.md` after a recording: entries that covered flips move down, with how many there were."""
    used = {entry: found for entry, found in answered.items() if found}
    for entry, found in used.items():
        counts = Counter(flip.layer for flip in found)
        shown = ", ".join(f"{counts[layer]} {layer}" for layer in LAYERS if counts[layer])
        text = text.replace(f"{entry}\n", "")
        text = text.rstrip("\n") + f"\n{entry} ({shown})\n"
    return text
