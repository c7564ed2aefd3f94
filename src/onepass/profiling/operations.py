"""Exposed time: what a fused kernel takes more because of one of its operations.

Every kernel of a profile is rebuilt without each of its dear operations (`without.py`), by the same schedule. All
versions take turns on the same tensors; the median of the differences to the whole kernel, round by round, is the
operation's. Exposed times do not add up to the kernel's: operations hide behind each other and behind memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

from ..analysis.nest import Refusal
from ..codegen.trial import emit_trial
from ..compilation import Compiled
from ..errors import OnepassError
from ..explain.measured import OperationTime, StepTime
from ..ir.expr import Load, postorder
from ..ir.kernel import ScheduledGroup
from ..ir.plan import Group
from ..ir.program import Buffer, Define
from ..ir.record import CompileRecord
from ..ir.schedule import Schedule
from ..ir.verify import verify_kernel
from ..pipeline import PlannedGraph, emit_kernels
from ..runtime.builders import builder_for
from ..runtime.executable import Executable
from ..runtime.kernels import LoadedKernel, build_each
from ..runtime.rounds import Laps, Rounds
from ..runtime.stopwatch import Run, arguments, as_program
from ..schedule.group import schedule_group
from .form import in_place, other_form, other_memory
from .without import dearest, without

MOST_OPERATIONS, MOST_KERNELS = 8, 12  # of a kernel; of a profile, those that take longest, equal ones as one
SECONDS = 0.6  # of measuring one kernel
NOISE = 0.02  # of a kernel's time
OTHER_SCHEDULE = "without it the kernel runs by another schedule"


def with_operations(
    steps: Sequence[StepTime], records: Sequence[CompileRecord], compiled: Sequence[Compiled]
) -> list[StepTime]:
    """The steps; kernels of several operations have the times of these."""
    kernels = sorted((s for s in steps if s.kind == "kernel"), key=lambda s: -s.time_us)
    alike = {_like(s): s for s in reversed(kernels)}  # of equal ones the longest
    made = {id(c.record): c.made for c in compiled}
    found: dict[tuple[object, ...], StepTime] = {}
    for step in sorted(alike.values(), key=lambda s: -s.time_us)[:MOST_KERNELS]:
        own = made.get(id(records[step.graph]))
        name = step.name.removesuffix("_partial")
        group = own.planned.names.get(name) if own is not None else None
        if own is not None and group is not None:
            found[_like(step)] = _measured(step, own.planned, group, own.choices.get(name))
    return [_with_parts(s, found[_like(s)]) if s.kind == "kernel" and _like(s) in found else s for s in steps]


def _like(step: StepTime) -> tuple[object, ...]:
    """Equal for kernels that do the same."""
    part = "_partial" in step.name
    return step.entry, step.bytes_moved, step.flops, step.predicted_us, step.operations, step.direction, part


def _with_parts(step: StepTime, measured: StepTime) -> StepTime:
    return replace(step, parts=measured.parts, alone_us=measured.alone_us, rest_us=measured.rest_us)


def _measured(step: StepTime, planned: PlannedGraph, group: Group, chosen: Schedule | None) -> StepTime:
    removed = dearest(group, MOST_OPERATIONS)
    if not removed:
        return step
    if chosen is not None:
        group = replace(group, schedule=chosen)
    watch = _Bench(planned, group)
    whole = watch.version(())
    if isinstance(whole, str):
        return replace(step, parts=tuple(_part(m, problem=whole) for m in removed))
    versions = {m: watch.version((m,)) for m in removed}
    bare = watch.version(tuple(removed))
    ready = [v for v in (*versions.values(), bare) if not isinstance(v, str)]
    laps = watch.race([whole, *ready])
    of = dict(zip(map(id, ready), laps[1:], strict=True))
    parts = [_part(m, problem=v) if isinstance(v, str) else _timed(m, laps[0], of[id(v)]) for m, v in versions.items()]
    rest_us = 0.0 if isinstance(bare, str) else of[id(bare)].time_us
    return replace(step, parts=tuple(parts), rest_us=rest_us, alone_us=laps[0].time_us)


def _part(m: Define, exposed_us: float = 0.0, spread_us: float = 0.0, problem: str = "") -> OperationTime:
    name = ".".join(m.origin.op.split(".")[:2]).removeprefix("aten.")
    return OperationTime(name, m.origin.line, exposed_us, spread_us, problem=problem)


def _timed(m: Define, whole: Laps, other: Laps) -> OperationTime:
    exposed_us, spread_us = _difference(whole, other)
    if exposed_us < -max(2 * spread_us, NOISE * whole.time_us):
        return _part(m, problem=f"without it the kernel is {-exposed_us:.1f} us slower: it becomes another one")
    return _part(m, exposed_us, spread_us)


def _difference(whole: Laps, other: Laps) -> tuple[float, float]:
    """The median of the differences of two calls, round by round, and half the distance of their quartiles."""
    pairs = (
        (whole.device_us, other.device_us) if whole.device_us and other.device_us else (whole.wall_us, other.wall_us)
    )
    if len(pairs[0]) != len(pairs[1]):
        return whole.time_us - other.time_us, 0.0
    differences = [a - b for a, b in zip(*pairs, strict=True)]
    low, _, high = quantiles(differences, n=4)
    return float(median(differences)), (high - low) / 2


class _Bench:
    """Versions of one group, which share their tensors."""

    def __init__(self, planned: PlannedGraph, group: Group) -> None:
        self.planned, self.group = planned, group
        self.target = planned.limits.narrowed(planned.target, group.members)
        self.names: dict[Buffer, str] = {}
        self.inputs = {e.buffer for e in postorder([s.value for s in group.stores]) if isinstance(e, Load)}
        self.whole: ScheduledGroup | None = None
        self.built: list[LoadedKernel] = []  # of the whole

    def version(self, removed: tuple[Define, ...]) -> Run | str:
        """The group without some operations, built; or why it cannot be."""
        group = without(self.group, removed)
        if isinstance(group, str):
            return group
        try:
            scheduled = schedule_group(group, self.target, "")
            for kernel in scheduled.kernels:
                verify_kernel(kernel)
        except OnepassError as error:
            return f"no such kernel: {str(error).splitlines()[0]}"
        except KeyError:  # an axis of the chosen schedule is not there any more
            return OTHER_SCHEDULE
        self.whole = self.whole or scheduled
        if scheduled.main.schedule != self.whole.main.schedule:
            return OTHER_SCHEDULE
        if other := other_form(self.whole.timed, scheduled.timed, self.inputs):
            kept = in_place(self.whole, removed, self.group.members)
            if kept is None:
                return other
            scheduled = kept
        trial = emit_trial(scheduled, self.names)
        if isinstance(trial, Refusal):
            return trial.reason
        sources, numbers = emit_kernels(self.planned, list(scheduled.timed))
        built = build_each(sources, builder_for(self.planned.target))
        kernels = [k for k in built if isinstance(k, LoadedKernel)]
        if len(kernels) < len(built):
            return "it cannot be built"
        ordered = [kernels[numbers[k]] for k in scheduled.timed]
        self.built = self.built or ordered
        if other := other_memory(self.built, ordered):
            return other
        return Run(as_program(trial), ordered, trial.stand_ins)

    def race(self, runs: Sequence[Run]) -> list[Laps]:
        """What the runs take, in turns."""
        device = torch.device(next(iter(self.names)).device)
        with torch.no_grad():
            taken = arguments(runs, device)
            calls = [
                partial(_call, Executable(run.host, run.kernels), inputs)
                for run, inputs in zip(runs, taken, strict=True)
            ]
            return Rounds(device).run(calls, SECONDS)


def _call(executable: Executable, inputs: list[Any]) -> Any:
    return executable.call(list(inputs))
