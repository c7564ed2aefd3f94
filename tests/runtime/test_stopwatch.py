"""Timing without a GPU: what is launched, what is refused, what an error becomes; the device's clock is made up."""

from __future__ import annotations

from collections.abc import Container
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from onepass.ir.source import Allocate, Launch, Trial
from onepass.ir.target import find_target
from onepass.runtime import stopwatch
from onepass.runtime.kernels import LoadedKernel
from onepass.runtime.stopwatch import (
    BATCH_US,
    HEAD_START,
    LEAST_REPETITIONS,
    REPETITIONS,
    DeviceStopwatch,
    Timing,
    stopwatch_for,
)

TRIAL = Trial(
    (
        Allocate("a0", ("3", "5"), ("5", "1"), "float32", "cpu"),
        Allocate("a1", ("3", "5"), ("0", "1"), "bfloat16", "cpu"),
        Allocate("a2", (), (), "int64", "cpu"),
    ),
    (Launch(0, ("a0", "a1"), ("3",), "7", "cpu", ("a2",)), Launch(1, ("a0",), (), "2", "cpu")),
)


class Event:
    """A call takes `takes` microseconds, the fourth of a batch a hundred times that.

    `late`: numbers of calls that the device reached before the host was done with them, a millisecond later.
    """

    made, asked, takes = 0, 0, 1.0
    late: Container[int] = ()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.number, Event.made = Event.made, Event.made + 1

    def query(self) -> bool:
        self.waited, Event.asked = Event.asked in Event.late, Event.asked + 1
        return self.waited

    def synchronize(self) -> None:
        Event.made = 0

    def elapsed_time(self, other: Event) -> float:
        assert other.number == self.number + 1
        return 1.0 if self.waited else Event.takes * (100 if self.number == 6 else 1) / 1e3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for torch's door to a GPU, as far as the stopwatch goes through it."""
    properties = SimpleNamespace(L2_cache_size=64, major=9, minor=0, name="A Chip")
    fake = SimpleNamespace(
        Event=Event, capturing=False, free=1 << 20, available=True, properties=properties, reserved=0,
        memory_reserved=lambda _device: fake.reserved, memory_allocated=lambda _device: 0,
        device=lambda _device: nullcontext(), mem_get_info=lambda _device: (fake.free, 1 << 30),
        is_current_stream_capturing=lambda: fake.capturing, is_available=lambda: fake.available,
        current_device=lambda: 0, get_device_properties=lambda _device: fake.properties,
        get_device_name=lambda: fake.properties.name,
    )  # fmt: skip
    monkeypatch.setattr(stopwatch.torch, "cuda", fake)
    for name, value in {"made": 0, "asked": 0, "takes": 1.0, "late": ()}.items():
        monkeypatch.setattr(Event, name, value)
    return fake


def kernels(seen: list[Any]) -> list[LoadedKernel]:
    def launching(number: int) -> Any:
        def launch(*arguments: int) -> int:
            seen.append((number, arguments[2:] if number == 0 else arguments[1:]))
            return 0

        return lambda _device: (launch, launch)

    return [LoadedKernel("first", launching(0), 2, 2, False), LoadedKernel("second", launching(1), 1, 0, False)]


def test_launches_are_timed(cuda: SimpleNamespace) -> None:
    seen: list[Any] = []
    state = torch.get_rng_state()
    timing = DeviceStopwatch("here").time(TRIAL, kernels(seen))
    assert timing.time_us == pytest.approx(1.0) and not timing.problem  # the median: one slow run does not count
    assert seen == [(0, (0, 3, 7, 0)), (1, (2, 0))] * (1 + 1 + REPETITIONS)  # a call to warm up, one to see how slow
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("takes", "repetitions"), [(BATCH_US / 4, 4), (22_000.0, LEAST_REPETITIONS)])
def test_slow_launches_are_repeated_less(takes: float, repetitions: int, cuda: SimpleNamespace) -> None:
    seen: list[Any] = []
    Event.takes = takes
    assert DeviceStopwatch("here").time(TRIAL, kernels(seen)).time_us == pytest.approx(takes)
    assert len(seen) == 2 * (1 + 1 + repetitions)


