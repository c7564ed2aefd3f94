"""Targets: one table of facts about the chips plans are made for.

Nothing in planning or scheduling asks which emitter follows; it asks these numbers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from ..errors import UnknownTarget
from .dtypes import DType
from .rates import CPU, H200, UNMEASURED, Rates

PROCESSOR_PROGRAMS, PROCESSOR_THREADS = 32, 2048  # that a processor of any GPU of the table holds at once


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
    cache_bytes: int  # per processor: what a second sweep finds again
    chip_cache_bytes: int = 0  # what all processors share in front of memory
    shared_bytes: int = 0  # that one program may have
    reserved_bytes: int = 0  # of shared memory that every program takes beside its own
    registers: int = 0  # of a processor, where warps have 32 threads
    streamed_bytes: int = 1 << 62  # outputs from this size on bypass the caches
    buffers_per_kernel: int = 48
    operations_per_kernel: int = 600
    members_per_kernel: int = 64  # operations of the program: what one compilation of a kernel can bear
    live_values: int = 256  # values alive at once in one kernel
    warp: int = 0  # threads in lockstep, where a program is a block of them that holds tiles; 0: it is one thread
    held_elements: int = 0  # of one value that a program's registers keep beside a few others
    thread_elements: int = 0  # of one value that a thread keeps, at most
    carried_bytes: int = 0  # of states that go from row to row where rows are not held; 0: rows are held for that
    columns: int = 1  # positions of a contiguous axis that one program takes beside an axis it reduces
    split_programs: int = 128  # programs a split reduction is shared out to
    products_per_us: float = 0.0  # multiply-adds of a matrix unit on 16-bit operands, as matmuls reach; 0: none
    attention: bool = False  # the time of the library's attention is known
    byte_products: tuple[DType, ...] = ()  # types of one byte that matrix units take, at twice that rate
    rounded_products: bool = False  # matrix units may round float32 operands (torch's float32 matmul precision)
    descriptors: bool = False  # hardware copies blocks of matrices into shared memory
    gives_up_copies: bool = False  # it pays to tell the chip's cache that such a copy is read once (seen on an H200)
    overlaps: bool = False  # a kernel may be started while the one before it is ending
    wide_statistics: bool = False  # variances accumulate in float64, as eager does there
    wide_products: bool = False  # oneDNN multiplies float32 matrices with wider vectors than torch's mm does
    rates: Rates = UNMEASURED

    def resident_programs(self, registers: int, shared_bytes: int, threads: int) -> int:
        """How many programs of a built kernel one processor holds; 0 where nothing is known of them.

        A processor has the shared memory of its largest program and what is reserved for that one. Registers go to
        warps in blocks of 8 for each thread; a processor with wider warps has more of them.
        """
        if not threads or not self.warp:
            return 0
        taken = -(-threads // self.warp) * self.warp
        room = [PROCESSOR_PROGRAMS, PROCESSOR_THREADS // taken]
        if registers:
            room.append(self.registers * self.warp // 32 // (-(-registers // 8) * 8 * taken))
        if needed := shared_bytes + self.reserved_bytes:
            room.append((self.shared_bytes + self.reserved_bytes) // needed)
        return min(room)


# Triton's code for sm_100 multiplies int8 with the instructions of sm_80; gfx942 has another float8.
_BYTE_PRODUCTS = {"sm_80": (DType.I8,), "sm_100": (DType.F8E4M3,), "gfx942": (DType.I8,)}


def _cpu() -> Target:
    processors = os.cpu_count() or 1
    return Target(
        name="cpu", language="c", processors=processors, launch_us=3.0,
        memory_bytes_per_us=8_000.0 * min(processors, 8), cache_bytes_per_us=40_000.0 * processors,
        operations_per_us=12_000.0 * processors, vector_bytes=64, cache_bytes=512 * 1024,
        streamed_bytes=16 << 20, wide_statistics=True, wide_products=_has_wide_products(),
        rates=CPU,
    )  # fmt: skip


def _has_wide_products() -> bool:
    """MKL has code for 512-bit vectors only where Intel made the processor."""
    try:
        is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return libraries and not is_intel and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _gpu(
    name: str, processors: int, launch_us: float, memory: float, cache: float, operations: float,
    cache_mb: int, shared_kb: int, tflops: float, warp: int = 32,
) -> Target:  # fmt: skip
    """Rates in units of 1e3 bytes or operations per microsecond; the cache's share of a processor is halved twice."""
    return Target(
        name=name, language="triton", processors=processors, launch_us=launch_us,
        memory_bytes_per_us=memory * 1e3, cache_bytes_per_us=cache * 1e3, operations_per_us=operations * 1e3,
        vector_bytes=16, cache_bytes=(cache_mb << 20) // processors // 4,
        chip_cache_bytes=cache_mb << 20,
        shared_bytes=shared_kb << 10, reserved_bytes=1024 if warp == 32 else 0,
        registers=65536, warp=warp, split_programs=8 * processors,
        columns=128, held_elements=16384, thread_elements=32, carried_bytes=96 << 10,
        products_per_us=tflops * 1e6 / 2,
        attention=name in ("sm_90", "sm_100"),
        byte_products=_BYTE_PRODUCTS.get(name, (DType.I8, DType.F8E4M3)),
        descriptors=name in ("sm_90", "sm_100"),
        gives_up_copies=name == "sm_90",
        overlaps=name in ("sm_90", "sm_100"),
        rates=H200 if name == "sm_90" else UNMEASURED,
    )  # fmt: skip


_GPUS = (
    _gpu("sm_80", 108, 3.0, 1_750, 4_500, 9_700, 40, 163, 250),
    _gpu("sm_90", 132, 3.8, 4_230, 14_000, 40_000, 60, 227, 680),
    _gpu("sm_100", 148, 3.0, 7_200, 15_000, 37_000, 126, 227, 1500),
    _gpu("gfx942", 304, 5.0, 4_000, 10_000, 40_000, 256, 64, 600, warp=64),
    replace(_gpu("triton-interpret", 4, 3.0, 4_230, 9_000, 33_000, 1, 227, 680), wide_statistics=True),
)


@lru_cache(maxsize=1)
def targets() -> dict[str, Target]:
    """Every target by name; "cpu" is this machine."""
    return {t.name: t for t in (_cpu(), *_GPUS)}


def find_chip(architecture: str, major: int, minor: int) -> Target:
    """The target of a GPU: by architecture name, or by the newest entry whose code it runs."""
    if architecture:
        return find_target(architecture.split(":")[0])
    fitting = [t for t in targets().values() if t.name in {f"sm_{major}{m}" for m in range(minor + 1)}]
    return fitting[-1] if fitting else find_target(f"sm_{major}{minor}")


CHIPS = {"a100": "sm_80", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100", "mi300x": "gfx942"}


def find_target(name: str) -> Target:
    """The target of that name, or of a chip's name; else an error that lists them."""
    try:
        return targets()[CHIPS.get(name.lower(), name)]
    except KeyError:
        raise UnknownTarget(name, (*targets(), *CHIPS)) from None
