"""The groups of one planning run as they are merged: which could be one kernel, and what each takes.

One legality function; a bound on the time for what is only considered, the price of a built kernel for what is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeVar

from ..analysis.access import numel
from ..analysis.inline import identity_index, loads_of, reductions
from ..analysis.legality import analyse, bare
from ..analysis.nest import Refusal
from ..ir.expr import Const, Expr, Index, Load, Pointwise, postorder
from ..ir.ops import CHECKED, OPS
from ..ir.plan import Chosen, Store
from ..ir.poly import in_range
from ..ir.program import Buffer, Define, Update
from ..ir.target import Target
from .cost import Cost, nest_cost
from .groups import GroupGraph
from .kin import Kin
from .ordered import Ordered, refuse
from .regions import Regions
from .setting import Setting

T = TypeVar("T")


class PricedGroups:
    """The groups of a program whose matrix products are decided on."""

    def __init__(self, regions: Regions, setting: Setting) -> None:
        self.program, self.regions = regions.program, regions
        self.setting, self.target = setting, setting.target
        self.updates = {s.source: s.target for s in self.program.statements if isinstance(s, Update)}
        self.restart()

    def restart(self) -> None:
        """Nothing is merged but the regions."""
        self.graph = GroupGraph(self.program)
        self.locked = {self.graph.join(r.members, r.again): r for r in self.regions.regions}  # nothing joins them later
        self.graph.remove_unread(self.locked.keys())
        self.costs: dict[int, Cost] = {}
        self.kin = Kin(self.graph, self.target)
        self.decisions = list(self.regions.decisions)
        apart = {n for n, own in self.graph.members.items() if any(d.orders.no_fuse for d in own)}
        self.closed = apart | self.locked.keys()  # nothing joins or leaves them
        self.asked: set[int] = set()  # regions of `onepass.fuse`: others may join, nothing leaves them
        if self.setting.options.fuse:
            self._join_asked()

    def _join_asked(self) -> None:
        """Make a group of each region that is asked to share a kernel; `UnmetOrder` where there is none."""
        ordered, graph = Ordered(self.program), self.graph
        ordered.refuse_calls()
        for region in ordered.regions.values():
            numbers = {graph.node_of.get(d.buffer, -1) for d in region}
            members = [d for d in region if graph.node_of.get(d.buffer) in graph.members.keys() - self.locked.keys()]
            if len(members) < 2 or not numbers.isdisjoint(self.locked):
                continue
            if (apart := next((d.orders.no_fuse for d in members if d.orders.no_fuse), None)) is not None:
                raise refuse(members, f"one that lies between is asked to be apart: {apart}")
            if graph.is_cyclic(members, ()):
                raise refuse(members, "another region lies between its operations")
            self.asked.add(graph.join(members, ()))
        for number in self.asked:
            members = graph.members[number]
            found = self.price(members, frozenset((number,)))
            if len(members) > (limit := self.target.members_per_kernel):
                raise refuse(members, f"{len(members)} operations, limit {limit}")
            if isinstance(found, Refusal):
                raise refuse(members, found.reason)
            self.costs[number] = found

    def consider(self, members: list[Define], group: frozenset[int]) -> Cost | Refusal:
        """The one legality function: nest, buffers, size. The time of the cost is a bound that no kernel beats."""
        return self._ask("verdict", members, group, self._verdict)

    def _ask(
        self,
        about: Hashable,
        members: list[Define],
        group: frozenset[int],
        answer: Callable[[tuple[Store, ...], Target], T],
    ) -> T:
        """What is found of the stores of a group, or was found of those of an equal one."""
        target = self.setting.limits.narrowed(self.target, members)
        stored, graph = {*self.graph.stored(members, group)}, self.graph
        ask = self.setting.answers.ask
        return ask((about, target), members, stored, lambda: answer(graph.stores(members, group), target)).value

    def _verdict(self, stores: tuple[Store, ...], target: Target) -> Cost | Refusal:
        if not stores:
            return Cost(0, 0, 0.0, 0, 0, 0, 0, 0.0)
        devices = {s.buffer.device for s in stores}
        if len(devices) > 1:
            return Refusal(f"on different devices: {', '.join(sorted(devices))}")
        if (bad := masked_failure([s.value for s in stores])) is not None:
            return Refusal(bad)
        nest = bare(stores) if target.warp else analyse(stores, target)
        if isinstance(nest, Refusal):
            return nest
        cost = nest_cost(nest, target)
        limits = (
            (cost.buffers, "buffers", self.target.buffers_per_kernel),
            (cost.live, "values alive at once", self.target.live_values),
            (cost.nodes, "operations", self.target.operations_per_kernel),
        )
        beyond = (f"{count} {what}, limit {limit}" for count, what, limit in limits if count > limit)
        return Refusal(reason) if (reason := next(beyond, None)) is not None else cost

    def price(self, members: list[Define], group: frozenset[int], neighbours: bool = False) -> Cost | Refusal:
        """The same with the time of the kernel that would run. `neighbours`: with other sizes of its tiles, too."""
        bound = self.consider(members, group)
        if isinstance(bound, Refusal) or not bound.launches:
            return bound

        def choose(stores: tuple[Store, ...], target: Target) -> Chosen | Refusal:
            return self.setting.choose(stores, target, bound.time_us, neighbours)

        chosen = self._ask(("price", neighbours), members, group, choose)
        if isinstance(chosen, Refusal):
            return chosen
        time_us = chosen.time_us + (0.0 if self.target.warp else bound.time_us)
        return replace(bound, time_us=time_us, launches=len(chosen.times), schedule=chosen.schedule)

    def cost(self, number: int) -> Cost | None:
        """What a group takes as it is now."""
        if number not in self.costs:
            found = self.price(self.graph.members[number], frozenset((number,)))
            if isinstance(found, Refusal):
                return None
            self.costs[number] = found
        return self.costs[number]

    def copied(self, group: frozenset[int]) -> set[Buffer]:
        """Results of groups as one that cannot overwrite their input: it is read elsewhere, or for larger results."""
        members = [d for n in group for d in self.graph.members[n]]
        updated = [d for d in members if d.buffer in self.updates]
        if not updated:
            return set()
        most = max(numel(d.axes) for d in members)
        read = {b for d in members for b in self.graph.reads[d] if self.updates.get(d.buffer) is not b}
        moved = {b for d in members for b in self.graph.reads[d] if b in read and _reads_elsewhere(d, b)}
        return {
            d.buffer
            for d in updated
            if self.updates[d.buffer] in moved or (numel(d.axes) < most and {d.buffer, self.updates[d.buffer]} & read)
        }

    def most_members(self, *numbers: int) -> int:
        """How many operations a kernel of these groups may have."""
        return self.setting.limits.most_members((d for n in numbers for d in self.graph.members[n]), self.target)


def _reads_elsewhere(define: Define, buffer: Buffer) -> bool:
    """Whether a point-wise value reads a tensor of its size at other positions than its own."""
    if reductions([define.value]) or len(define.axes) != len(buffer.shape):
        return False
    return not all(identity_index(e.index, define.dimensions) for e in loads_of([define.value])[buffer])


def masked_failure(values: list[Expr]) -> str | None:
    """A value that may raise must not be computed where its reader would not look."""
    nodes = list(postorder(values))
    if not any(isinstance(e, Load) and _is_masked(e) for e in nodes):
        return None
    return None if all(map(_is_inside_when_masked, failing(nodes))) else "it may raise outside its region"


def failing(nodes: Iterable[Expr]) -> list[Pointwise]:
    """Nodes whose evaluation can raise (integer division, checked index)."""
    found = (e for e in nodes if isinstance(e, Pointwise))
    return [e for e in found if OPS[e.op].integer_raises and not e.args[0].dtype.is_float]


def _is_masked(load: Load) -> bool:
    """Whether it may be asked for a position that the buffer does not have; it is 0 there."""
    return not all(in_range(p, s) or p.indirects() for p, s in zip(load.index, load.buffer.shape, strict=True))


def _is_inside_when_masked(e: Pointwise) -> bool:
    """Whether an index is one of its dimension wherever what it is read from is masked."""
    if e.op not in CHECKED:
        return False
    found, size = _when_masked(e.args[0]), e.args[1]
    most = size.poly.constant if isinstance(size, Index) else None
    return found is not None and most is not None and all(0 <= value < most for value in found)


def _when_masked(e: Expr) -> set[int] | None:
    """The numbers a value may be where all that it reads is masked; None where they are not known."""
    match e:
        case Const(value=int() as number):
            return {number}
        case Load() if _is_masked(e):
            return {0}
        case Pointwise(op="where"):
            sides = [_when_masked(a) for a in e.args[1:]]
            return set().union(*(s for s in sides if s is not None)) if None not in sides else None
        case Pointwise(op="cast") if e.dtype.is_integer and e.args[0].dtype.is_integer:
            return _when_masked(e.args[0])
    return None
