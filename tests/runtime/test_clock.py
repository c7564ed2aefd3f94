"""Steps timed where they stand: nested ones, and on a GPU those that the host was ahead of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onepass.runtime import clock as clocks
from onepass.runtime import rounds
from onepass.runtime.clock import Clock, Span, own_times
from onepass.runtime.rounds import LEAST_ROUNDS, MOST_HEAD_START, Rounds


def test_what_runs_inside_a_step_is_not_its_own_time() -> None:
    spans = [
        Span(1, 0, 0.0, 2.0),
        Span(2, 0, 4.0, 5.0),
        Span(2, 1, 6.0, 8.0),
        Span(1, 1, 3.0, 10.0),
        Span(1, 2, 10.0, 11.0),
    ]
    assert own_times(spans) == [2.0, 1.0, 2.0, 4.0, 1.0]
    nested = [Span(3, 0, 2.0, 3.0), Span(2, 0, 1.0, 4.0), Span(1, 0, 0.0, 5.0)]
    assert own_times(nested) == [1.0, 2.0, 2.0]


def test_the_hosts_clock() -> None:
    clock = Clock(torch.device("cpu"))
    clock.restart()
    start = clock.now()
    clock.stepped(7, 3, start)
    (span,) = clock.spans()
    assert (span.owner, span.step, span.counts) == (7, 3, True) and 0 <= span.start_us <= span.end_us
    clock.restart()
    assert clock.spans() == []


class Device:
    """Stands in for a GPU: events are recorded at its time, which the work ahead keeps behind the host's."""

    def __init__(self, ahead: int) -> None:
        self.now, self.ahead, self.filled = 0.0, ahead, 0

    def event(self, enable_timing: bool) -> Any:
        made = SimpleNamespace(at=0.0, elapsed_time=lambda end: (end.at - made.at) / 1e3)

        def record(_stream: Any = None) -> None:
            made.at = self.now
            self.now += 1.0

        made.record, made.synchronize, made.query = record, lambda: None, lambda: self.filled < self.ahead
        return made

    def zero_(self) -> None:
        self.filled += 1

    def door(self) -> SimpleNamespace:
        properties = SimpleNamespace(L2_cache_size=8)
        return SimpleNamespace(
            Event=self.event, current_stream=lambda _device: None, get_device_properties=lambda _device: properties,
            synchronize=lambda _device: setattr(self, "filled", 0),
        )  # fmt: skip


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(ahead=0)
    fake = SimpleNamespace(cuda=made.door(), empty=lambda *_, **__: made, int8=torch.int8, Tensor=torch.Tensor)
    for module in (clocks, rounds):
        monkeypatch.setattr(module, "torch", fake)
    return made


def test_a_step_counts_only_where_the_host_was_ahead(device: Device) -> None:
    clock = Clock(SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
    for ahead, counts in ((0, True), (1, False)):
        device.ahead = ahead
        clock.restart()
        clock.stepped(0, 0, clock.now())
        (span,) = clock.spans()
        assert span.counts is counts and span.end_us - span.start_us == 1.0


@pytest.mark.parametrize(("needed", "measured"), [(1, LEAST_ROUNDS), (MOST_HEAD_START, LEAST_ROUNDS - 2), (10**6, 0)])
def test_the_device_is_given_work_until_the_host_is_ahead(device: Device, needed: int, measured: int) -> None:
    device.ahead = needed
    made = Rounds(SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
    (laps,) = made.run([lambda: None], 0.0)
    assert len(laps.wall_us) == LEAST_ROUNDS and len(laps.device_us) == measured
    assert laps.time_us == (1.0 if measured else laps.time_us)


def test_calls_take_turns_and_the_order_rotates() -> None:
    seen: list[str] = []
    calls = [lambda: seen.append("a"), lambda: seen.append("b")]
    laps = Rounds(torch.device("cpu")).run(calls, 0.0, lambda: seen.append("|"))
    assert "".join(seen) == "ab" + "ab|ba|" * (LEAST_ROUNDS // 2) + "ab|" * (LEAST_ROUNDS % 2)
    assert [len(lap.wall_us) for lap in laps] == [LEAST_ROUNDS] * 2
