"""Stopwatches whose times are made up; what races does run, in an interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from onepass.ir.source import Trial
from onepass.runtime.executable import Executable
from onepass.runtime.kernels import LoadedKernel
from onepass.runtime.stopwatch import Race, Run, Timing, arguments
from onepass.runtime.torch_private import without_modes


@dataclass
class Scripted:
    """Gives pairs of times in order, the last one again and again; keeps what raced."""

    chip: str
    script: Sequence[tuple[float, float] | str] = ((40.0, 50.0),)
    seconds: float = 0.0  # that a race takes
    clock: float = 0.0
    races: list[tuple[Sequence[Run], int]] = field(default_factory=list)

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        return Timing(problem="no trials here")

    def race(self, runs: Sequence[Run], bytes_beside: int) -> Race:
        self.clock += self.seconds
        self.races.append((runs, bytes_beside))
        answer = self.script[min(len(self.races), len(self.script)) - 1]
        return Race(problem=answer) if isinstance(answer, str) else Race(answer)

    def now(self) -> float:
        return self.clock


@dataclass
class Running(Scripted):
    """Runs what races, on the CPU; `values` are the results by run, `taken` what it was called with."""

    values: list[list[tuple[torch.Tensor, ...]]] = field(default_factory=list)
    taken: list[list[list[Any]]] = field(default_factory=list)

    def race(self, runs: Sequence[Run], bytes_beside: int) -> Race:
        with without_modes(), torch.no_grad():
            inputs = arguments(runs, torch.device("cpu"))
            self.taken.append(inputs)
            calls = [Executable(r.host, r.kernels).call for r in runs]
            self.values.append([c(list(i)) for c, i in zip(calls, inputs, strict=True)])
        return super().race(runs, bytes_beside)
