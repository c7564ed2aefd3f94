"""Seconds, launches and memory of calls, and the machine's two ceilings.

On the CPU a call is timed by the clock. On CUDA it is timed by device events, with the L2 cache flushed before each
run and so much other work queued ahead that the device never waits for the host: what the host costs is in the wall
time, in a second device time behind one flush alone (as `triton.testing.do_bench` takes it), and measured by itself.
XLA has streams of its own, which torch's events do not see: its device time is the span of its kernels in a profile.
Systems take turns and the order rotates, so that drift falls on all alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .systems import compiled, first_line

Calls = dict[str, Callable[[], Any]]
Seconds = dict[str, float]
Span = tuple[str, float, float]  # a kernel's name, start and end in microseconds
_FLUSHED_BYTES = 256 << 20
_WARM_ROUNDS = 2  # they warm caches and allocator, and do not count
_FILL_SECONDS, _MOST_FILLS = 60e-6, 64  # a flush takes at least this long; as many of them at most run ahead


def times(calls: Calls, rounds: int, device: str) -> dict[str, Seconds]:
    """Median seconds of each call; on CUDA also the wall time until the device is idle again, and the device time
    where the device may wait for the host."""
    if device == "cpu":
        return {"seconds": clock(calls, rounds), "wall_seconds": {}, "waiting_seconds": {}}
    by_events = {name: call for name, call in calls.items() if name != "xla"}
    wall = clock(calls, max(3, rounds // 3), flushed=True)
    seconds = _events(by_events, rounds, max(wall.values(), default=0.0))
    waiting = _events(by_events, rounds, alone=True)
    if "xla" in calls:
        spans = [kernel_spans(calls["xla"], flushed=True) for _ in range(max(3, rounds // 3))]
        seconds["xla"] = statistics.median(span_seconds(s) for s in spans) if all(spans) else wall["xla"]
    return {"seconds": {name: seconds[name] for name in calls}, "wall_seconds": wall, "waiting_seconds": waiting}


def _turns(calls: Calls, rounds: int) -> Iterator[tuple[int, str, Callable[[], Any]]]:
    order = list(calls)
    for number in range(-_WARM_ROUNDS, rounds):
        for name in order:
            yield number, name, calls[name]
        order = order[1:] + order[:1]


def _flush_buffer() -> Tensor:
    return torch.empty(_FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")


def clock(calls: Calls, rounds: int, flushed: bool = False) -> Seconds:
    """Median seconds by the host's clock, see `clocked`."""
    return {name: statistics.median(values) for name, values in clocked(calls, rounds, flushed).items()}


def clocked(calls: Calls, rounds: int, flushed: bool = False) -> dict[str, list[float]]:
    """Seconds of every round; `flushed`: on a GPU, until it is idle again, its L2 cache flushed before."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    flush = _flush_buffer() if flushed else None
    for number, name, call in _turns(calls, rounds):
        if flush is not None:
            flush.zero_()
            torch.cuda.synchronize()
        start = time.perf_counter()
        output = call()
        if flush is not None:
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        del output
        if number >= 0:
            found[name].append(elapsed)
    return found


def _events(calls: Calls, rounds: int, host_seconds: float = 0.0, alone: bool = False) -> Seconds:
    """By device events. `alone`: nothing but one flush is queued ahead."""
    found: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    flush = _flush_buffer()
    fills = min(_MOST_FILLS, 1 + int(2 * host_seconds / _FILL_SECONDS))
    for number, name, call in _turns(calls, rounds):
        if alone:
            torch.cuda.synchronize()
        for _ in range(fills):
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        if number >= 0:
            found[name].append((start, end))
    torch.cuda.synchronize()
    return {name: 1e-3 * statistics.median(s.elapsed_time(e) for s, e in pairs) for name, pairs in found.items()}


def kernel_spans(call: Callable[[], Any], flushed: bool = False) -> list[Span]:
    """What ran on the device during one call, by the profiler; empty where it cannot see."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        return []
    if flushed:
        _flush_buffer().zero_()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return device_spans(profiler.events())


