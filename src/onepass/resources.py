"""What built kernels ask of a chip: which schedule of a group comes next, and what is planned otherwise.

Takes what the chip's compiler said of a planned graph's kernels. A group that spills, needs more shared memory than
there is or holds fewer programs on a processor than its tiles were chosen for gets its next schedule. A group whose
schedules all spill, or that cannot be built, gets `Limits`, and the graph is planned again with these: other groups
keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .errors import KernelBuildError
from .explain.debug import build_progress
from .ir.choice import AS_RULED, Adjustment, Choice, group_name
from .ir.limits import FOLLOWERS, OPERANDS, PRODUCTS, Limits
from .ir.plan import Group
from .ir.record import CompileRecord, DecisionRecord, KernelRecord, stage
from .ir.target import Target
from .runtime.cache import Cache
from .runtime.entries import GraphEntry
from .runtime.kernels import Builder, LoadedKernel, build_each

if TYPE_CHECKING:
    from .pipeline import PlannedGraph

# Schedules of a group after the first. Of products whose operands are computed inside: smaller tiles would compute
# them more often. Of products without: the last ones have few rows, and read the other matrix many times.
CANDIDATES, WITH_OPERANDS, PRODUCT_CANDIDATES = 2, 1, 4
TOO_LARGE = 1 << 62  # bytes spilled by what does not run at all
# Tiles of products are chosen by the bytes of the matrices they hold. Barriers and reductions take a little more.
UNCOUNTED_BYTES = 2048
# A load less in flight costs up to 1.3 times the time (attention on one H200): programs must gain more than that.
LEAST_GAIN = 1.5
FEWER_LOADS = Adjustment(stages=-1)
_GIVEN_UP = {
    OPERANDS: "operands of its products come from memory",
    FOLLOWERS: "what follows its products is not in their kernel",
    PRODUCTS: "its products are the library's",
}
_Key = tuple[frozenset[str] | bool, ...]


class UnbuiltGroups(KernelBuildError):
    """Kernels that could not be built, by the names of their groups; it says what the first one said."""

    def __init__(self, problems: Mapping[str, KernelBuildError]) -> None:
        Exception.__init__(self, str(next(iter(problems.values()))))
        self.problems = problems


def build_entry(entry: GraphEntry, record: CompileRecord, builder: Builder, cache: Cache | None) -> list[LoadedKernel]:
    """The kernels of a graph, and in its record what the chip's compiler said of them. Raises `UnbuiltGroups`."""
    with stage(record, "build"):
        built = build_each(entry.kernels, builder, cache, build_progress())
    problems: dict[str, KernelBuildError] = {}
    for source, found in zip(entry.kernels, built, strict=True):
        if isinstance(found, KernelBuildError):
            problems |= {group_name(k.name): found for k in record.kernels if k.source == source.text}
        elif isinstance(found, BaseException):
            raise found
    if problems:
        raise UnbuiltGroups(problems)
    kernels = [k for k in built if isinstance(k, LoadedKernel)]
    note_resources(record, entry, kernels)
    return kernels


def note_resources(record: CompileRecord, entry: GraphEntry, kernels: Sequence[LoadedKernel]) -> None:
    """What the chip's own compiler said of every kernel, where it did."""
    built = {s.text: getattr(k.function, "built", None) for s, k in zip(entry.kernels, kernels, strict=True)}
    for kernel in record.kernels:
        kernel.note(built.get(kernel.source))


