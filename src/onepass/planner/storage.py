"""Where updated inputs are written: in place where that is safe, else through a copy at the end.

A store may target an input's storage only if every read of it is in an earlier step, or in this one at
the very index that is written. Anything else keeps its own buffer and is copied last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..analysis.access import is_dense, storage_bytes
from ..analysis.inline import identity_index, is_pointwise, loaded, loads_of
from ..ir.plan import Decision, Group
from ..ir.program import Buffer, Extern, Program, Update, buffers_in

Copies = tuple[tuple[Buffer, Buffer], ...]
SWEEPS = "the kernel reads the input again in another sweep"
ELSEWHERE = "the kernel reads the input at another index"


def place_updates(
    program: Program, steps: tuple[Group | Extern, ...], launches: Iterable[tuple[Group, ...]] = ()
) -> tuple[dict[Buffer, Buffer], Copies, Copies, list[Decision]]:
    """(stored buffer -> input it overwrites, copies at the end, those that order could spare, the decisions)."""
    in_place: dict[Buffer, Buffer] = {}
    copies: list[tuple[Buffer, Buffer]] = []
    rereads: list[tuple[Buffer, Buffer]] = []
    notes: list[Decision] = []
    outputs = {*buffers_in(program.outputs)}
    beside = {g: own for own in launches for g in own}
    for update in (s for s in program.statements if isinstance(s, Update)):
        reason = _obstacle(update, steps, outputs, in_place, beside)
        if reason is None:
            in_place[update.source] = update.target
        else:
            copies.append((update.target, update.source))
            rereads += [copies[-1]] if reason in (SWEEPS, ELSEWHERE) else []
        saved = 2 * storage_bytes(update.target) if reason is None else 0
        text = reason or "read only at the index that is written"
        notes.append(Decision(update.origin.node, update.target.name, "in-place", reason is None, text, 0.0, saved))
    return in_place, tuple(copies), tuple(rereads), notes


def _obstacle(
    update: Update,
    steps: tuple[Group | Extern, ...],
    outputs: set[Buffer],
    in_place: dict[Buffer, Buffer],
    beside: Mapping[Group, tuple[Group, ...]],
) -> str | None:
    """Why the input cannot be overwritten directly; None if it can."""
    source, target = update.source, update.target
    if source in outputs or target in outputs:
        return "the value is also returned"
    if source in in_place:
        return "the value already overwrites another input"
    if source.shape != target.shape or source.dtype is not target.dtype or source.strides != target.strides:
        return "the value has another layout"
    if not is_dense(target.shape, target.strides):
        return "the input's elements may overlap"
    writer = next(
        (k for k, s in enumerate(steps) if isinstance(s, Group) and any(x.buffer is source for x in s.stores)), None
    )
    if writer is None:
        return "the value comes from a call"
    for k, step in enumerate(steps):
        if k > writer and _reads(step, target):
            return "a later step still reads the input"
    group = steps[writer]
    assert isinstance(group, Group)
    if any(other is not group and _reads(other, target) for other in beside.get(group, ())):
        return "a kernel of the same launch reads the input"
    return _read_elsewhere(group, target)


def _read_elsewhere(group: Group, target: Buffer) -> str | None:
    for store in group.stores:
        reads = loads_of([store.value]).get(target)
        if reads is None:
            continue
        if not all(is_pointwise(s.value) for s in group.stores):
            return SWEEPS
        if not all(identity_index(e.index, store.axes) for e in reads):
            return ELSEWHERE
    return None


def _reads(step: Group | Extern, buffer: Buffer) -> bool:
    if isinstance(step, Extern):
        return buffer in buffers_in((step.args, step.kwargs))
    return any(buffer in loaded(s.value) for s in step.stores)
