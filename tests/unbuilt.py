"""Plans without machine code: how many kernels a program takes needs no compiler of a chip.

`with unbuilt(): onepass.explain(...)` plans, schedules and writes kernels as always and builds none, so registers and
spills are 0. The program runs operation by operation, and nothing is measured, whether its chip is here or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from onepass import compilation
from onepass.explain.planning import planning
from onepass.ir.source import KernelSource
from onepass.ir.target import Target


class Unbuilt:
    """In the place of a target's builder: a kernel's file is its text, its function cannot be called."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def fingerprint(self) -> str:
        return f"unbuilt for {self.target.name}"  # so that no test takes it for a kernel that was built

    def build(self, source: KernelSource, output: Path) -> None:
        output.write_text(source.text)

    def load(self, path: Path, source: KernelSource) -> Any:
        def refuse(*_: Any) -> Any:
            raise AssertionError(f"{source.name} was planned, not built")

        return refuse


@contextmanager
def unbuilt() -> Iterator[None]:
    """Graphs compiled here are planned and written, neither built nor measured, and run operation by operation."""
    with mock.patch.object(compilation, "builder_for", Unbuilt), planning(True):
        yield
