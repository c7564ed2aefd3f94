"""How long launches take on the GPU at hand.

Takes a `Trial` and its built kernels, or whole host programs that race each other, runs them by the path every call
takes on tensors that stand in for the real ones, and gives the median of a few device times, the chip's cache
emptied before each. The device starts on a batch of calls after the host has put them all into its queue, so the host
is never measured: a call that the device reached earlier does not count. Whoever compiles waits meanwhile; nothing
waits later. torch's random generators are not touched.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol, TypeAlias

import torch

from ..ir.source import Allocate, HostProgram, Trial
from ..ir.target import Target
from .builders import INTERPRETED
from .device import runs_here
from .executable import Executable
from .kernels import LoadedKernel
from .torch_private import plain_dispatch, without_modes

LEAST_REPETITIONS, REPETITIONS = 2, 9
BATCH_US = 20_000.0  # that the repetitions should take together: what is slow is repeated less
MEMORY_SHARE = 4  # stand-ins take at most one part in so many of the free memory
HEAD_START, MOST_HEAD_START = 32, 512  # times the cache is emptied before a batch, while the host fills the queue
_SPREAD = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
_Call: TypeAlias = Callable[[list[Any]], Any]
_Timed: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event, bool]  # start, end, whether it counts
alone = threading.Lock()  # what is timed has the device to itself, as far as we can see


@dataclass(frozen=True, slots=True)
class Timing:
    """What one launch takes, or why that is not known."""

    time_us: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """A host program, its kernels and what it takes: stand-ins and sizes. Equal stand-ins are one tensor."""

    host: HostProgram
    kernels: Sequence[LoadedKernel]
    inputs: tuple[Allocate | int, ...]


@dataclass(frozen=True, slots=True)
class Race:
    """What each of several runs takes, or why that is not known."""

    times_us: tuple[float, ...] = ()
    problem: str = ""


class Stopwatch(Protocol):
    """What times launches; `chip` names where, so that one chip's choices are not another's."""

    chip: str

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        """The time of one run of the trial's launches; a first run that takes longer than the worst is the only one."""

    def race(self, runs: Sequence[Run], bytes_beside: int) -> Race:
        """The times of runs that take turns. `bytes_beside`: of memory, the most that one takes beside its inputs."""


class DeviceStopwatch:
    """Times launches on a GPU of this machine."""

    def __init__(self, chip: str) -> None:
        self.chip = chip

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        run = Run(as_program(trial), kernels, trial.stand_ins)
        race = _raced([run], torch.device(trial.launches[0].device), 0, worst_us)
        return Timing(race.times_us[0] if race.times_us else 0.0, race.problem)

    def race(self, runs: Sequence[Run], bytes_beside: int) -> Race:
        device = next(torch.device(a.device) for a in _named(runs).values() if a.device != "cpu")
        return _raced(runs, device, bytes_beside)


def as_program(trial: Trial) -> HostProgram:
    """A trial's launches as a host program of their own, which takes the tensors that stand in."""
    return HostProgram(tuple(a.name for a in trial.stand_ins), trial.launches, ())


def _raced(runs: Sequence[Run], device: torch.device, bytes_beside: int, worst_us: float = math.inf) -> Race:
    """The times of runs on a device, or why it refused: too much shared memory, out of memory."""
    try:
        with _ready(device, bytes_beside + sum(map(_bytes, _named(runs).values()))):
            calls = [Executable(r.host, r.kernels).call for r in runs]
            return Race(_medians_us(calls, arguments(runs, device), device, worst_us))
    except (OSError, RuntimeError) as error:  # of the driver, or of torch
        return Race(problem=str(error).splitlines()[0])


def stopwatch_for(target: Target, device: str) -> Stopwatch | None:
    """What times a target's kernels; None where they do not run on a GPU of this machine that may be asked now."""
    if target.language != "triton" or target.name == INTERPRETED or device != "cuda" or not torch.cuda.is_available():
        return None
    if not runs_here(target.name) or torch.cuda.is_current_stream_capturing():
        return None
    return DeviceStopwatch(torch.cuda.get_device_name())


