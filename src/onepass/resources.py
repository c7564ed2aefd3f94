"""The next schedule of a group whose kernels do not fit the chip, else the limits of another plan.

In: what the chip's compiler said of a planned graph's kernels. A group that spills, needs more shared memory than there
is or holds fewer programs on a processor than its tiles were chosen for gets its next schedule. A group whose
schedules all spill, or that cannot be built, gets `Limits`, and the graph is planned again with these: other groups
keep their limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import KernelBuildError
from .explain.debug import build_progress
from .ir.limits import FOLLOWERS, OPERANDS, PRODUCTS, Limits
from .ir.plan import Group
from .ir.record import FEW_BYTES, CompileRecord, Decision, KernelRecord, stage
from .ir.schedule import Schedule
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
FEWER_LOADS = "stages -1"
_GIVEN_UP = {
    OPERANDS: "operands of its products come from memory",
    FOLLOWERS: "what follows its products is not in their kernel",
    PRODUCTS: "its products are the library's",
}
_Key = tuple[frozenset[str] | bool | Schedule | None, ...]


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
            problems |= {k.group: found for k in record.kernels if k.source == source.text}
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


@dataclass(frozen=True, slots=True)
class _Seen:
    """The facts of one schedule of a group: bytes spilled, and programs that a processor holds and could hold."""

    spilled: int
    held: int = 0
    wanted: int = 0

    @property
    def crowded(self) -> bool:
        """Whether one load less in flight may let a processor hold more programs."""
        return 0 < LEAST_GAIN * self.held <= self.wanted


class Resources:
    """The facts of a graph's groups, over all of its plans. `notes`: what people are told."""

    def __init__(self, notes: list[Decision]) -> None:
        self.notes = notes
        self._seen: dict[_Key, dict[Schedule | None, _Seen]] = {}  # None: the planned schedule

    def choices(self, planned: PlannedGraph) -> dict[str, Schedule]:
        """Which schedules the groups of a plan get, where it is not the planned one."""
        found = {name: self._choice(name, planned) for name in planned.names if name not in planned.shared}
        return {name: schedule for name, schedule in found.items() if schedule is not None}

    def _choice(self, name: str, planned: PlannedGraph) -> Schedule | None:
        """The first schedule that was not seen to spill; the one that spills least where all do."""
        seen = self._seen.get(_key(planned.names[name], planned), {})
        for schedule in self._candidates(name, planned):
            found = seen.get(schedule)
            if found is None or not (found.spilled or found.crowded):
                return schedule
            if not found.spilled:
                fewer_loads = planned.neighbours(name, schedule).get(FEWER_LOADS, schedule)
                less = seen.get(fewer_loads)
                return fewer_loads if less is None or (not less.spilled and less.held > found.held) else schedule
        return min(self._candidates(name, planned), key=lambda schedule: seen[schedule].spilled)

    def _candidates(self, name: str, planned: PlannedGraph) -> Iterator[Schedule | None]:
        """The planned schedule, then smaller ones."""
        yield None
        group = planned.names[name]
        computed = PRODUCT_CANDIDATES if planned.limits.given_up(group.members) else WITH_OPERANDS
        yield from planned.smaller(name, computed if group.products else CANDIDATES)

    def after(self, planned: PlannedGraph, kernels: Sequence[KernelRecord]) -> Limits:
        """The limits of the next plan; those of this one where it may stay."""
        limits = planned.limits
        own: dict[str, list[KernelRecord]] = {}
        for kernel in kernels:
            own.setdefault(kernel.group, []).append(kernel)
        limits = self._parted(planned, own, limits)
        for name, group in planned.names.items():
            if name in planned.shared:
                continue
            schedule, seen = self._choice(name, planned), self._seen.setdefault(_key(group, planned), {})
            if schedule not in seen:
                seen[schedule] = self._facts(own[name], name, schedule, planned)
            following = self._choice(name, planned)
            if following not in seen or not seen[following].spilled:
                continue
            tighter = limits.tightened(group, planned.target)
            if tighter is not None:
                limits = tighter
                self._note(name, "spill", f"every schedule spills: {_limit_text(group, limits, planned.target)}")
        return limits

    def _parted(self, planned: PlannedGraph, own: Mapping[str, Sequence[KernelRecord]], limits: Limits) -> Limits:
        """The limits under which groups share no launch that spills."""
        for groups in planned.plan.launches:
            name = planned.name_of(groups[0])
            spilled = max((_spilled(k, planned.target) for k in own.get(name, ())), default=0)
            if spilled > FEW_BYTES:
                self._note(name, "launch", f"a launch of {len(groups)} parts spills {spilled} bytes")
                limits = limits.parting(groups)
        return limits

    def _facts(
        self, kernels: Sequence[KernelRecord], name: str, schedule: Schedule | None, planned: PlannedGraph
    ) -> _Seen:
        """The facts of a group's kernels; a group with products has them in the first one that sweeps."""
        candidates = [*self._candidates(name, planned)] if schedule else [schedule]
        first, target, ruled = (
            next((k for k in kernels if not k.asks), kernels[0]),
            planned.target,
            schedule in candidates,
        )
        tried, products = candidates.index(schedule) if ruled else 0, planned.names[name].products
        held, wanted = (
            target.resident_programs(first.registers, max(0, first.shared_bytes - uncounted), first.threads)
            for uncounted in (0, UNCOUNTED_BYTES)
        )
        few = 0 if products else FEW_BYTES  # a product's steps wait for spilled values
        spilled = [n if n > few else 0 for n in (_spilled(k, target) for k in kernels)]
        seen = _Seen(max(spilled), held, wanted if products and ruled else 0)
        for kernel, spills in zip(kernels, spilled, strict=True):
            if ruled and spills:
                self._note(kernel.name, "spill", _spill_text(kernel, tried))
        if seen.crowded and not seen.spilled:
            reason = f"schedule {tried} needs {first.shared_bytes} bytes of shared memory: a processor holds {held} of "
            reason += f"the {wanted} programs that its tiles leave room for; one load less is in flight"
            self._note(first.name, "residence", reason)
        return seen

    def failed(self, planned: PlannedGraph, problems: Mapping[str, KernelBuildError]) -> Limits | None:
        """The limits of the next plan where kernels of some groups cannot be built; None where there are none left."""
        limits: Limits | None = planned.limits
        for name, error in problems.items():
            together = next((own for own in planned.plan.launches if planned.names[name] in own), None)
            if together is not None:
                limits = limits and limits.parting(together)
            else:
                limits = limits and limits.without(planned.names[name], planned.target)
            self._note(name, "build", f"a kernel could not be built: {str(error).splitlines()[0]}")
        return limits

    def _note(self, name: str, kind: str, reason: str) -> None:
        self.notes.append(Decision(name, name, kind, False, reason, 0.0, 0))


def _key(group: Group, planned: PlannedGraph) -> _Key:
    """What has the same schedules in every plan."""
    carries = planned.limits.narrowed(planned.target, group.members) is planned.target
    names = (frozenset(x.buffer.name for x in part) for part in (group.members, group.stores))
    return *names, carries, group.schedule


def _spilled(kernel: KernelRecord, target: Target) -> int:
    return TOO_LARGE if kernel.shared_bytes > target.shared_bytes else kernel.spilled_bytes


def _spill_text(kernel: KernelRecord, tried: int) -> str:
    if not kernel.spilled_bytes:
        return f"schedule {tried} needs {kernel.shared_bytes} bytes of shared memory"
    return f"schedule {tried} spills {kernel.spilled_bytes} bytes at {kernel.registers} registers"


def _limit_text(group: Group, limits: Limits, target: Target) -> str:
    most = limits.most_members(group.members, target)
    if group.products:
        return _GIVEN_UP[limits.given_up(group.members)]
    if most < len(group.members):
        return f"at most {most} operations in a kernel with one of its own"
    return "no states are carried over long rows"
