"""One recording of every program and target: made now, in several processes, or read from the files."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.oracle.corpus import corpus
from tests.oracle.planning import plan
from tests.oracle.recording import (
    Graphs,
    decisions,
    read_decisions,
    read_texts,
    texts,
    written_decisions,
    written_texts,
)

RECORDED = Path(__file__).parent / "recorded"
TARGETS = ("cpu", "sm_80", "sm_90", "sm_100", "gfx942")
SHARDS = 4  # of the corpus: a process takes one, for one target


@dataclass(slots=True)
class Recording:
    """One target's decisions and texts, by program."""

    decisions: dict[str, Graphs]
    texts: dict[str, tuple[str, ...]]


def _planned(target: str, names: list[str]) -> Recording:
    torch.set_num_threads(1)
    found, programs = Recording({}, {}), corpus()
    for name in names:
        planned = plan(programs[name], target)
        found.decisions[name], found.texts[name] = decisions(planned), texts(planned)
    return found


def record(targets: list[str], pattern: str, workers: int) -> dict[str, Recording]:
    """What the compiler decides now. A process never plans two targets' shards at once, so results do not mix."""
    names = [name for name in corpus() if fnmatchcase(name, pattern)]
    results = {target: Recording({}, {}) for target in targets}
    work = [(target, names[k::SHARDS]) for target in targets for k in range(SHARDS)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = [(target, pool.submit(_planned, target, part)) for target, part in work]
        for target, future in futures:
            results[target].decisions |= future.result().decisions
            results[target].texts |= future.result().texts
    return results


def files(target: str) -> tuple[Path, Path]:
    return RECORDED / f"{target}.txt", RECORDED / f"{target}.keys.txt"


def recorded(target: str) -> Recording:
    """What was decided when the oracle was recorded."""
    decided, keys = files(target)
    if not decided.exists():
        return Recording({}, {})
    return Recording(read_decisions(decided.read_text()), read_texts(keys.read_text()))


def update(before: dict[str, Recording], after: dict[str, Recording], gone: set[str]) -> None:
    RECORDED.mkdir(exist_ok=True)
    for target, now in after.items():
        decided, keys = files(target)
        all_decisions = {n: g for n, g in (before[target].decisions | now.decisions).items() if n not in gone}
        all_texts = {n: k for n, k in (before[target].texts | now.texts).items() if n not in gone}
        decided.write_text(written_decisions(all_decisions))
        keys.write_text(written_texts(all_texts))