@contextmanager
def _ready(device: torch.device, wanted: int) -> Iterator[None]:
    """The device current, whatever is being traced; RuntimeError where it cannot be measured on now."""
    with torch.cuda.device(device), without_modes(), plain_dispatch(), torch.no_grad():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph is being captured")
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        if wanted * MEMORY_SHARE > free:
            raise RuntimeError(f"its tensors take {wanted} bytes of {free} free ones")
        with torch.autocast(device.type, enabled=False):
            yield


def stand_ins(allocates: Iterable[Allocate], device: torch.device) -> list[torch.Tensor]:
    """A tensor for every buffer: floats spread as a normal distribution, booleans true, everything else 0."""
    generator = torch.Generator(device)
    generator.manual_seed(0)
    return [_stand_in(a, generator) for a in allocates]


def arguments(runs: Sequence[Run], device: torch.device) -> list[list[torch.Tensor | int]]:
    """What each run is called with."""
    named = _named(runs)
    tensors = dict(zip(named, stand_ins(named.values(), device), strict=True))
    return [[a if isinstance(a, int) else tensors[a.name] for a in run.inputs] for run in runs]


def _named(runs: Sequence[Run]) -> dict[str, Allocate]:
    return {a.name: a for run in runs for a in run.inputs if isinstance(a, Allocate)}


def _medians_us(
    calls: Sequence[_Call], taken: Sequence[Sequence[Any]], device: torch.device, worst_us: float
) -> tuple[float, ...]:
    """What each of some calls takes. One that takes longer than the worst at first is not repeated."""
    cache_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    flushed = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)
    for call, inputs in zip(calls, taken, strict=True):
        call(list(inputs))  # kernels are loaded, the library chooses its own
    first = _batch_us(calls, taken, flushed, 1)
    if max(first) > worst_us:
        return first
    return _batch_us(calls, taken, flushed, max(LEAST_REPETITIONS, min(REPETITIONS, int(BATCH_US / sum(first)))))


def _batch_us(
    calls: Sequence[_Call], taken: Sequence[Sequence[Any]], flushed: torch.Tensor, turns: int
) -> tuple[float, ...]:
    """The medians of calls that take turns; RuntimeError where the host cannot get ahead of the device."""
    head_start = HEAD_START
    while head_start <= MOST_HEAD_START:
        for _ in range(head_start):
            flushed.zero_()
        rounds = [[_timed(c, i, flushed) for c, i in zip(calls, taken, strict=True)] for _ in range(turns)]
        rounds[-1][-1][1].synchronize()
        found = [[1e3 * s.elapsed_time(e) for s, e, counts in own if counts] for own in zip(*rounds, strict=True)]
        if all(2 * len(times) >= turns for times in found):
            return tuple(float(median(times)) for times in found)
        head_start *= 4
    raise RuntimeError("the device waits for the host")


def _timed(call: _Call, inputs: Sequence[Any], flushed: torch.Tensor) -> _Timed:
    """Events around one call. It counts if the host was done with it before the device began."""
    flushed.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call(list(inputs))
    end.record()
    return start, end, not start.query()


def _stand_in(allocate: Allocate, generator: torch.Generator) -> torch.Tensor:
    """One that has the buffer's elements where the buffer has them: dimensions may share theirs."""
    dtype: torch.dtype = getattr(torch, allocate.dtype)
    storage = torch.empty(_elements(allocate), dtype=dtype, device=allocate.device)
    if dtype in _SPREAD and storage.device.type == generator.device.type:
        storage.normal_(generator=generator)
    elif dtype in _NARROW and storage.device.type == generator.device.type:
        storage.copy_(torch.empty_like(storage, dtype=torch.float16).normal_(generator=generator))
    else:
        storage.fill_(dtype is torch.bool)  # a mask, as a rule: what it hides is not computed
    return storage.as_strided(tuple(map(int, allocate.shape)), tuple(map(int, allocate.strides)))


def _elements(allocate: Allocate) -> int:
    """From the first element in memory to the last."""
    pairs = [(int(size), int(stride)) for size, stride in zip(allocate.shape, allocate.strides, strict=True)]
    return 1 + sum((size - 1) * stride for size, stride in pairs) if all(size for size, _ in pairs) else 0


def _bytes(allocate: Allocate) -> int:
    return _elements(allocate) * int(getattr(torch, allocate.dtype).itemsize)
