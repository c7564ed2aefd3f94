"""What users asked of operations, for both tiers of planning: regions that share a kernel, operations that share none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import UnmetOrder
from ..ir.callables import graph_constant
from ..ir.program import Buffer, Define, Extern, Program

LEAVE_OUT = "Leave it out of onepass.fuse(), or use onepass.fuse(backward=False) if it belongs to backward."
SMALLER = "Ask for a smaller region, or use onepass.fuse(backward=False) if forward alone can be one kernel."


class Ordered:
    """The orders of one program. `regions`: definitions that share a kernel, products that may be among them."""

    def __init__(self, program: Program) -> None:
        self.regions: dict[str, list[Define]] = {}
        self.calls: dict[str, list[Extern]] = {}
        for s in program.statements:
            if isinstance(s, Define | Extern) and s.orders.fuse:
                if isinstance(s, Extern) and _is_call(s):
                    self.calls.setdefault(s.orders.fuse, []).append(s)
                define = s.contraction if isinstance(s, Extern) else s
                if define is not None:
                    self.regions.setdefault(s.orders.fuse, []).append(define)

    def obstacle(self, defines: Iterable[Define]) -> str | None:
        """What was asked that a kernel of these would not be."""
        inside = {*defines}
        if (alone := next((d for d in inside if d.orders.no_fuse), None)) is not None:
            return f"asked to be apart: {alone.orders.no_fuse}"
        parted = next(
            (r for r in sorted({d.orders.fuse for d in inside}) if r and not inside >= {*self.regions[r]}), ""
        )
        return "a part of what onepass.fuse asked to share a kernel" if parted else None

    def refuse_calls(self) -> None:
        """An operation that no kernel computes cannot share one."""
        for call in (c for calls in self.calls.values() for c in calls):
            why = "the library computes this product on this target" if call.contraction is not None else call.why
            raise UnmetOrder("onepass.fuse", call.origin.line, f"{call.origin.op} is a call: {why}", LEAVE_OUT)


def refuse(members: Sequence[Define], reason: str) -> UnmetOrder:
    """The error of a region that cannot share a kernel."""
    names = ", ".join(dict.fromkeys(d.origin.op for d in members))
    return UnmetOrder("onepass.fuse", members[0].origin.line, f"{names} cannot share a kernel: {reason}", SMALLER)


def _is_call(extern: Extern) -> bool:
    """Whether it computes something; constants and seeds of random numbers are read by kernels."""
    own = getattr(extern.target, "namespace", "") == "onepass"
    return extern.target is not graph_constant and not own and isinstance(extern.result, Buffer)
