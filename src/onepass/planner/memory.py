"""Peak memory of a plan and of eager execution, in bytes beyond the inputs.

A fused plan keeps fewer tensors, but joining siblings can keep more of them alive together; a plan may
not need more than eager would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..analysis.access import storage_bytes
from ..analysis.inline import loaded
from ..ir.plan import Group
from ..ir.program import Buffer, Define, Extern, Program, buffers_in

Step = tuple[list[Buffer], set[Buffer]]  # (made, used)


def plan_peak(program: Program, steps: Sequence[Group | Extern], in_place: Collection[Buffer] = ()) -> int:
    """The most bytes alive at once when the steps run in order. `in_place`: results that overwrite inputs."""
    return _peak(program, [_group_step(s) if isinstance(s, Group) else _extern_step(s) for s in steps], in_place)


def eager_peak(program: Program) -> int:
    """The same with every operation storing its result."""
    made: list[Step] = []
    for s in program.statements:
        if isinstance(s, Define):
            made.append(([s.buffer], set(loaded(s.value))))
        elif isinstance(s, Extern):
            made.append(_extern_step(s))
    return _peak(program, made)


def _group_step(group: Group) -> Step:
    return [s.buffer for s in group.stores], {b for s in group.stores for b in loaded(s.value)}


def _extern_step(step: Extern) -> Step:
    made = [step.result] if isinstance(step.result, Buffer) else []
    return made, {*buffers_in((step.args, step.kwargs))}


def _peak(program: Program, steps: Iterable[Step], in_place: Collection[Buffer] = ()) -> int:
    steps = list(steps)
    kept = {*buffers_in(program.outputs)}
    last = {b: k for k, (made, used) in enumerate(steps) for b in (*made, *used)}
    given = {*in_place, *(b for b in program.inputs if isinstance(b, Buffer))}
    given |= {e.result for e in program.externs() if isinstance(e.result, Buffer) and e.overwrites is not None}
    dying: dict[int, list[Buffer]] = {}
    for b, k in last.items():
        if b not in kept and b not in given:
            dying.setdefault(k, []).append(b)
    alive = most = 0
    for k, (made, _) in enumerate(steps):
        alive += sum(storage_bytes(b) for b in made if b not in given)
        most = max(most, alive)
        alive -= sum(storage_bytes(b) for b in dying.get(k, ()))
    return most
