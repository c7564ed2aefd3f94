"""What operations must do without when a graph is planned again: their kernels spilled, or could not be built.

Operations go by the names of the buffers they define: lowering a graph gives the same ones every time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from .expr import Reduce, postorder
from .plan import Group
from .program import Define
from .target import Target

# Steps of what a kernel with matrix products gives up, in this order: computing the operands of products, which then
# come from memory; what follows a product and is not one (reductions, work on a chain's result) and products side by
# side; the products themselves, which are then the library's.
OPERANDS, FOLLOWERS, PRODUCTS = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of single operations; a kernel has the tightest of those it computes."""

    members: Mapping[str, int] = field(default_factory=dict)  # operations in one kernel
    uncarried: frozenset[str] = frozenset()  # no states are carried over long rows
    products: Mapping[str, int] = field(default_factory=dict)  # what kernels with matrix products have given up
    apart: frozenset[str] = frozenset()  # these share no launch
    doubted: frozenset[str] = frozenset()  # prediction says too little of kernels with these: every call is a close one

    def given_up(self, defines: Iterable[Define]) -> int:
        """What a kernel with matrix products may not do: this step and those before it; 0: nothing is ruled out."""
        return max((self.products.get(d.buffer.name, 0) for d in defines), default=0) if self.products else 0

    def most_members(self, defines: Iterable[Define], target: Target) -> int:
        """How many operations a kernel with these may have."""
        most = target.members_per_kernel
        return min((self.members.get(d.buffer.name, most) for d in defines), default=most) if self.members else most

    def narrowed(self, target: Target, defines: Iterable[Define]) -> Target:
        """The target as a kernel of these operations sees it."""
        carries = not self.uncarried or not any(d.buffer.name in self.uncarried for d in defines)
        return target if carries else replace(target, carried_bytes=0)

    def tightened(self, group: Group, target: Target) -> Limits | None:
        """The next limits of a group that spills in every schedule; None where it has nothing left to give up."""
        if _asked(group):
            return None
        if group.products:
            return self._giving_up(group, self.given_up(_summed(group)) + 1)
        if self.narrowed(target, group.members).carried_bytes:
            return replace(self, uncarried=self.uncarried.union(d.buffer.name for d in group.members))
        return self._halved(group, target)

    def without(self, group: Group, target: Target) -> Limits | None:
        """Limits under which a group is not planned again: the library multiplies, other kernels do half as much."""
        if _asked(group):
            return None
        if group.products:
            return self._giving_up(group, max(PRODUCTS, self.given_up(_summed(group)) + 1))
        return self._halved(group, target)

    def parting(self, groups: Iterable[Group]) -> Limits:
        """Limits under which groups share no launch."""
        return replace(self, apart=self.apart.union(s.buffer.name for g in groups for s in g.stores))

    def doubting(self, group: Group) -> Limits:
        """Limits under which the group's products are measured in one kernel and by the library."""
        names = {d.buffer.name for d in _summed(group)}
        return self if names <= self.doubted else replace(self, doubted=self.doubted | names)

    def _halved(self, group: Group, target: Target) -> Limits | None:
        names = [d.buffer.name for d in group.members]
        most = min(self.most_members(group.members, target), len(names)) // 2
        return replace(self, members={**self.members, **dict.fromkeys(names, most)}) if most else None

    def _giving_up(self, group: Group, step: int) -> Limits | None:
        steps = dict.fromkeys((d.buffer.name for d in _summed(group)), step)
        return replace(self, products={**self.products, **steps}) if step <= PRODUCTS else None


def _asked(group: Group) -> bool:
    """Whether the user wants one kernel of the group, whatever it takes."""
    return any(d.orders.fuse for d in group.members)


def _summed(group: Group) -> list[Define]:
    return [d for d in group.members if any(isinstance(e, Reduce) for e in postorder([d.value]))]


NO_LIMITS = Limits()
