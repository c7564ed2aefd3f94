"""How long launches take on the GPU at hand.

Takes a `Trial` and its built kernels, runs them by the path every launch takes on tensors that stand in for the
real ones, and gives the median of a few device times, the chip's cache emptied before each. Whoever compiles waits
meanwhile; nothing waits later. torch's random generators are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from ..errors import UnknownTarget
from ..ir.source import Allocate, HostProgram, Trial
from ..ir.target import Target
from .builders import INTERPRETED
from .device import current_chip
from .executable import Executable
from .kernels import LoadedKernel
from .torch_private import without_modes

WARM_UPS, REPETITIONS = 2, 9
MEMORY_SHARE = 4  # stand-ins take at most one part in so many of the free memory
_SPREAD = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Timing:
    """What one launch takes, or why that is not known."""

    time_us: float = 0.0
    problem: str = ""


class Stopwatch(Protocol):
    """What times launches; `chip` names where, so that one chip's choices are not another's."""

    chip: str

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel]) -> Timing:
        """The time of one run of the trial's launches."""


class DeviceStopwatch:
    """Times launches on a GPU of this machine."""

    def __init__(self, chip: str) -> None:
        self.chip = chip

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel]) -> Timing:
        device = torch.device(trial.launches[0].device)
        try:
            with torch.cuda.device(device), without_modes(), torch.no_grad():
                if torch.cuda.is_current_stream_capturing():
                    return Timing(problem="a CUDA graph is being captured")
                wanted, free = sum(map(_bytes, trial.stand_ins)), torch.cuda.mem_get_info(device)[0]
                if wanted * MEMORY_SHARE > free:
                    return Timing(problem=f"its tensors take {wanted} bytes of {free} free ones")
                return Timing(_median_us(trial, kernels, device))
        except (OSError, RuntimeError) as error:  # the driver or torch refused: too much shared memory, out of memory
            return Timing(problem=str(error).splitlines()[0])


def stopwatch_for(target: Target, device: str) -> Stopwatch | None:
    """What times a target's kernels; None where they do not run on a GPU of this machine that may be asked now."""
    if target.language != "triton" or target.name == INTERPRETED or device != "cuda" or not torch.cuda.is_available():
        return None
    try:
        here = current_chip().name == target.name
    except UnknownTarget:
        return None
    if not here or torch.cuda.is_current_stream_capturing():
        return None
    return DeviceStopwatch(torch.cuda.get_device_name())


def stand_ins(trial: Trial, device: torch.device) -> list[torch.Tensor]:
    """A tensor for every buffer: floats spread as a normal distribution, everything else 0."""
    generator = torch.Generator(device)
    generator.manual_seed(0)
    return [_stand_in(a, generator) for a in trial.stand_ins]


def as_program(trial: Trial) -> HostProgram:
    """The trial as a host program that takes its stand-ins."""
    return HostProgram(tuple(a.name for a in trial.stand_ins), trial.launches, ())


def _median_us(trial: Trial, kernels: Sequence[LoadedKernel], device: torch.device) -> float:
    call = Executable(as_program(trial), kernels).call
    tensors = stand_ins(trial, device)
    flushed = torch.empty(2 * _cache_bytes(device), dtype=torch.int8, device=device)
    pairs = []
    for _ in range(WARM_UPS + REPETITIONS):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(list(tensors))
        end.record()
        pairs.append((start, end))
    pairs[-1][1].synchronize()
    return float(median(1e3 * start.elapsed_time(end) for start, end in pairs[WARM_UPS:]))


def _stand_in(allocate: Allocate, generator: torch.Generator) -> torch.Tensor:
    """One that has the buffer's elements where the buffer has them: dimensions may share theirs."""
    dtype: torch.dtype = getattr(torch, allocate.dtype)
    storage = torch.empty(_elements(allocate), dtype=dtype, device=allocate.device)
    if dtype in _SPREAD and storage.device.type == generator.device.type:
        storage.normal_(generator=generator)
    else:
        storage.zero_()
    return storage.as_strided(tuple(map(int, allocate.shape)), tuple(map(int, allocate.strides)))


def _elements(allocate: Allocate) -> int:
    """From the first element in memory to the last."""
    pairs = [(int(size), int(stride)) for size, stride in zip(allocate.shape, allocate.strides, strict=True)]
    return 1 + sum((size - 1) * stride for size, stride in pairs) if all(size for size, _ in pairs) else 0


def _bytes(allocate: Allocate) -> int:
    return _elements(allocate) * int(getattr(torch, allocate.dtype).itemsize)


def _cache_bytes(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
