"""Fill a compile record from the stages' results: kernels, externs, decisions, bytes.

bytes_moved counts each buffer a kernel touches once; bytes_unfused is the same with one kernel per
define; bytes_minimum is inputs read once plus outputs and updates written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..analysis.access import assumed_size, loads_bytes, operation_cost, storage_bytes
from ..analysis.inline import loads_of
from ..analysis.nest import opened
from ..analysis.price import price, price_together
from ..analysis.unify import unify
from ..ir.expr import Expr
from ..ir.kernel import Kernel, Loop, ScheduledGroup, walk
from ..ir.orders import KEEP
from ..ir.plan import FusionPlan, Group
from ..ir.poly import Symbol
from ..ir.program import Buffer, Define, Extern, Program, Update, buffers_in
from ..ir.record import CompileRecord, ExternRecord, KernelRecord, OrderRecord
from ..ir.source import KernelSource
from ..ir.target import Target
from ..planner.cost import predict_us
from .flow import data_flow
from .library import library_work

Scheduled = dict[Group, ScheduledGroup]
_Numbers = tuple[int, int, float, float]  # bytes read and written, predicted time, operations


def measure(
    record: CompileRecord,
    program: Program,
    plan: FusionPlan,
    kernels: tuple[Scheduled, Scheduled],
    sources: dict[Kernel, KernelSource],
    target: Target,
) -> None:
    """Write what happened into the record, in the place of what an earlier schedule left there.

    `kernels`: of every group, alone and as they are launched.
    """
    scheduled, launched = kernels
    record.program, record.plan = repr(program), "\n".join(map(_step_text, plan.steps))
    symbols = [*(i for i in program.inputs if isinstance(i, Symbol)), *program.symbol_sources]
    record.sizes = {s.name: assumed_size(s) for s in symbols}
    numbers: dict[Kernel, tuple[int, int, float, float]] = {}  # equal kernels have the same ones
    for group, result in scheduled.items():
        for k in result.kernels:
            if (same := k.like or k) not in numbers:
                numbers[same] = _numbers(group, k, result, target)
    together = {groups[0]: [scheduled[g].kernels for g in groups] for groups in plan.launches}
    record.kernels = []
    for group, result in launched.items():
        for n, k in enumerate(result.kernels):
            parts = [own[n] for own in together.get(group, [result.kernels]) if len(own) > n]
            found = _sum([numbers[p.like or p] for p in parts], parts, target)
            record.kernels.append(_kernel_record(k, parts, found, sources[k]))
    record.externs = [_extern_record(step, target) for step in plan.steps if isinstance(step, Extern)]
    record.flow = data_flow(program, plan, launched)
    record.decisions, record.orders = list(plan.decisions), list(_orders(program))
    in_externs = sum(e.bytes_moved for e in record.externs)
    copied = sum(2 * storage_bytes(target_) for target_, _ in plan.copies)
    record.bytes_moved = sum(k.bytes_read + k.bytes_written for k in record.kernels) + in_externs + copied
    updates = [s for s in program.statements if isinstance(s, Update)]
    record.bytes_unfused = sum(bytes_read([d.value]) + storage_bytes(d.buffer) for d in program.defines())
    record.bytes_unfused += in_externs + sum(2 * storage_bytes(u.target) for u in updates)
    record.bytes_minimum = _minimum(program, updates)


def _orders(program: Program) -> Iterator[OrderRecord]:
    """What users asked of the program."""
    statements: list[Define | Extern] = [*program.defines(), *program.externs()]
    for s in statements:
        where = s.origin.node, s.origin.line
        if s.orders.fuse:
            yield OrderRecord("together", "onepass.fuse", *where)
        if s.orders.no_fuse:
            yield OrderRecord("apart", s.orders.no_fuse, *where)
    yield from (OrderRecord("kept", KEEP, origin.node, origin.line) for origin in program.kept.values())


def _sum(each: list[_Numbers], kernels: list[Kernel], target: Target) -> _Numbers:
    """The numbers of a launch from those of its parts."""
    if len(each) == 1:
        return each[0]
    read, written, alone_us, work = (sum(n) for n in zip(*each, strict=True))
    saved_us = (len(each) - 1) * target.launch_us
    together_us = price_together(kernels, target).total_us if target.warp else alone_us - saved_us
    return int(read), int(written), together_us, work


def _kernel_record(kernel: Kernel, parts: Sequence[Kernel], numbers: _Numbers, source: KernelSource) -> KernelRecord:
    """Of parts that do the same the first one's operations are named."""
    alike: dict[tuple[tuple[str, str], ...], list[Kernel]] = {}
    for part in parts:
        alike.setdefault(tuple((o.op, o.line) for o in part.origins), []).append(part)
    operations = []
    for number, same in enumerate(alike.values()):
        several = {"parts": str(len(same)), "kind": str(number)} if len(same) > 1 else {}
        operations += [{"node": o.node, "op": o.op, "line": o.line} | several for o in same[0].origins]
    read, written, predicted_us, work = numbers
    schedule = f"{kernel.schedule}{_data_text(kernel)}"
    return KernelRecord(kernel.name, operations, read, written, schedule, source.text, predicted_us, work=work)


