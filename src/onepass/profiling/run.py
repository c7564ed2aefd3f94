"""Measure a program: compile it, let it take turns with eager, time every step of it where it stands.

The program runs on copies of its arguments; what it holds is afterwards as it was before. In each round every whole
call runs once, unobserved, and one call of the compiled program is observed step by step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..compilation import Compiled
from ..errors import UnusableProgram
from ..explain.capture import Lent, freshly_compiled, lent, run_backward
from ..explain.measured import CallTime, Limits, Mark, StepTime
from ..explain.profile import Profile
from ..explain.text import issue_text
from ..ir.record import CompileRecord, ExternRecord, KernelRecord
from ..ir.source import STEPS, Call, Launch
from ..ir.target import find_target
from ..runtime.clock import Clock, Span, own_times
from ..runtime.executable import Executable
from ..runtime.rounds import Laps, Rounds
from .ceilings import measured_limits
from .issue import note_issue
from .operations import with_operations

SYSTEMS = ("eager", "inductor", "aot_eager")
Watch = Callable[[], AbstractContextManager[list[Compiled]]]
Recorder = Callable[[], AbstractContextManager[list[CompileRecord]]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a profile. `seconds`: that all rounds together may take; `beside`: of `SYSTEMS`."""

    beside: tuple[str, ...] = ("eager",)
    seconds: float = 3.0
    operations: bool = False


def measure_program(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: Callable[..., Any],
    recorder: Recorder,
    watch: Watch,
    wanted: Wanted,
) -> Profile:
    """What a call of the program, forward and backward, is made of."""
    with lent(function, args, kwargs) as own, recorder() as records, watch() as compiled, ExitStack() as current:
        if own.memoryless:
            raise UnusableProgram("tensors without memory cannot be run", "Profile real tensors; explain plans others")
        ours, first_s = _first_call(own, freshly_compiled(own.function, backend))
        device = device_of(own, compiled)
        current.enter_context(torch.cuda.device(device) if device.type == "cuda" else nullcontext())
        others, problems = _others(own, wanted.beside)
        if absent := next((c for c in compiled if c.executable is None), None):
            problem = f"kernels for {absent.record.target} do not run here"
            raise UnusableProgram(problem, "Profile without a target; explain plans for chips that are absent")
        rounds = Rounds(device)
        clock = Clock(device)
        seen: list[list[Span]] = []
        executables = [c.executable for c in compiled if c.executable is not None]

        def observe() -> None:
            ours()  # caches and threads are as its own last call leaves them, not another system's
            with observed(executables, clock):
                seen.append(rounds.steps(ours, clock))

        laps = rounds.run([ours, *(call for _, call, _ in others)], wanted.seconds, observe)
        limits = measured_limits() if device.type == "cpu" else _limits_of(compiled)
        if wanted.operations:
            note_issue(compiled)
        steps, marks = steps_of(records, compiled, seen)
        if wanted.operations:
            steps = with_operations(steps, records, compiled)
    calls = [_call_time("onepass", laps[0], first_s)]
    calls += [_call_time(name, lap, first) for (name, _, first), lap in zip(others, laps[1:], strict=True)]
    calls += [CallTime(name, 0.0, problem=text) for name, text in problems.items()]
    return Profile(list(records), steps, calls, limits, _device_name(device), len(seen), marks)


