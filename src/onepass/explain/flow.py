"""Where data goes: what launches and calls read and write, before fusion and after it, and the memory they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..analysis.access import loads_bytes, storage_bytes
from ..analysis.inline import loads_of
from ..ir.expr import Expr
from ..ir.kernel import Kernel, ScheduledGroup
from ..ir.plan import FusionPlan, Group
from ..ir.program import Buffer, Define, Extern, Origin, Program, buffers_in
from ..ir.record import CompileRecord, DataFlow, FlowStep


def data_flow(program: Program, plan: FusionPlan, launched: Mapping[Group, ScheduledGroup]) -> DataFlow:
    """What a plan reads and writes. `launched`: the kernels of every group, those of a shared launch once."""
    found = DataFlow()
    for step in plan.steps:
        if isinstance(step, Extern):
            found.steps.append(_call(step))
        else:
            single = len(launched[step].kernels) == 1
            found.steps += [_launch(k, step if single else None, plan) for k in launched[step].kernels]
    for s in program.statements:
        if isinstance(s, Define):
            found.unfused.append(_step(s.origin.node, "operation", s.origin, _loads([s.value]), _sizes([s.buffer])))
        elif isinstance(s, Extern):
            found.unfused.append(_call(s))
    found.inputs = _sizes(b for b in program.inputs if isinstance(b, Buffer))
    found.results = [b.name for b in dict.fromkeys(buffers_in(program.outputs)) if b.name not in found.inputs]
    return found


def peak_of(record: CompileRecord) -> tuple[FlowStep, dict[str, int]] | None:
    """The step during which most is in memory beside the inputs, and what that is: bytes by the name of the buffer."""
    steps = record.flow.steps
    ends = dict.fromkeys(record.flow.results, len(steps))
    for number, step in enumerate(steps):
        ends |= {b: max(ends.get(b, 0), number) for b in (*step.reads, *step.writes)}
    held: dict[str, int] = {}
    found: tuple[FlowStep, dict[str, int]] | None = None
    most = 0
    for number, step in enumerate(steps):
        held |= {b: count for b, count in step.writes.items() if b not in record.flow.inputs}
        if (total := sum(held.values())) > most:
            found, most = (step, dict(held)), total
        held = {b: count for b, count in held.items() if ends[b] > number}
    return found


def _call(step: Extern) -> FlowStep:
    written = [step.result] if isinstance(step.result, Buffer) else []
    read = [b for b in buffers_in((step.args, step.kwargs)) if b not in written]
    return _step(step.origin.node, "extern", step.origin, _sizes(read), _sizes(written))


def _launch(kernel: Kernel, group: Group | None, plan: FusionPlan) -> FlowStep:
    """Of a kernel that is all of a group, a buffer read in part counts with that part."""
    parts = _loads([s.value for s in group.stores]) if group is not None else {}
    origin = kernel.origins[-1] if kernel.origins else Origin("", "")
    written = [plan.in_place.get(b, b) for b in kernel.writes]
    return _step(kernel.name, "kernel", origin, _sizes(kernel.reads) | parts, _sizes(written))


def _step(name: str, kind: str, origin: Origin, reads: dict[str, int], writes: dict[str, int]) -> FlowStep:
    return FlowStep(name, kind, origin.op, origin.line, reads, writes)


def _loads(values: list[Expr]) -> dict[str, int]:
    return {b.name: loads_bytes(loads) for b, loads in loads_of(values).items()}


def _sizes(buffers: Iterable[Buffer]) -> dict[str, int]:
    return {b.name: storage_bytes(b) for b in buffers}
