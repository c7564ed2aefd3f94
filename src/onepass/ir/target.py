"""Targets: one table of facts about the chips plans are made for.

Nothing in planning or scheduling asks which emitter follows; it asks these numbers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from ..errors import UnknownTarget


@dataclass(frozen=True, slots=True)
class Target:
    """Facts of one chip. Bandwidths in bytes per microsecond, rates in operations per microsecond."""

    name: str
    language: str  # "c" | "triton"
    processors: int  # cores or multiprocessors
    launch_us: float
    memory_bytes_per_us: float
    cache_bytes_per_us: float
    operations_per_us: float  # point-wise scalar operations, all processors
    vector_bytes: int  # a SIMD register
    held_bytes: int  # what one program keeps close (L1 share or registers)
    cache_bytes: int  # per processor: what a second sweep finds again
    shared_bytes: int = 0
    registers: int = 0
    streamed_bytes: int = 1 << 62  # outputs from this size on bypass the caches
    buffers_per_kernel: int = 48
    operations_per_kernel: int = 600
    members_per_kernel: int = 64  # operations of the program: what one compilation of a kernel can bear
    live_values: int = 256  # values alive at once in one kernel


def _cpu() -> Target:
    processors = os.cpu_count() or 1
    return Target(
        name="cpu", language="c", processors=processors, launch_us=3.0,
        memory_bytes_per_us=8_000.0 * min(processors, 8), cache_bytes_per_us=40_000.0 * processors,
        operations_per_us=12_000.0 * processors, vector_bytes=64, held_bytes=32 * 1024, cache_bytes=512 * 1024,
        streamed_bytes=16 << 20,
    )  # fmt: skip


_GPUS = (
    Target("sm_80", "triton", 108, 3.0, 1_750e3, 4_500e3, 9.7e6, 16, 64 << 10, 40 << 20, 163 << 10, 65536),
    Target("sm_90", "triton", 132, 3.0, 4_230e3, 9_000e3, 33.0e6, 16, 64 << 10, 60 << 20, 227 << 10, 65536),
    Target("sm_100", "triton", 148, 3.0, 7_200e3, 15_000e3, 37.0e6, 16, 64 << 10, 126 << 20, 227 << 10, 65536),
    Target("gfx942", "triton", 304, 5.0, 4_000e3, 10_000e3, 40.0e6, 16, 64 << 10, 256 << 20, 64 << 10, 65536),
)


@lru_cache(maxsize=1)
def targets() -> dict[str, Target]:
    """Every target by name; "cpu" is this machine."""
    return {t.name: t for t in (_cpu(), *_GPUS)}


def find_target(name: str) -> Target:
    """The target of that name, or an error that lists them."""
    try:
        return targets()[name]
    except KeyError:
        raise UnknownTarget(name, targets()) from None
