"""60 odd shapes beside Inductor, where rules tuned on round sizes fail: `python -m benchmarks --sweep`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import functions as f
from .kept import Kept
from .measure import measure
from .report import ceilings_text, cell, facts_lines, floor_seconds, quick_text, summary_text, table
from .workloads import Arguments, Workload

F32, F16 = torch.float32, torch.float16
SYSTEMS = ["inductor", "onepass"]
LIMIT_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
LAUNCHING_SECONDS = 10e-6  # an empty kernel shows half of it
QUICK_ELEMENTS = 1 << 16


def affine(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return torch.relu(x * row + column)


# operation: function, operations per element, vectors of a row's length, vectors of a column's length, backward too
OPERATIONS: dict[str, tuple[Callable[..., Any], float, int, int, bool]] = {
    "norm forward": (f.layernorm, 7, 2, 0, False),
    "norm backward": (f.layernorm, 20, 2, 0, True),
    "softmax": (f.softmax, 5, 0, 0, False),
    "row sum": (f.row_sum, 1, 0, 0, False),
    "column sum": (f.column_sum, 1, 0, 0, False),
    "point-wise": (affine, 3, 1, 1, False),
}


@dataclass(frozen=True, slots=True)
class Case:
    """An operation on a matrix; `layout` is contiguous, sliced (rows with gaps) or transposed."""

    operation: str
    rows: int
    columns: int
    dtype: torch.dtype
    layout: str

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operation}, {self.rows}x{self.columns}, {dtype}, {self.layout}"

    def bounded_rows(self, limit: int) -> int:
        """Fewer rows where the matrix would have more than `limit` elements."""
        return max(1, min(self.rows, limit // self.columns))

    def matrix(self, limit: int) -> Tensor:
        rows = self.bounded_rows(limit)
        if self.layout == "transposed":
            return torch.randn(self.columns, rows).to(self.dtype).t()
        if self.layout == "sliced":
            return torch.randn(rows, self.columns + 3).to(self.dtype)[:, 1 : self.columns + 1]
        return torch.randn(rows, self.columns).to(self.dtype)

    def workload(self, limit: int) -> Workload:
        function, operations, row_vectors, column_vectors, train = OPERATIONS[self.operation]

        def build(scale: float) -> Arguments:
            rows = [torch.randn(self.columns).to(self.dtype) for _ in range(row_vectors)]
            columns = [torch.randn(self.bounded_rows(limit), 1).to(self.dtype) for _ in range(column_vectors)]
            return self.matrix(limit), *rows, *columns

        return Workload(self.name, function, build, operations, train=train)


CASES: tuple[Case, ...] = (
    Case("norm forward", 3, 1, F32, "contiguous"),
    Case("norm forward", 1_000_000, 7, F16, "sliced"),
    Case("norm forward", 132, 4097, F32, "transposed"),
    Case("norm forward", 3, 262144, F16, "sliced"),
    Case("norm forward", 1_000_000, 1, F32, "transposed"),
    Case("norm forward", 132, 1000, F16, "contiguous"),
    Case("norm forward", 3, 50257, F32, "transposed"),
    Case("norm forward", 1_000_000, 262144, F16, "contiguous"),
    Case("norm forward", 132, 7, F32, "sliced"),
    Case("norm forward", 3, 4097, F16, "contiguous"),
    Case("norm backward", 132, 1000, F16, "sliced"),
    Case("norm backward", 3, 50257, F32, "transposed"),
    Case("norm backward", 1_000_000, 262144, F16, "contiguous"),
    Case("norm backward", 132, 7, F32, "transposed"),
    Case("norm backward", 3, 4097, F16, "contiguous"),
    Case("norm backward", 1_000_000, 50257, F32, "sliced"),
    Case("norm backward", 132, 1, F16, "contiguous"),
    Case("norm backward", 3, 1000, F32, "sliced"),
    Case("norm backward", 1_000_000, 4097, F16, "transposed"),
    Case("norm backward", 132, 262144, F32, "sliced"),
    Case("softmax", 1_000_000, 50257, F32, "transposed"),
    Case("softmax", 132, 1, F16, "contiguous"),
    Case("softmax", 3, 1000, F32, "sliced"),
    Case("softmax", 1_000_000, 4097, F16, "contiguous"),
    Case("softmax", 132, 262144, F32, "sliced"),
    Case("softmax", 3, 7, F16, "transposed"),
    Case("softmax", 1_000_000, 1000, F32, "sliced"),
    Case("softmax", 132, 50257, F16, "transposed"),
    Case("softmax", 3, 1, F32, "contiguous"),
    Case("softmax", 1_000_000, 7, F16, "transposed"),
    Case("row sum", 3, 7, F16, "contiguous"),
    Case("row sum", 1_000_000, 1000, F32, "sliced"),
    Case("row sum", 132, 50257, F16, "transposed"),
    Case("row sum", 3, 1, F32, "sliced"),
    Case("row sum", 1_000_000, 7, F16, "transposed"),
    Case("row sum", 132, 4097, F32, "contiguous"),
    Case("row sum", 3, 262144, F16, "transposed"),
    Case("row sum", 1_000_000, 1, F32, "contiguous"),
    Case("row sum", 132, 1000, F16, "sliced"),
    Case("row sum", 3, 50257, F32, "contiguous"),
    Case("column sum", 132, 4097, F32, "sliced"),
    Case("column sum", 3, 262144, F16, "transposed"),
    Case("column sum", 1_000_000, 1, F32, "contiguous"),
    Case("column sum", 132, 1000, F16, "transposed"),
    Case("column sum", 3, 50257, F32, "contiguous"),
    Case("column sum", 1_000_000, 262144, F16, "sliced"),
    Case("column sum", 132, 7, F32, "contiguous"),
    Case("column sum", 3, 4097, F16, "sliced"),
    Case("column sum", 1_000_000, 50257, F32, "transposed"),
    Case("column sum", 132, 1, F16, "sliced"),
    Case("point-wise", 1_000_000, 262144, F16, "transposed"),
    Case("point-wise", 132, 7, F32, "contiguous"),
    Case("point-wise", 3, 4097, F16, "sliced"),
    Case("point-wise", 1_000_000, 50257, F32, "contiguous"),
    Case("point-wise", 132, 1, F16, "sliced"),
    Case("point-wise", 3, 1000, F32, "transposed"),
    Case("point-wise", 1_000_000, 4097, F16, "sliced"),
    Case("point-wise", 132, 262144, F32, "transposed"),
    Case("point-wise", 3, 7, F16, "contiguous"),
    Case("point-wise", 1_000_000, 1000, F32, "transposed"),
)


def run_sweep(
    result: dict[str, Any], kept: Kept, only: str, quick: bool, say: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """Every case by Inductor and onepass: the numbers and their report."""
    words = [word.strip().lower() for word in only.split(";") if word.strip()]
    cases = [case for case in CASES if not words or any(word in case.name for word in words)]
    if not cases:
        raise SystemExit(f"no case of the sweep matches {only!r}")
    device = result["device"]
    limit = QUICK_ELEMENTS if quick else LIMIT_ELEMENTS[device]
    result |= {"systems": SYSTEMS, "limit_elements": limit, "cases": {}}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        for number, case in enumerate(cases, 1):
            found = kept.row(
                case.name, partial(measure, case.workload(limit), SYSTEMS, 1.0, result["rounds"], device, caches)
            )
            ratio = sweep_ratio(found)
            result["cases"][case.name] = {**found, "rows": case.bounded_rows(limit), "ratio": ratio}
            shown = "no ratio" if ratio is None else f"{ratio:.2f}"
            problems = "".join(f"  PROBLEM {system}: {text}" for system, text in found["problems"].items())
            say(f"[{number}/{len(cases)}] {case.name}: {shown}{problems}")
    return result, sweep_markdown(result)


def sweep_ratio(found: dict[str, Any]) -> float | None:
    """Inductor's time over onepass's."""
    seconds: dict[str, float] = found["seconds"]
    return seconds["inductor"] / seconds["onepass"] if {"inductor", "onepass"} <= seconds.keys() else None


def wall_ratio(found: dict[str, Any]) -> float | None:
    """The same until the device is idle again, host included; what counts where a call is mostly launching."""
    seconds: dict[str, float] = found.get("wall_seconds", {})
    return seconds["inductor"] / seconds["onepass"] if {"inductor", "onepass"} <= seconds.keys() else None


def _mostly_launching(found: dict[str, Any]) -> bool:
    """Whether the device has so little to do in every compiled system that starting it is what takes the time."""
    return max(found["seconds"][s] for s in ("inductor", "onepass")) < LAUNCHING_SECONDS


def sweep_markdown(result: dict[str, Any]) -> str:
    """The sweep's report."""
    rows, ratios, walls, problems = [], {}, {}, []
    for name, case in result["cases"].items():
        seconds, ratio = case["seconds"], case["ratio"]
        shown = [cell(case, s, f"{1e3 * seconds[s]:.4f}" if s in seconds else None) for s in SYSTEMS]
        over = f"{seconds['onepass'] / floor_seconds(case, result['ceilings']):.2f}" if "onepass" in seconds else ""
        wall = wall_ratio(case)
        compared = ["" if r is None else f"{r:.2f}" for r in (ratio, wall)]
        rows.append([name, str(case["rows"]), *shown, over, *compared])
        problems += [f"**{name}, {system}: {text}**" for system, text in case["problems"].items()]
        if ratio is not None:
            ratios[name] = ratio
        if wall is not None:
            walls[name] = wall
    head = ["shape", "rows measured", *(f"{s} ms" for s in SYSTEMS), "onepass / floor", "over inductor", "wall"]
    how = (
        f"Median of {result['rounds']} interleaved rounds; at most {result['limit_elements']} elements; "
        f"{ceilings_text(result)}.{quick_text(result)}"
    )
    parts = ["# Sweep over odd shapes", *facts_lines(result), how, "\n".join(table(head, rows))]
    parts.append(summary_text("onepass over inductor", ratios, "shapes"))
    if walls:
        launching = {n for n in ratios if n in walls and _mostly_launching(result["cases"][n])}
        mixed = {n: walls[n] if n in launching else r for n, r in ratios.items()}
        parts.append(summary_text("The same by wall time, host included (last column)", walls, "shapes"))
        label = f"By wall time for the {len(launching)} that are mostly launching, by device time for all others"
        parts.append(summary_text(label, mixed, "shapes"))
    return "\n\n".join([*parts, *problems])
