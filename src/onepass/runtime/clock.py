"""When the steps of a host program ran: its launches, calls and copies, each where it stands in the program.

An executable that a `Clock` observes asks it before and after every step. On a CPU it reads the host's clock. On a GPU
it puts an event before and after the step; a step counts only if the host had put both into the queue before the device
reached the first, so that the host is never measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One run of a step; `owner` is the identity of the executable, `step` the number of the instruction."""

    owner: int
    step: int
    start_us: float
    end_us: float
    counts: bool = True


class Clock:
    """Collects the spans of one device. Not for several threads that run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._open: list[tuple[int, int, Any, Any, bool]] = []
        self._origin: Any = self.now()

    def now(self) -> Any:
        """A moment on the device."""
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stepped(self, owner: int, step: int, start: Any) -> None:
        """A step that began at `start` has run, or is in the queue."""
        end = self.now()
        self._open.append((owner, step, start, end, not self._on_gpu or not start.query()))

    def restart(self) -> None:
        """Moments are counted from now."""
        self._open.clear()
        self._origin = self.now()

    def spans(self) -> list[Span]:
        """What has run since the last restart, in the order in which it ended."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return [Span(o, s, self._since(a), self._since(b), counts) for o, s, a, b, counts in self._open]

    def _since(self, moment: Any) -> float:
        if self._on_gpu:
            return 1e3 * float(self._origin.elapsed_time(moment))
        return 1e-3 * float(moment - self._origin)


def own_times(spans: Sequence[Span]) -> list[float]:
    """The microseconds of each span without those of the spans inside it."""
    times = [s.end_us - s.start_us for s in spans]
    waiting: list[int] = []  # spans that no other contains so far; a span ends after what is inside it
    for k, outer in enumerate(spans):
        while waiting and spans[waiting[-1]].start_us >= outer.start_us:
            inner = spans[waiting.pop()]
            times[k] -= inner.end_us - inner.start_us
        waiting.append(k)
    return times
