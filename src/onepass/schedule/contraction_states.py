"""Matrix products whose tiles leave states of reductions: the products' kernel, and those that merge states.

A tile is folded over its columns, its rows or both, after its products are summed. States lie with the number of the
tile first, so that neighbours along what is left are stored and read together. Results of one shape share a finish.
"""

from __future__ import annotations

from ..analysis.inline import reductions
from ..analysis.legality import outer_axes
from ..analysis.nest import Nest, NestStore
from ..analysis.tile_states import TileContraction
from ..ir.choice import Choice
from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, Part, Reduce, const, pointwise, rewrite, substitute_axes
from ..ir.kernel import Fold, Kernel, Let, ScheduledGroup, Var
from ..ir.monoids import lowest
from ..ir.poly import Axis
from ..ir.program import Buffer, Origin, contiguous_strides
from ..ir.target import Target
from .contractions import COLUMN, ROW, ContractionScheduler
from .online import carried
from .tiles import TileScheduler


class StateScheduler(ContractionScheduler):
    """Builds the products' kernel."""

    c: TileContraction

    def __init__(self, c: TileContraction, target: Target, choice: Choice, name: str) -> None:
        super().__init__(c, target, choice)
        self.number = {  # rows and columns -> which tile
            cls: Axis(f"{cls.name}t", (cls.extent + lanes - 1) // lanes)
            for cls, lanes in ((c.rows, self.tiles.rows), (c.columns, self.tiles.columns))
        }
        self.workspace: dict[Reduce, list[Buffer]] = {}
        self.states = [(s.buffer, s.index, s.value) for s in c.leaving]
        count = 0
        for r in c.entering:
            index = self.place(r, self.number)
            shape = tuple(a.extent for a in index)
            self.workspace[r] = []
            for k, dtype in enumerate(r.part_dtypes):
                buffer = Buffer(f"{name}_w{count}", dtype, shape, contiguous_strides(shape), c.waiting[0].buffer.device)
                self.workspace[r].append(buffer)
                self.states.append((buffer, tuple(a.poly() for a in index), Part(r, k)))
                count += 1

    def place(self, reduce: Reduce, number: dict[Axis, Axis]) -> tuple[Axis, ...]:
        """Where a state is: what the reduction runs over by `number`, then what it keeps."""
        c = self.c
        classes, swept = (*c.grid, c.rows, c.columns), c.sweeps(reduce)
        return (*(number.get(a, a) for a in classes if a in swept), *(a for a in classes if a not in swept))

    def _open_program(self) -> None:
        super()._open_program()
        for dim, lanes in ((ROW, self.tiles.rows), (COLUMN, self.tiles.columns)):
            cls = self.c.rows if dim == ROW else self.c.columns
            self.builder.here.bindings[self.number[cls]] = self.starts[self.axis(cls, dim)] // lanes

    def _reduce(self) -> None:
        """Products are summed, then the tile is folded."""
        super()._reduce()
        for r, values in self.c.entering.items():
            lanes = [self.lanes[self.axis(self.c.columns, COLUMN)]] if self.c.columns in self.c.sweeps(r) else []
            lanes += [self.lanes[self.axis(self.c.rows, ROW)]] if self.c.rows in self.c.sweeps(r) else []
            if (follows := self.c.carried.get(r)) is not None:
                self._stand_in(follows.top, follows.stand_in)
            inputs = tuple(self.builder.emit(substitute_axes(v, self.here)) for v in values)
            parts = tuple(Var(self.builder.name(f"{r.monoid}_"), d) for d in r.part_dtypes)
            self.builder.add(Fold(r.monoid, inputs, tuple(lanes), parts))
            own = self.oriented(r)
            self.builder.here.values |= {Part(own, k): var for k, var in enumerate(parts)}

    def _stand_in(self, top: Reduce, stand_in: Load) -> None:
        """The tile's maximum; without any term nothing is subtracted, so that -inf meets no -inf."""
        builder, dtype = self.builder, stand_in.dtype
        new = builder.emit(Part(self.oriented(top), 0))
        none, safe = Var(builder.name("none"), DType.BOOL), Var(builder.name("safe"), dtype)
        builder.add(Let(none, "eq", (new, const(lowest(dtype), dtype))))
        builder.add(Let(safe, "where", (none, const(0.0, dtype), new)))
        builder.here.values[stand_in] = safe


def schedule_tile_states(
    c: TileContraction, target: Target, name: str, origins: tuple[Origin, ...], choice: Choice
) -> ScheduledGroup:
    """The kernels of a group whose tiles leave states."""
    products = StateScheduler(c, target, choice, name)
    kernels: list[Kernel] = [products.build(f"{name}_partial", origins)]
    for domain in dict.fromkeys(s.domain for s in c.waiting):
        ending = f"{name}_finish{'' if len(kernels) == 1 else len(kernels)}"
        kernels.append(TileScheduler(_merged(products, domain), target).build(ending, origins))
    return ScheduledGroup(tuple(kernels), tuple(b for buffers in products.workspace.values() for b in buffers))


def _merged(products: StateScheduler, domain: frozenset[Axis]) -> Nest:
    """The stores of one shape, reading merged states."""
    c, states = products.c, products.workspace
    number = {cls: products.number.get(cls, cls).extent for cls in (*c.grid, c.rows, c.columns)}
    classes = {cls: Axis(f"{cls.name}.c", extent) for cls, extent in number.items()}
    bound: dict[Axis, Axis] = {}

    def loads(r: Reduce, running: dict[Axis, Axis]) -> tuple[Expr, ...]:
        return tuple(Load(b, tuple(a.poly() for a in products.place(r, running))) for b in states[r])

    whole: dict[Expr, Expr] = {}
    for k, r in enumerate(states):
        running = {cls: Axis(f"{cls.name}.r{k}", extent) for cls, extent in number.items()}  # of this reduction only
        bound |= {running[cls]: classes[cls] for cls in c.sweeps(r)}
        own = loads(r, running)
        if (follows := c.carried.get(r)) is not None:
            top, (reference,) = Part(follows.top, 0), loads(follows.top, running)
            own = (pointwise("mul", own[0], carried(top, follows.h, whole[top], reference)),)
        over = tuple(a for a in products.place(r, running) if a in bound)
        merge = Reduce("welford_merge" if r.monoid == "welford" else r.monoid, own, over)
        whole |= {Part(r, j): Part(merge, j) for j in range(len(states[r]))}
    stores = tuple(
        NestStore(s.buffer, s.index, rewrite(s.value, lambda e: None, None, dict(whole)), s.domain)
        for s in c.waiting
        if s.domain == domain
    )
    bound = {a: bound[a] for r in reductions(s.value for s in stores) for a in r.over}
    kept = (*(a for a in c.nest.classes if a in domain), *dict.fromkeys(bound.values()))
    return Nest(stores, kept, bound, outer_axes(Nest(stores, kept, bound)))
