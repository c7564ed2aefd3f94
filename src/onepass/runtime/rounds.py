"""Calls timed as they are made by people: whole ones that take turns, and one of them step by step.

On a CPU by the host's clock. On a GPU by events, the device starting after the host has put the call into its queue
behind other work; where the host cannot get ahead, the wall time until the device is idle is what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from .clock import Clock, Span
from .stopwatch import HEAD_START, MOST_HEAD_START

LEAST_ROUNDS, MOST_ROUNDS = 5, 100
_Call = Callable[[], Any]


@dataclass(slots=True)
class Laps:
    """What one of several calls took in each round. `device`: on a GPU, rounds in which the host was ahead."""

    wall_us: list[float] = field(default_factory=list)
    device_us: list[float] = field(default_factory=list)

    @property
    def time_us(self) -> float:
        """The median: of the device's time where there is one."""
        return float(median(self.device_us or self.wall_us))


@dataclass(slots=True)
class Rounds:
    """Calls on one device."""

    device: torch.device
    head_start: int = HEAD_START
    _flushed: torch.Tensor | None = None

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def run(self, calls: Sequence[_Call], seconds: float, then: _Call | None = None) -> list[Laps]:
        """Times of calls that take turns, as often as seconds allow. `then` is run once in every round."""
        laps = [Laps() for _ in calls]
        order, first = list(range(len(calls))), time.perf_counter()
        for call in calls:
            call()  # caches and allocators are warm
        self._idle()
        each = (time.perf_counter() - first) * (1 if then is None else 2)
        turns = int(seconds / max(1e-9, each))
        for _ in range(max(LEAST_ROUNDS, min(MOST_ROUNDS, turns))):
            for k in order:
                self._lap(calls[k], laps[k])
            order = order[1:] + order[:1]
            if then is not None:
                then()
        return laps

    def steps(self, call: _Call, clock: Clock) -> list[Span]:
        """One call, step by step."""
        self._run_ahead()
        clock.restart()
        call()
        spans = clock.spans()
        if not all(s.counts for s in spans):
            self.head_start = min(4 * self.head_start, MOST_HEAD_START)
        return spans

    def _lap(self, call: _Call, laps: Laps) -> None:
        self._idle()
        start = time.perf_counter()
        result = call()
        self._idle()
        laps.wall_us.append(1e6 * (time.perf_counter() - start))
        del result
        if not self.on_gpu:
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._run_ahead()
        begin.record()
        call()
        end.record()
        ahead = not begin.query()
        end.synchronize()
        if ahead:
            laps.device_us.append(1e3 * begin.elapsed_time(end))
        else:
            self.head_start = min(4 * self.head_start, MOST_HEAD_START)

    def _run_ahead(self) -> None:
        """Work for the device while the host fills the queue; it empties the chip's cache, too."""
        if not self.on_gpu:
            return
        if self._flushed is None:
            cache_bytes = int(getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 64 << 20))
            self._flushed = torch.empty(2 * cache_bytes, dtype=torch.int8, device=self.device)
        for _ in range(self.head_start):
            self._flushed.zero_()

    def _idle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