class Resources:
    """What is known of a graph's groups, over all of its plans. `notes`: what people are told."""

    def __init__(self, notes: list[DecisionRecord]) -> None:
        self.notes = notes
        self._spilled: dict[_Key, list[int]] = {}  # bytes that the schedules of a group spill, as far as built
        self._settled: dict[_Key, int] = {}  # the best of them, where all spill and nothing can be given up
        self._crowded: dict[tuple[_Key, int], int] = {}  # programs that a schedule holds: fewer than it should
        self._fewer_loads: dict[tuple[_Key, int], bool] = {}  # whether the schedule has one load less in flight

    def choices(self, planned: PlannedGraph) -> dict[str, Choice]:
        """Which schedules the groups of a plan get, where it is not the first."""
        found = {name: self._choice(group, planned) for name, group in planned.names.items()}
        return {n: choice for n, choice in found.items() if choice != Choice()}

    def _choice(self, group: Group, planned: PlannedGraph) -> Choice:
        key, candidate = _key(group, planned), self._candidate(group, planned)
        return Choice(candidate, FEWER_LOADS if self._fewer_loads.get((key, candidate)) else AS_RULED)

    def _candidate(self, group: Group, planned: PlannedGraph) -> int:
        key = _key(group, planned)
        return self._settled.get(key, min(len(self._spilled.get(key, ())), _candidates(group, planned.limits)))

    def after(self, planned: PlannedGraph, kernels: Sequence[KernelRecord]) -> Limits:
        """The limits of the next plan; those of this one where it may stay."""
        limits = planned.limits
        for name, group in planned.names.items():
            key, tried = _key(group, planned), self._candidate(group, planned)
            own = [k for k in kernels if group_name(k.name) == name]
            spilling = [k for k in own if _spilled(k, planned)]
            if key in self._settled or self._changed_loads(group, own[0], bool(spilling), planned) or not spilling:
                continue
            spilled = self._spilled.setdefault(key, [])
            if tried == len(spilled):  # else it is what it was in another plan
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

    def _changed_loads(self, group: Group, kernel: KernelRecord, spills: bool, planned: PlannedGraph) -> bool:
        """Whether the schedule gets other loads in flight. `kernel`: the group's first, with its products."""
        at = _key(group, planned), self._candidate(group, planned)
        held = _resident(kernel, planned.target)
        if at in self._fewer_loads:  # one load less was tried: it stays where the processor holds more programs
            before = self._fewer_loads[at]
            self._fewer_loads[at] = before and not spills and held > self._crowded[at]
            return before != self._fewer_loads[at]
        wanted = _resident(kernel, planned.target, UNCOUNTED_BYTES)
        if spills or not group.products or not held or wanted < LEAST_GAIN * held:
            return False
        self._crowded[at], self._fewer_loads[at] = held, True
        self.notes.append(_residence_note(kernel, at[1], held, wanted))
        return True

    def failed(self, planned: PlannedGraph, problems: Mapping[str, KernelBuildError]) -> Limits | None:
        """The limits of the next plan where kernels of some groups cannot be built; None where there are none left."""
        limits: Limits | None = planned.limits
        for name, error in problems.items():
            limits = limits and limits.without(planned.names[name], planned.target)
            reason = f"a kernel could not be built: {str(error).splitlines()[0]}"
            self.notes.append(DecisionRecord(name, name, "build", False, reason, 0.0, 0))
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


def _resident(kernel: KernelRecord, target: Target, without: int = 0) -> int:
    return target.resident_programs(kernel.registers, max(0, kernel.shared_bytes - without), kernel.threads)


def _spill_note(kernel: KernelRecord, tried: int) -> DecisionRecord:
    reason = f"schedule {tried} spills {kernel.spilled_bytes} bytes at {kernel.registers} registers"
    if not kernel.spilled_bytes:
        reason = f"schedule {tried} needs {kernel.shared_bytes} bytes of shared memory"
    return DecisionRecord(kernel.name, kernel.name, "spill", False, reason, 0.0, 0)


def _residence_note(kernel: KernelRecord, tried: int, held: int, wanted: int) -> DecisionRecord:
    reason = f"schedule {tried} needs {kernel.shared_bytes} bytes of shared memory: a processor holds {held} of the "
    reason += f"{wanted} programs that its tiles leave room for; one load less is in flight"
    return DecisionRecord(kernel.name, kernel.name, "residence", False, reason, 0.0, 0)


def _limit_note(name: str, group: Group, limits: Limits, target: Target) -> DecisionRecord:
    most = limits.most_members(group.members, target)
    if group.products:
        what = _GIVEN_UP[limits.given_up(group.members)]
    elif most < len(group.members):
        what = f"at most {most} operations in a kernel with one of its own"
    else:
        what = "no states are carried over long rows"
    return DecisionRecord(name, name, "spill", False, f"every schedule spills: {what}", 0.0, 0)
