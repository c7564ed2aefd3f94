"""Predicted time of a kernel, one number for each limit it may meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HIDDEN = 0.9  # of the shorter of two kinds of work, the part that the longer one hides where many programs overlap
BESIDE_MATRICES = 0.98  # the same beside matrix units, whose operands are copied ahead


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds. The limits overlap: the largest decides, the others add a little.

    `memory`: bytes at the rate of the processors that are busy. `scalar`: operations of lanes. `matrix`: products of
    matrix units. `serial`: rounds of programs, each as long as its steps that wait for each other. `launch`: starting.
    """

    memory_us: float = 0.0
    scalar_us: float = 0.0
    matrix_us: float = 0.0
    serial_us: float = 0.0
    launch_us: float = 0.0
    programs: int = 0
    resident: int = 0  # programs that a processor holds at once
    at_once: float = 8.0  # programs that run beside each other on a processor: one waits while another computes

    @property
    def total_us(self) -> float:
        limits = (self.memory_us, self.scalar_us, self.matrix_us, self.serial_us)
        most = max(limits)
        hidden = BESIDE_MATRICES if self.matrix_us else HIDDEN * (1.0 - 0.5 / max(1.0, self.at_once))
        return self.launch_us + most + (1.0 - hidden) * (sum(limits) - most)

    @property
    def bound(self) -> str:
        """The limit that decides."""
        limits = {
            "memory": self.memory_us,
            "operations": self.scalar_us,
            "matrix products": self.matrix_us,
            "waiting": self.serial_us,
            "launching": self.launch_us,
        }
        return max(limits, key=limits.__getitem__)


def total_us(times: Iterable[Time]) -> float:
    """Launches that follow each other."""
    return sum(t.total_us for t in times)
