"""What users asked of operations, for both tiers of planning.

A region of `onepass.fuse` shares a kernel, together with all that lies between its operations (sums of gradients, say);
an operation of `onepass.no_fuse` shares none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..analysis.reach import reached
from ..errors import UnmetOrder
from ..ir.callables import graph_constant
from ..ir.program import Buffer, Define, Extern, Program, Update
from .links import Links

LEAVE_OUT = "Leave it out of onepass.fuse(), or use onepass.fuse(backward=False) if it belongs to backward."
SMALLER = "Ask for a smaller region, or use onepass.fuse(backward=False) if forward alone can be one kernel."


class Ordered:
    """The orders of one program. `regions`: definitions that share a kernel, products that may be among them."""

    def __init__(self, program: Program) -> None:
        self.regions: dict[str, list[Define]] = {}
        self.region_of: dict[Define, str] = {}
        self.calls: list[Extern] = []  # in regions
        asked: dict[str, set[int]] = {}
        for number, s in enumerate(program.statements):
            if not isinstance(s, Update) and s.orders.fuse:
                asked.setdefault(s.orders.fuse, set()).add(number)
        links = Links(program if asked else Program((), (), ()))
        for region, numbers in asked.items():
            below, above = (reached(numbers, step.__getitem__) for step in (links.successors, links.predecessors))
            self._add(region, [program.statements[n] for n in sorted(numbers | (below.keys() & above.keys()))])
        self.has_orders = bool(asked) or any(d.orders.no_fuse for d in program.defines())

    def _add(self, region: str, statements: Iterable[object]) -> None:
        own = self.regions.setdefault(region, [])
        for s in statements:
            if isinstance(s, Extern) and _is_call(s):
                self.calls.append(s)
            define = s.contraction if isinstance(s, Extern) else s
            if isinstance(define, Define):
                own.append(define)
                self.region_of[define] = region

    def obstacle(self, defines: Iterable[Define]) -> str | None:
        """What was asked that a kernel of these would not be."""
        if not self.has_orders:
            return None
        inside = {*defines}
        if (alone := next((d for d in inside if d.orders.no_fuse), None)) is not None:
            return f"asked to be apart: {alone.orders.no_fuse}"
        regions = {r for d in inside if (r := self.region_of.get(d)) is not None}
        parted = any(not inside.issuperset(self.regions[r]) for r in regions)
        return "a part of what onepass.fuse asked to share a kernel" if parted else None

    def refuse_calls(self) -> None:
        """An operation that no kernel computes cannot share one."""
        for call in self.calls:
            why = "the library computes this product on this target" if call.contraction is not None else call.why
            raise UnmetOrder("onepass.fuse", call.origin.line, f"{call.origin.op} is a call: {why}", LEAVE_OUT)


def refuse(members: Sequence[Define], reason: str) -> UnmetOrder:
    """The error of a region that cannot share a kernel."""
    names = ", ".join(dict.fromkeys(d.origin.op for d in members))
    return UnmetOrder("onepass.fuse", members[0].origin.line, f"{names} cannot share a kernel: {reason}", SMALLER)


def _is_call(extern: Extern) -> bool:
    """Whether it computes something; constants, sizes and seeds of random numbers are read by kernels."""
    namespace = getattr(extern.target, "namespace", "")
    makes = isinstance(extern.result, Buffer) or bool(namespace)
    return makes and extern.target is not graph_constant and namespace != "onepass"