def test_what_is_slower_than_the_worst_is_launched_once(cuda: SimpleNamespace) -> None:
    seen: list[Any] = []
    Event.takes = 50.0
    assert DeviceStopwatch("here").time(TRIAL, kernels(seen), worst_us=49.0).time_us == pytest.approx(50.0)
    assert len(seen) == 2 * 2  # and once to load it
    DeviceStopwatch("here").time(TRIAL, kernels(seen), worst_us=51.0)
    assert len(seen) == 2 * 2 + 2 * (1 + 1 + REPETITIONS)


@pytest.mark.parametrize("late", [0, 4, 6])
def test_the_host_is_not_measured(late: int, cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that the device waited for do not count; where they are most of a batch, it starts later."""
    emptied: list[int] = []
    flush = torch.Tensor.zero_

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        emptied.append(tensor.numel())
        return flush(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", counted)
    Event.late = (0, *range(2, 2 + late))  # the first call, which is repeated, and so many of the batch
    assert DeviceStopwatch("here").time(TRIAL, kernels([])).time_us == pytest.approx(1.0)
    batches = [HEAD_START + 1, 4 * HEAD_START + 1, HEAD_START + REPETITIONS]
    batches += [4 * HEAD_START + REPETITIONS] if late == 6 else []
    assert emptied.count(2 * 64) == sum(batches)


def test_a_device_that_always_waits_is_not_measured(cuda: SimpleNamespace) -> None:
    Event.late = range(1000)
    assert DeviceStopwatch("here").time(TRIAL, kernels([])) == Timing(problem="the device waits for the host")


def test_real_tensors_are_made_where_fake_ones_are_compiled(cuda: SimpleNamespace) -> None:
    with FakeTensorMode():
        assert DeviceStopwatch("here").time(TRIAL, kernels([])).time_us > 0


def test_memory_is_left(cuda: SimpleNamespace) -> None:
    seen: list[Any] = []
    cuda.free = 4 * (60 + 10 + 8) - 1
    assert "78 bytes" in DeviceStopwatch("here").time(TRIAL, kernels(seen)).problem and not seen
    cuda.reserved = 1  # by torch, for nothing yet
    assert not DeviceStopwatch("here").time(TRIAL, kernels(seen)).problem


def test_a_kernel_that_cannot_be_launched(cuda: SimpleNamespace) -> None:
    def refused(_device: int) -> Any:
        raise OSError("cuFuncSetAttribute returned 1\nmore")

    first = LoadedKernel("first", refused, 2, 2, False)
    timing = DeviceStopwatch("here").time(TRIAL, [first, kernels([])[1]])
    assert timing == Timing(problem="cuFuncSetAttribute returned 1")


def test_nothing_is_timed_during_capture(cuda: SimpleNamespace) -> None:
    seen: list[Any] = []
    cuda.capturing = True
    assert "captured" in DeviceStopwatch("here").time(TRIAL, kernels(seen)).problem and not seen
    assert stopwatch_for(find_target("sm_90"), "cuda") is None


def test_only_the_chip_that_is_here_is_timed(cuda: SimpleNamespace) -> None:
    found = stopwatch_for(find_target("sm_90"), "cuda")
    assert found is not None and found.chip == "A Chip"
    assert stopwatch_for(find_target("sm_90"), "cpu") is None
    assert stopwatch_for(find_target("sm_80"), "cuda") is None
    cuda.properties.major = 3  # no target of the table
    assert stopwatch_for(find_target("sm_90"), "cuda") is None
    cuda.available = False
    assert stopwatch_for(find_target("sm_90"), "cuda") is None
