"""Predicted time of a kernel, one number for each limit it may meet."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .rates import UNMEASURED, Rates

LIMITS = ("memory_us", "scalar_us", "matrix_us", "cache_us", "serial_us", "start_us")


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds. The limits overlap: the largest decides, the others add a little.

    `memory`: bytes at the rate of the processors that are busy. `cache`: beside matrix units, reads from the cache that
    all processors share; else `memory` has them. `scalar`: operations of lanes. `matrix`: products of matrix units.
    `serial`: rounds of programs, each as long as its steps that wait for each other. `start`: programs that start one
    after another. `launch`: starting the first.
    """

    memory_us: float = 0.0
    scalar_us: float = 0.0
    matrix_us: float = 0.0
    cache_us: float = 0.0
    serial_us: float = 0.0
    start_us: float = 0.0
    launch_us: float = 0.0
    programs: int = 0
    resident: int = 0  # programs that a processor holds at once
    at_once: float = 8.0  # programs that run beside each other on a processor: one waits while another computes
    rates: Rates = UNMEASURED

    @property
    def total_us(self) -> float:
        limits = (self.memory_us, self.scalar_us, self.matrix_us, self.serial_us, self.start_us, self.cache_us)
        most, at_once, r = max(limits), max(1.0, self.at_once), self.rates
        if not self.matrix_us:
            return self.launch_us + most + r.exposed / at_once * (sum(limits) - most)
        others = (r.beside_matrix, r.lanes_beside_matrix, *3 * (r.beside_matrix,), r.cache_beside_matrix)
        exposed = sum(part * limit for part, limit in zip(others, limits, strict=True) if limit is not most)
        return self.launch_us + most + exposed / math.pow(at_once, r.matrix_hides)

    @property
    def bound(self) -> str:
        """The limit that decides."""
        limits = {
            "memory": self.memory_us,
            "operations": self.scalar_us,
            "matrix products": self.matrix_us,
            "the shared cache": self.cache_us,
            "waiting": self.serial_us,
            "starting programs": self.start_us,
            "launching": self.launch_us,
        }
        return max(limits, key=limits.__getitem__)


def total_us(times: Iterable[Time]) -> float:
    """Launches that follow each other."""
    return sum(t.total_us for t in times)
