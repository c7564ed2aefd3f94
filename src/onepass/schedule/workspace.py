"""States of reductions that programs leave in a workspace, and the nest of the kernel that merges them.

A program reduces one chunk of a class, or one tile of a matrix. Its states are stored at the number of the chunk or
tile, beside the positions that the reduction keeps. The finish merges the states with the reduction's own monoid. A
sum that depends on a maximum is first carried from the maximum of its chunk to the common one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..analysis.contraction import Carried
from ..analysis.inline import reductions
from ..analysis.legality import outer_axes
from ..analysis.nest import Nest, NestStore
from ..ir.expr import Expr, Load, Part, Reduce, Scan, const, pointwise, rewrite
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, contiguous_strides
from .online import carried


@dataclass(frozen=True, slots=True)
class _States:
    """The states of one reduction: a buffer for each part, placed by `axes`. Of these, `numbers` count states."""

    buffers: tuple[Buffer, ...]
    axes: tuple[Axis, ...]
    numbers: Mapping[Axis, str]  # with the names that they have in the finish
    alike: bool  # all states are equal
    follows: Carried | None

    def read(self, running: Mapping[Axis, Poly]) -> tuple[Expr, ...]:
        index = tuple(running.get(a, a.poly()) for a in self.axes)
        return tuple(Load(b, index) for b in self.buffers)


class Workspace:
    """The states of one group."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.buffers: list[Buffer] = []
        self.states: dict[Reduce | Scan, _States] = {}

    def leave(
        self,
        reduce: Reduce | Scan,
        axes: tuple[Axis, ...],
        numbers: Mapping[Axis, str],
        values: Iterable[Expr] | None = None,
        alike: bool = False,
        follows: Carried | None = None,
    ) -> list[NestStore]:
        """Stores of a reduction's state, or of `values` in its place. `alike`: every program has the same state."""
        if values is None:
            values = [Part(reduce, k) for k in range(len(reduce.part_dtypes))]
        shape, index = tuple(a.extent for a in axes), tuple(a.poly() for a in axes)
        stores: list[NestStore] = []
        for value in values:
            name = f"{self.name}_w{len(self.buffers)}"
            self.buffers.append(Buffer(name, value.dtype, shape, contiguous_strides(shape), self.device))
            stores.append(NestStore(self.buffers[-1], index, value, frozenset(axes)))
        self.states[reduce] = _States(tuple(s.buffer for s in stores), axes, numbers, alike, follows)
        return stores

    def finish(self, nest: Nest, stores: Iterable[NestStore], empty_sums: bool = False) -> Nest:
        """Stores of the nest, reading merged states. `empty_sums`: a carried sum without any term is zero, not NaN."""
        bound = dict(nest.bound)
        merged: dict[Expr, Expr] = {}
        for r, states in self.states.items():
            assert isinstance(r, Reduce), "states of scans are merged in order"
            kind = "r" if states.follows is None else "s"  # a sum has axes of its own, for the maximum inside
            running = {a: Axis(f"{name}.{kind}", a.extent) for a, name in states.numbers.items()}
            bound |= {running[a]: Axis(f"{name}.c", a.extent) for a, name in states.numbers.items()}
            at = {a: Poly.ZERO if states.alike else own.poly() for a, own in running.items()}
            values = states.read(at)
            if (follows := states.follows) is not None:
                top, (reference,) = Part(follows.top, 0), self.states[follows.top].read(at)
                moved = carried(top, follows.h, merged[top], reference)
                if empty_sums:  # -inf meets no -inf
                    still = pointwise("eq", merged[top], reference)
                    moved = pointwise("where", still, const(1.0, moved.dtype), moved)
                values = (pointwise("mul", values[0], moved),)
            if not states.alike:
                whole = Reduce("welford_merge" if r.monoid == "welford" else r.monoid, values, tuple(running.values()))
                values = tuple(Part(whole, j) for j in range(len(values)))
            merged |= {Part(r, j): value for j, value in enumerate(values)}
        own = tuple(replace(s, value=rewrite(s.value, lambda e: None, None, dict(merged))) for s in stores)
        bound = {a: bound[a] for r in reductions(s.value for s in own) for a in r.over}
        kept = [c for c in nest.classes if any(c in s.domain for s in own)]
        classes = tuple(dict.fromkeys((*kept, *bound.values())))
        return Nest(own, classes, bound, outer_axes(Nest(own, classes, bound)))
