"""The debug ladder: ONEPASS_DEBUG=1..5 prints, ONEPASS_DUMP=folder writes every stage as files.

1 one line per graph, 2 every decision, 3 program and plan, 4 sources, 5 also checks each kernel
against the reference interpreter (`checking.py`).
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ..ir.options import Options
from ..ir.record import CompileRecord

_numbers = itertools.count()
_log, _planner_log, _codegen_log = (logging.getLogger(f"onepass{part}") for part in ("", ".planner", ".codegen"))
_LONG_BUILD = 8  # kernels: fewer are built before anyone wonders


def report_stage(options: Options, record: CompileRecord) -> None:
    """Print and dump what the options ask for, and tell torch's log: "onepass" a line for each graph, "+onepass" all.

    "+onepass.planner" is what was fused and why, "+onepass.codegen" the kernels: torch takes names of modules.
    """
    _log.info("%s", debug_text(record, 1))
    if _planner_log.isEnabledFor(logging.DEBUG):
        _planner_log.debug("%s", "\n".join([*_decisions(record), "program:", record.program, "plan:", record.plan]))
    for k in record.kernels:
        _codegen_log.debug("%s", k.source)
    if options.debug:
        print(debug_text(record, options.debug), file=sys.stderr)
    if options.dump:
        dump(record, Path(options.dump))


def debug_text(record: CompileRecord, level: int) -> str:
    """What one rung of the ladder shows of a graph."""
    seconds = sum(record.stage_seconds.values())
    stages = ", ".join(f"{name} {took:.2f}" for name, took in record.stage_seconds.items())
    lines = [
        f"onepass: {record.direction} graph for {record.target}: {len(record.kernels)} kernels, "
        f"{len(record.externs)} calls, {record.bytes_moved} bytes moved ({record.bytes_unfused} unfused), "
        f"{seconds:.2f} s" + (f" ({stages})" if stages else "")
    ]
    lines += [*_decisions(record)] if level >= 2 else []
    lines += ["program:", record.program, "plan:", record.plan] if level >= 3 else []
    lines += [k.source for k in record.kernels] if level >= 4 else []
    return "\n".join(lines)


def _decisions(record: CompileRecord) -> Iterator[str]:
    for d in record.decisions:
        yield f"  {'fused' if d.accepted else 'kept apart'} ({d.kind}) {d.producer} -> {d.consumer}: {d.reason}"
    yield from (f"  tuning of {k.name}: {k.tuning}" for k in record.kernels if k.tuning)
    yield from (f"  call {e.op} {e.name}: {e.why}" for e in record.externs)


def dump(record: CompileRecord, folder: Path) -> None:
    """One numbered subfolder per graph: program, plan, decisions, sources, record."""
    place = folder / f"{next(_numbers):03d}_{record.direction}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "1_program.txt").write_text(record.program)
    (place / "2_plan.txt").write_text(record.plan)
    (place / "3_decisions.txt").write_text(debug_text(record, 2))
    for k in record.kernels:
        (place / f"4_{k.name}.c").write_text(k.source)
    (place / "5_record.json").write_text(json.dumps(record.to_json(), indent=1))


def build_progress() -> Callable[[int, int, str], None] | None:
    """A callback that shows kernels being built on a terminal; None where nobody would see it."""
    if not sys.stderr.isatty():
        return None

    def show(built: int, total: int, name: str) -> None:
        if total < _LONG_BUILD:
            return
        sys.stderr.write(f"\r\x1b[Konepass: built {built} of {total} kernels ({name})" if built < total else "\r\x1b[K")
        sys.stderr.flush()

    return show
