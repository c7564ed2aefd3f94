"""Every program that the oracle plans: those of the tests, of the benchmarks and layers of models, by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.sets import SETS
from benchmarks.sweep import CASES, LIMIT_ELEMENTS
from benchmarks.workloads import Workload

from tests.contractions import row_spellings, spellings, state_spellings
from tests.fusion.test_kernel_counts import COUNTS, SAME, full
from tests.oracle.layers import LAYERS
from tests.oracle.program import Program


def corpus() -> dict[str, Program]:
    """All programs, sorted by name; two of one name are an error."""
    found: dict[str, Program] = {}
    for program in (*_spelled(), *_counted(), *_measured(), *LAYERS):
        if program.name in found:
            raise ValueError(f"two programs are called {program.name!r}")
        found[program.name] = program
    return dict(sorted(found.items()))


def _spelled() -> Iterator[Program]:
    for folder, table in (("spelling", spellings.SPELLINGS), ("near miss", spellings.NEAR_MISSES)):
        yield from (Program(f"{folder}/{name}", s.function, s.arguments) for name, s in table.items())
    rows = {
        "rows held": row_spellings.HELD,
        "rows swept": row_spellings.SWEPT,
        "rows passing": row_spellings.PASSING,
        "rows others": row_spellings.OTHERS,
        "states": state_spellings.STATES,
    }
    for folder, programs in rows.items():
        yield from (Program(f"{folder}/{name}", *entry) for name, entry in programs.items())


def _counted() -> Iterator[Program]:
    for name, (function, arguments, _) in COUNTS.items():
        yield Program(f"count/{name}", function, arguments)
    for name, pair in SAME.items():
        for number, function in enumerate(pair):
            yield Program(f"count/same {name} {number}", function, lambda: (full(), full()))


def _measured() -> Iterator[Program]:
    memory, contractions = SETS["memory"].workloads, SETS["contractions"].workloads["cuda"]
    sweep = [case.workload(LIMIT_ELEMENTS["cuda"]) for case in CASES]
    sets = {"memory cpu": memory["cpu"], "memory gpu": memory["cuda"], "contraction": contractions, "sweep": sweep}
    for folder, workloads in sets.items():
        yield from (_of_workload(folder, w) for w in workloads)


def _of_workload(folder: str, workload: Workload) -> Program:
    arguments: Any = partial(workload.build, 1.0)
    return Program(f"{folder}/{workload.name}", workload.function, arguments, train=workload.train)