def device_of(own: Lent, compiled: Sequence[Compiled]) -> torch.device:
    """Where the program runs: a GPU if one of its kernels or of its arguments is there."""
    hosts = [c.executable.host for c in compiled if c.executable is not None]
    devices = [torch.device(i.device) for h in hosts for i in h.instructions if isinstance(i, Launch) and i.device]
    devices += [t.device for t in pytree.tree_leaves((own.args, own.kwargs)) if isinstance(t, torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu, {torch.get_num_threads()} threads"


def _first_call(own: Lent, function: Callable[..., Any]) -> tuple[Callable[[], Any], float]:
    """Forward and backward of a function on the program's arguments, and the seconds of its first run."""

    def call() -> None:
        result = function(*own.args, **own.kwargs)
        if torch.is_grad_enabled():
            run_backward(result)

    start = time.perf_counter()
    call()
    return call, time.perf_counter() - start


_Timed = tuple[str, Callable[[], Any], float]


def _others(own: Lent, names: Iterable[str]) -> tuple[list[_Timed], dict[str, str]]:
    """What the program is compared with, and why some of it is not there."""
    found: list[_Timed] = []
    problems: dict[str, str] = {}
    for name in names:
        if name not in SYSTEMS:
            raise UnusableProgram(f"nothing is called {name!r} to compare with", f"Choose from {', '.join(SYSTEMS)}")
        function = own.function if name == "eager" else freshly_compiled(own.function, name)
        try:
            found.append((name, *_first_call(own, function)))
        except Exception as error:
            if name == "eager":
                raise
            problems[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return found, problems


def observed(executables: Sequence[Executable], clock: Clock) -> ExitStack:
    """Every step of the executables is timed meanwhile."""
    stack = ExitStack()
    for executable in executables:
        executable.observe(clock)
        stack.callback(executable.observe, None)
    return stack


def _limits_of(compiled: Sequence[Compiled]) -> Limits:
    target = find_target(compiled[0].record.target) if compiled else find_target("cpu")
    return Limits(target.memory_bytes_per_us, 2 * target.products_per_us, f"{target.name}: {target.rates.source}")


def _call_time(name: str, laps: Laps, first_s: float) -> CallTime:
    device_us = float(median(laps.device_us)) if laps.device_us else 0.0
    return CallTime(name, float(median(laps.wall_us)), min(laps.device_us or laps.wall_us), device_us, first_s)


def steps_of(
    records: Sequence[CompileRecord], compiled: Sequence[Compiled], calls: Sequence[Sequence[Span]]
) -> tuple[list[StepTime], list[Mark]]:
    """The steps that ran, in the order of their first run, and the last observed call as a time line."""
    known = {id(c.executable.host): c for c in compiled if c.executable is not None}
    place = {id(r): k for k, r in enumerate(records)}
    times: dict[tuple[int, int], list[float]] = {}
    runs: dict[tuple[int, int], int] = {}
    for spans in calls:
        taken: dict[tuple[int, int], float] = {}
        runs.clear()
        void: set[tuple[int, int]] = set()
        for span, own_us in zip(spans, own_times(spans), strict=True):
            key = span.owner, span.step
            taken[key] = taken.get(key, 0.0) + own_us
            runs[key] = runs.get(key, 0) + 1
            void |= set() if span.counts else {key}
        for key, us in taken.items():
            times.setdefault(key, []).extend(() if key in void else (us,))
    order = {key: n for n, key in enumerate(times)}
    steps = [
        _step(known[owner], place.get(id(known[owner].record), 0), step, found, runs.get((owner, step), 1))
        for (owner, step), found in times.items()
    ]
    last = calls[-1] if calls else ()
    return steps, [Mark(order[s.owner, s.step], s.start_us, s.end_us - s.start_us) for s in last]


def _step(compiled: Compiled, graph: int, number: int, times: Sequence[float], runs: int) -> StepTime:
    assert compiled.executable is not None
    instructions, record = compiled.executable.host.instructions, compiled.record
    kind = type(instructions[number])
    before = sum(isinstance(i, kind) for i in instructions[:number])
    entry = compiled.executable.step_name(number)
    time_us = float(median(times)) if times else 0.0
    if kind is Launch:
        return _of_kernel(record.kernels[before], record, graph, entry, time_us, runs)
    if kind is Call and before < len(record.externs):
        return _of_extern(record.externs[before], record, graph, entry, time_us, runs)
    assert kind in STEPS
    return StepTime(graph, record.direction, entry, entry, "copy", time_us, runs)


def _of_kernel(k: KernelRecord, record: CompileRecord, graph: int, entry: str, us: float, runs: int) -> StepTime:
    operations = tuple(o.get("op", "") for o in k.operations)
    lines = tuple(dict.fromkeys(o["line"] for o in k.operations if o.get("line")))
    moved = k.bytes_read + k.bytes_written
    return StepTime(
        graph, record.direction, k.name, entry, "kernel", us, runs, k.predicted_us, moved, k.work, operations, lines,
        issue=issue_text(k),
    )  # fmt: skip


def _of_extern(e: ExternRecord, record: CompileRecord, graph: int, entry: str, us: float, runs: int) -> StepTime:
    lines = (e.line,) if e.line else ()
    name = entry if entry != "call" else e.op
    return StepTime(
        graph, record.direction, e.op, name, "extern", us, runs, e.predicted_us, e.bytes_moved, e.flops, (e.op,), lines
    )
