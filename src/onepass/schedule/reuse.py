"""What the chip's cache should hold on to, for programs of tiles.

A row too long to be held is swept twice: the first sweep asks the cache to keep it, the last gives it up, so that the
rows on their way stay and what was written does not push them out. Nothing else gains: streams that are read once ran
up to 5 % slower where they were marked to be given up first, and small tensors stay by themselves.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.access import storage_bytes
from ..ir.kernel import LoadElement, Loop, Statement, When, rewritten
from ..ir.program import Buffer
from ..ir.target import Target

Path = tuple[int, ...]  # positions of the loops around a statement


def mark_reuse(body: tuple[Statement, ...], target: Target) -> tuple[Statement, ...]:
    """The statements, each load with its `reuse`. A sweep whose end needs masks has two loads: the last half is the
    last sweep."""
    places: dict[Buffer, dict[str, Path]] = {}
    _collect(body, (), places)
    marks: dict[str, str] = {}
    for buffer, found in places.items():
        if len(set(found.values())) == len(found) > 1 and larger_than_cache(buffer, target):
            first = len(found) - len(found) // 2
            marks |= {name: "again" if k < first else "never" for k, name in enumerate(found)}

    def mark(s: Statement) -> Statement:
        return replace(s, reuse=marks[s.var.name]) if isinstance(s, LoadElement) and s.var.name in marks else s

    return rewritten(body, mark) if marks else body


def _collect(block: tuple[Statement, ...], path: Path, places: dict[Buffer, dict[str, Path]]) -> None:
    """Every load of a buffer, by the name of its variable."""
    for k, s in enumerate(block):
        match s:
            case Loop() | When():
                _collect(s.body, (*path, k), places)
            case LoadElement():
                places.setdefault(s.buffer, {})[s.var.name] = path


def larger_than_cache(buffer: Buffer, target: Target) -> bool:
    """Whether a buffer would not stay by itself."""
    return all(d.constant is not None for d in buffer.shape) and storage_bytes(buffer) >= target.chip_cache_bytes
