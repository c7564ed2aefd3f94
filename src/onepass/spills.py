"""Kernels that spill: which schedule of a group comes next, and what is planned otherwise where all of them spill.

Takes what the chip's compiler said of a planned graph's kernels. A group that spills gets its next schedule; one whose
schedules all spill gets `Limits`, and the graph is planned again with these: other groups keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ir.choice import Choice, group_name
from .ir.limits import FOLLOWERS, OPERANDS, PRODUCTS, Limits
from .ir.plan import Group
from .ir.record import DecisionRecord, KernelRecord
from .ir.target import Target
from .pipeline import PlannedGraph

# Schedules of a group beside the first. Of products whose operands are computed inside: smaller tiles would compute
# them more often. Of products without: the last ones have few rows, and read the other matrix many times.
CANDIDATES, WITH_OPERANDS, PRODUCT_CANDIDATES = 2, 1, 4
TOO_LARGE = 1 << 62  # bytes spilled by what does not run at all
_GIVEN_UP = {
    OPERANDS: "operands of its products come from memory",
    FOLLOWERS: "what follows its products is not in their kernel",
    PRODUCTS: "its products are the library's",
}
_Key = tuple[frozenset[str] | bool, ...]


class Spills:
    """What is known of a graph's groups, over all of its plans. `notes`: what people are told."""

    def __init__(self, notes: list[DecisionRecord]) -> None:
        self.notes = notes
        self._spilled: dict[_Key, list[int]] = {}  # bytes that the schedules of a group spill, as far as built
        self._settled: dict[_Key, int] = {}  # the best of them, where all spill and nothing can be given up

    def choices(self, planned: PlannedGraph) -> dict[str, Choice]:
        """Which schedules the groups of a plan get, where it is not the first."""
        found = {name: self._candidate(group, planned) for name, group in planned.names.items()}
        return {n: Choice(candidate) for n, candidate in found.items() if candidate}

    def _candidate(self, group: Group, planned: PlannedGraph) -> int:
        key = _key(group, planned)
        return self._settled.get(key, min(len(self._spilled.get(key, ())), _candidates(group, planned.limits)))

    def after(self, planned: PlannedGraph, kernels: Sequence[KernelRecord]) -> Limits:
        """The limits of the next plan; those of this one where it may stay."""
        limits = planned.limits
        for name, group in planned.names.items():
            spilling = [k for k in kernels if group_name(k.name) == name and _spilled(k, planned)]
            if not spilling or (key := _key(group, planned)) in self._settled:
                continue
            spilled = self._spilled.setdefault(key, [])
            if (tried := self._candidate(group, planned)) == len(spilled):  # else it is what it was in another plan
                self.notes += [_spill_note(k, tried) for k in spilling]
                spilled.append(max(_spilled(k, planned) for k in spilling))
            if len(spilled) <= _candidates(group, planned.limits):
                continue
            tighter = limits.tightened(group, planned.target)
            if tighter is None:
                self._settled[key] = spilled.index(min(spilled))
            else:
                limits = tighter
                self.notes.append(_limit_note(name, group, limits, planned.target))
        return limits


def _key(group: Group, planned: PlannedGraph) -> _Key:
    """What has the same schedules in every plan."""
    carries = planned.limits.narrowed(planned.target, group.members) is planned.target
    names = (frozenset(x.buffer.name for x in part) for part in (group.members, group.stores))
    return *names, carries, group.products, group.beside, group.tiled


def _candidates(group: Group, limits: Limits) -> int:
    if not group.products:
        return CANDIDATES
    return PRODUCT_CANDIDATES if limits.given_up(group.members) else WITH_OPERANDS


def _spilled(kernel: KernelRecord, planned: PlannedGraph) -> int:
    return TOO_LARGE if kernel.shared_bytes > planned.target.shared_bytes else kernel.spilled_bytes


def _spill_note(kernel: KernelRecord, tried: int) -> DecisionRecord:
    reason = f"schedule {tried} spills {kernel.spilled_bytes} bytes at {kernel.registers} registers"
    if not kernel.spilled_bytes:
        reason = f"schedule {tried} needs {kernel.shared_bytes} bytes of shared memory"
    return DecisionRecord(kernel.name, kernel.name, "spill", False, reason, 0.0, 0)


def _limit_note(name: str, group: Group, limits: Limits, target: Target) -> DecisionRecord:
    most = limits.most_members(group.members, target)
    if group.products:
        what = _GIVEN_UP[limits.given_up(group.members)]
    elif most < len(group.members):
        what = f"at most {most} operations in a kernel with one of its own"
    else:
        what = "no states are carried over long rows"
    return DecisionRecord(name, name, "spill", False, f"every schedule spills: {what}", 0.0, 0)