def _data_text(kernel: Kernel) -> str:
    """What is expected of sweeps between ends that data says."""
    loops, sizes = [s for s in walk(kernel.body) if isinstance(s, Loop)], {*kernel.symbols}
    parts = [s.part for s in loops if {x for p in (*s.after, *s.before) for x in p.symbols()} - sizes]
    return f"; data bounds its sweep, priced as if {min(parts):.0%} of the steps were left" if parts else ""


def _numbers(group: Group, kernel: Kernel, result: ScheduledGroup, target: Target) -> _Numbers:
    """Bytes read and written, the predicted time, and operations: the first kernel of a group does its work."""
    alone = len(result.kernels) == 1
    read = bytes_read([s.value for s in group.stores]) if alone else sum(map(storage_bytes, kernel.reads))
    written = sum(map(storage_bytes, kernel.writes))
    work = operation_cost(opened(unify(list(group.stores), group.products))) if kernel is result.main else 0.0
    predicted = price(kernel, target).total_us if target.warp else predict_us(read + written, work, 1, target)
    return read, written, predicted, work


def bytes_read(values: list[Expr]) -> int:
    """Bytes of the distinct elements the values load."""
    return sum(map(loads_bytes, loads_of(values).values()))


def _extern_record(step: Extern, target: Target) -> ExternRecord:
    used = {*buffers_in((step.args, step.kwargs))}
    if step.overwrites is not None:  # what is written of it is one of the others, read
        used -= {step.args[0].buffer}
        moved = 2 * sum(storage_bytes(b) for b in used)
    else:
        moved = sum(storage_bytes(b) for b in used | ({step.result} if isinstance(step.result, Buffer) else set()))
    flops, predicted_us = library_work(step, moved, target)
    return ExternRecord(step.origin.node, step.origin.op, step.why, step.origin.line, moved, flops, predicted_us)


def _minimum(program: Program, updates: list[Update]) -> int:
    """Each input that is used read once, each output and update written once."""
    used = {*loads_of(d.value for d in program.defines())}
    used |= {b for s in program.externs() for b in buffers_in((s.args, s.kwargs))}
    inputs = {b for b in program.inputs if isinstance(b, Buffer)}
    outputs = {*buffers_in(program.outputs)} - inputs
    return sum(map(storage_bytes, used & inputs)) + sum(map(storage_bytes, outputs | {u.target for u in updates}))


def _step_text(step: Extern | Group) -> str:
    if isinstance(step, Extern):
        return f"extern {step.origin.node}: {step.why}"
    stores = ", ".join(repr(s.buffer) for s in step.stores)
    return f"kernel stores {stores}: {', '.join(m.origin.node for m in step.members)}"