def device_spans(events: Any) -> list[Span]:
    """The device's own work among a profile's events: not the host's, not the labels of regions."""
    cuda = torch.autograd.DeviceType.CUDA
    return [
        (e.name, e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == cuda and not getattr(e, "is_user_annotation", False) and not e.name.startswith("## ")
    ]


def launches(spans: list[Span]) -> int:
    """Kernels; copies and fills by the driver are none."""
    return sum(not name.startswith(("Memcpy", "Memset")) for name, _, _ in spans)


def span_seconds(spans: list[Span]) -> float:
    """From the first kernel's start to the last one's end."""
    return 1e-6 * (max(end for _, _, end in spans) - min(start for _, start, _ in spans))


def own_spans(spans: Iterable[Span]) -> list[Span]:
    """In order, each without the time in which an earlier one still ran: some start early and wait for the last."""
    found, until = [], -math.inf
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        found.append((name, min(end, max(start, until)), end))
        until = max(until, end)
    return found


def busy_seconds(spans: list[Span]) -> float:
    """How long at least one kernel ran; the device's waiting for the host is not counted."""
    return 1e-6 * sum(end - start for _, start, end in own_spans(spans))


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most memory a call holds above what was held before it, its outputs included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before: int = torch.cuda.memory_allocated()
    output = call()
    torch.cuda.synchronize()
    del output
    peak: int = torch.cuda.max_memory_allocated()
    return peak - before


def ceilings(device: str, quick: bool) -> dict[str, Any]:
    """Bytes per second of a plain copy (read + write) and FLOPs per second of a library matmul."""
    if device == "cpu":
        dtype, size, elements = torch.float32, 512 if quick else 2048, (1 << 20) if quick else (64 << 20)
    else:
        dtype, size, elements = torch.bfloat16, 2048 if quick else 8192, 256 << 20
    source = torch.zeros(elements, device=device)
    target = torch.zeros_like(source)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    copy, matmul = (lambda: target.copy_(source)), (lambda: torch.mm(a, b, out=product))
    return {
        "bytes_per_second": 2 * source.nbytes / _best(copy, device, 15),
        "flops_per_second": 2 * size**3 / _best(matmul, device, 15),
        "matmul": f"{str(dtype).removeprefix('torch.')} {size}^3",
    }


def _best(call: Callable[[], Any], device: str, rounds: int) -> float:
    """On the CPU the best of all rounds; on CUDA the median, as every time there."""
    if device == "cuda":
        return _events({"ceiling": call}, rounds)["ceiling"]
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def host_cost(systems: list[str]) -> tuple[dict[str, Seconds], dict[str, str]]:
    """Seconds of the host per call: of one kernel, of twenty of unequal sizes, and with twenty matmuls between.

    The second result says what failed.
    """

    def one(x: Tensor) -> Tensor:
        return x * 2 + 1

    def twenty(x: Tensor) -> list[Tensor]:
        return [x[:, : 2 + k].softmax(-1) * (k + 1) for k in range(20)]

    def matmuls(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ x).relu()
        return x

    x = torch.randn(32, 32, device="cuda")
    found: dict[str, Seconds] = {}
    problems: dict[str, str] = {}
    for label, function in (("one kernel", one), ("twenty kernels", twenty), ("twenty matmuls + relu", matmuls)):
        found[label] = {}
        for system in systems:
            torch._dynamo.reset()
            try:
                found[label][system] = _host_seconds(compiled(system, function), x)
            except Exception as error:
                problems[f"{system}, {label}"] = first_line(error)
    return found, problems


def _host_seconds(run: Callable[[Tensor], Any], x: Tensor) -> float:
    for _ in range(20):
        run(x)
    torch.cuda.synchronize()
    samples = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(50):
            run(x)
        samples.append((time.perf_counter() - start) / 50)
        torch.cuda.synchronize()
    return statistics.median(samples)
