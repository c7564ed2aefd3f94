"""The kernel builder: expressions in class axes become SSA statements in the right scope.

Scopes are the open loops of the nest. A value is placed in the outermost scope where all its axes are
bound and the reductions it reads are finished, so nothing is computed more often than it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..analysis.access import flat_offset
from ..analysis.inline import loads_of
from ..analysis.nest import Nest, NestStore
from ..analysis.refine import polys_of
from ..ir import kernel as ir
from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Index, Indirect, Load, Part, Pointwise, Random, Reduce, Scan, const
from ..ir.monoids import MONOIDS, lowest
from ..ir.ops import CHECKED
from ..ir.poly import Atom, Axis, Poly, Symbol, in_range, nonnegative, transform
from ..ir.program import Buffer, Origin
from ..ir.schedule import Schedule


@dataclass(slots=True)
class Scope:
    """One open block: its statements, the class axes it binds and the values computed in it."""

    statements: list[ir.Statement] = field(default_factory=list)
    bindings: dict[Axis, Poly] = field(default_factory=dict)  # class axis -> position, for proofs
    physical: dict[Axis, Poly] = field(default_factory=dict)  # position axis -> loop axes, where they differ
    values: dict[Expr, ir.Operand] = field(default_factory=dict)
    parts: dict[Reduce, Finished] = field(default_factory=dict)
    carries: dict[Scan, Carry] = field(default_factory=dict)
    kept: dict[Expr, Kept] = field(default_factory=dict)  # scratch that sweeps of this scope have filled
    rare: bool = False  # entered by few programs: what only it needs is computed inside


@dataclass(frozen=True, slots=True)
class Finished:
    """A reduction's result. `lane`: which state is meant, in class axes; None: all lanes merge."""

    accumulator: ir.Accumulator
    lane: Poly | None = None


@dataclass(frozen=True, slots=True)
class Carry:
    """How a scan goes on from position to position: the state before this one, and a tile that has several."""

    accumulator: ir.Accumulator | None
    lane: Poly = Poly.ZERO  # which state is meant, in class axes
    along: Axis | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A value kept in per-program scratch, and where."""

    local: ir.Local
    index: Poly  # in class axes


class Builder:
    """Builds the statements of one kernel; `beside` another one that shares its launch, with other names."""

    def __init__(self, beside: Builder | None = None) -> None:
        self.scopes: list[Scope] = [Scope()]
        self.grid: list[ir.GridAxis] = []
        self.locals: list[ir.Local] = []
        self.raises = False
        self._names: dict[str, int] = {} if beside is None else beside._names

    def kernel(
        self,
        nest: Nest,
        stores: Iterable[NestStore],
        name: str,
        origins: tuple[Origin, ...],
        schedule: Schedule,
        work: Poly,
    ) -> ir.Kernel:
        """All that was built: a kernel of a nest's stores, or of others in their place."""
        stores = tuple(stores)
        return ir.Kernel(
            name=name,
            reads=tuple(loads_of(s.value for s in stores)),
            writes=tuple(s.buffer for s in stores),
            symbols=_symbols(nest),
            grid=tuple(self.grid),
            body=tuple(self.scopes[0].statements),
            locals=tuple(self.locals),
            origins=origins,
            schedule=schedule,
            work=work,
            raises=self.raises,
        )

    # --- scopes ---

    @property
    def here(self) -> Scope:
        return self.scopes[-1]

    def name(self, stem: str) -> str:
        number = self._names.get(stem, 0)
        self._names[stem] = number + 1
        return f"{stem}{number}"

    def add(self, statement: ir.Statement) -> None:
        self.here.statements.append(statement)

    @contextmanager
    def block(
        self,
        close: Callable[[tuple[ir.Statement, ...]], ir.Statement],
        bindings: dict[Axis, Poly] | None = None,
        physical: dict[Axis, Poly] | None = None,
    ) -> Iterator[Scope]:
        """Open a scope; on leaving, `close` turns its statements into one statement of the parent."""
        scope = Scope(bindings=dict(bindings or {}), physical=dict(physical or {}))
        self.scopes.append(scope)
        yield scope
        self.scopes.pop()
        if scope.statements:
            self.add(close(tuple(scope.statements)))

    @contextmanager
    def stretch(self) -> Iterator[Scope]:
        """Open a scope whose statements follow those of the parent: what it computes is not found after it."""
        scope = Scope()
        self.scopes.append(scope)
        yield scope
        self.scopes.pop()
        self.here.statements.extend(scope.statements)

    # --- axes and states ---

    def grid_axis(self, extent: Poly) -> Axis:
        """One more dimension of the grid."""
        position = Axis(f"g{len(self.grid)}", extent)
        self.grid.append(ir.GridAxis(position, extent))
        return position

    def open_tile(
        self, axis: Axis, tile: Axis, start: Poly, limits: tuple[Poly, ...] = (), dim: int | None = None
    ) -> None:
        """Positions of a class from `start` on, at once, for the rest of this block: those below all limits."""
        lanes = tile.extent.constant
        assert lanes is not None
        self.add(ir.Tile(tile, lanes, limits, dim))
        self.here.bindings[axis] = axis.poly()
        self.here.physical[axis] = start + tile

    def fold(self, reduce: Reduce, values: tuple[ir.Operand, ...], over: tuple[Axis, ...]) -> tuple[ir.Var, ...]:
        """A reduction over open tiles, finished here."""
        parts = tuple(ir.Var(self.name(f"{reduce.monoid}_"), d) for d in reduce.part_dtypes)
        self.add(ir.Fold(reduce.monoid, values, over, parts))
        self.here.values |= {Part(reduce, k): var for k, var in enumerate(parts)}
        return parts

    def start(self, accumulator: ir.Accumulator) -> ir.Accumulator:
        """The states of a reduction, from nothing."""
        self.add(ir.Start(accumulator))
        return accumulator

    def reference(self, leader: ir.Accumulator) -> ir.Local:
        """The maximum that sums have followed so far: none."""
        dtype = leader.dtypes[0]
        local = ir.Local(self.name("reference"), dtype, 1, leader.tiles)
        self.locals.append(local)
        self.add(ir.WriteLocal(local, Poly.ZERO, const(lowest(dtype), dtype)))
        return local

    def read(self, local: ir.Local, stem: str, index: Poly = Poly.ZERO) -> ir.Var:
        """What a local holds."""
        var = ir.Var(self.name(stem), local.dtype)
        self.add(ir.ReadLocal(var, local, index))
        return var

    # --- values ---

    def bound(self) -> dict[Axis, Poly]:
        """Every class axis bound by an open scope."""
        return {a: p for scope in self.scopes for a, p in scope.bindings.items()}

    def position(self, poly: Poly) -> Poly:
        """A poly with class axes at their positions, data-dependent atoms replaced by variables."""

        def replace(atom: Atom) -> Poly | None:
            if isinstance(atom, Axis):
                for scope in reversed(self.scopes):
                    if atom in scope.bindings:
                        return scope.bindings[atom]
            if isinstance(atom, Indirect):
                return _as_poly(self._find(atom.value))
            return None

        return transform(poly, replace)

    def physical(self, poly: Poly) -> Poly:
        """A position in terms of the loops that run."""
        mapping = {a: p for scope in self.scopes for a, p in scope.physical.items()}
        return transform(poly, lambda a: mapping.get(a)) if mapping else poly  # type: ignore[call-overload]

    def resolve(self, poly: Poly) -> Poly:
        return self.physical(self.position(poly))

    def emit(self, root: Expr) -> ir.Operand:
        """The operand holding a value, computing what is missing. Iterative: depth is no limit."""
        stack: list[tuple[Expr, bool]] = [(root, False)]
        depths: dict[Expr, int] = {}
        while stack:
            e, ready = stack.pop()
            if e in depths:
                continue
            if not ready:
                if (depth := self._depth_of_existing(e)) is not None:
                    depths[e] = depth
                    continue
                stack.append((e, True))
                if self.kept(e) is None and not (isinstance(e, Part) and isinstance(e.source, Reduce)):
                    stack.extend((c, False) for c in reversed(e.children))
                continue
            depth = max([self._own_depth(e), *(depths[c] for c in e.children if c in depths)])
            depths[e] = depth
            self._place(e, depth)
        return self._find(root)

    def kept(self, e: Expr) -> Kept | None:
        """Where an open scope keeps a value in scratch."""
        return next((scope.kept[e] for scope in reversed(self.scopes) if e in scope.kept), None)

    def _depth_of_existing(self, e: Expr) -> int | None:
        for depth in range(len(self.scopes) - 1, -1, -1):
            if e in self.scopes[depth].values:
                return depth
        return None

    def _find(self, e: Expr) -> ir.Operand:
        for scope in reversed(self.scopes):
            if e in scope.values:
                return scope.values[e]
        raise KeyError(f"value was not emitted: {e!r}")

    def depth(self, e: Expr) -> int:
        """The outermost open scope that binds all axes of a value."""
        return max([0, *(self._bind_depth(a) for a in e.axes)])

    def _own_depth(self, e: Expr) -> int:
        """The outermost scope a node itself allows, its children aside."""
        if self.here.rare:
            return len(self.scopes) - 1
        if isinstance(e, Part) and isinstance(e.source, Reduce):
            finished_at, finished = self._finished(e.source)
            axes = finished.lane.axes & self.bound().keys() if finished.lane is not None else ()
            return max([finished_at, *(self._bind_depth(a) for a in axes)])
        if not e.axes and _may_raise(e):
            return len(self.scopes) - 1  # where it is asked for: the loop around it may be empty
        return self.depth(e)

    def _bind_depth(self, axis: Axis) -> int:
        for depth in range(len(self.scopes) - 1, -1, -1):
            if axis in self.scopes[depth].bindings:
                return depth
        raise KeyError(f"axis {axis!r} is not bound here")

    def _finished(self, reduce: Reduce) -> tuple[int, Finished]:
        for depth in range(len(self.scopes) - 1, -1, -1):
            if reduce in self.scopes[depth].parts:
                return depth, self.scopes[depth].parts[reduce]
        raise KeyError(f"reduction is not finished here: {reduce!r}")

    def _place(self, e: Expr, depth: int) -> None:
        """Compute one node in the scope at `depth`."""
        held = self.scopes[depth + 1 :]
        del self.scopes[depth + 1 :]  # statements go to that scope, before the loops open inside it
        try:
            self.here.values[e] = self._compute(e)
        finally:
            self.scopes.extend(held)

    def _compute(self, e: Expr) -> ir.Operand:
        if (kept := self.kept(e)) is not None:
            return self.read(kept.local, "kept", self.resolve(kept.index))
        match e:
            case Const():
                return e
            case Index():
                return self.resolve(e.poly)
            case Load():
                return self._load(e)
            case Pointwise():
                return self._pointwise(e)
            case Random():
                var = ir.Var(self.name("word"), DType.U32)
                self.add(ir.RandomWord(var, self._find(e.seed), e.stream, self.resolve(e.index)))
                return var
            case Scan():
                return self._advance(e)
            case Part(source=Reduce()):
                return self._part(e)
            case Part():
                return self._find(e)  # with the state of its scan
        raise AssertionError(f"cannot compute {type(e).__name__}")

    def _pointwise(self, e: Pointwise) -> ir.Operand:
        args = tuple(self._find(a) for a in e.args)
        if _may_raise(e):
            self.raises = True
        var = ir.Var(self.name(f"{e.op}_"), e.dtype)
        self.add(ir.Let(var, e.op, args))
        return var

    def _part(self, e: Part) -> ir.Operand:
        assert isinstance(e.source, Reduce)
        _, finished = self._finished(e.source)
        accumulator = finished.accumulator
        parts = tuple(ir.Var(self.name(f"{accumulator.monoid}_"), d) for d in accumulator.dtypes)
        lane = self.resolve(finished.lane) if finished.lane is not None else None
        self.add(ir.Finish(accumulator, lane, parts))
        for k, var in enumerate(parts):
            self.here.values[Part(e.source, k)] = var
        return parts[e.index]

    def _advance(self, e: Scan) -> ir.Operand:
        """The state of a scan at this position."""
        carry = next(s.carries[e] for s in reversed(self.scopes) if e in s.carries)
        monoid = e.monoid if carry.accumulator is None or carry.along is not None else carry.accumulator.monoid
        numbers = range(len(e.part_dtypes))[-MONOIDS[monoid].parts :]
        parts = {k: ir.Var(self.name(f"{e.monoid}_"), e.part_dtypes[k]) for k in numbers}
        inputs = tuple(self._find(i) for i in e.inputs)
        lane = self.resolve(carry.lane)
        self.add(ir.Advance(monoid, inputs, tuple(parts.values()), carry.accumulator, lane, carry.along, e.reverse))
        self.here.values |= {Part(e, k): var for k, var in parts.items()}
        return parts[numbers[-1]]

    def _load(self, e: Load) -> ir.Operand:
        index = tuple(self.position(p) for p in e.index)
        guard = self._guard(e.buffer, e.index, index)
        if isinstance(guard, Const) and not guard.value:
            return const(0, e.dtype)
        var = ir.Var(self.name("load"), e.dtype)
        self.add(ir.LoadElement(var, e.buffer, self.physical(flat_offset(e.buffer, index)), guard))
        return var

    def _guard(self, buffer: Buffer, original: tuple[Poly, ...], index: tuple[Poly, ...]) -> ir.Operand | None:
        """A condition under which an index that is not provably inside may be loaded."""
        total: ir.Operand | None = None
        for source, p, size in zip(original, index, buffer.shape, strict=True):
            if in_range(p, size) or _is_checked(source, size):
                continue
            total = self._between(total, Poly.ZERO, p, size)
        return total

    def _between(self, total: ir.Operand | None, low: Poly, at: Poly, high: Poly) -> ir.Operand | None:
        """`total`, and low <= at < high as far as it is not provable.

        Equal lanes of `low <= at` are those of both sides: Triton finds none in `low - 1 < at`, and loads one by one.
        """
        for op, right, room in (("ge", low, at - low), ("lt", high, high - at - 1)):
            if not nonnegative(room):
                total = self.both(total, self.compare(op, self.physical(at), self.physical(right)))
        return total

    def compare(self, op: str, left: ir.Operand, right: ir.Operand, stem: str = "inside") -> ir.Operand:
        """A condition on two positions."""
        var = ir.Var(self.name(stem), DType.BOOL)
        self.add(ir.Let(var, op, (left, right)))
        return var

    def both(self, left: ir.Operand | None, right: ir.Operand, stem: str = "inside") -> ir.Operand:
        """Two conditions at once, the first of which may be missing."""
        if left is None:
            return right
        var = ir.Var(self.name(stem), DType.BOOL)
        self.add(ir.Let(var, "bitand", (left, right)))
        return var

    def store(
        self,
        buffer: Buffer,
        index: tuple[Poly, ...],
        operand: ir.Operand,
        region: tuple[tuple[Axis, Poly, Poly], ...] = (),
    ) -> None:
        """Store a value at an index given in class axes, inside its region."""
        guard: ir.Operand | None = None
        for axis, low, high in region:
            guard = self._between(guard, self.position(low), self.position(axis.poly()), self.position(high))
        offset = flat_offset(buffer, tuple(self.position(p) for p in index))
        self.add(ir.StoreElement(buffer, self.physical(offset), operand, guard))


def looped(
    axis: Axis, kind: str = "sweep", lanes: int = 1, lane: Axis | None = None, limit: Poly | None = None
) -> Callable[[tuple[ir.Statement, ...]], ir.Statement]:
    """Turns the statements of a block into a loop."""
    return lambda body: ir.Loop(axis, axis.extent, kind, body, lanes, lane, limit)


def when(condition: ir.Operand) -> Callable[[tuple[ir.Statement, ...]], ir.Statement]:
    """Turns the statements of a block into one that runs where a condition holds."""
    return lambda body: ir.When(condition, body)


def divides(step: int, axis: Axis) -> bool:
    """Whether a class is a number of whole steps."""
    return not (axis.extent % step).terms and nonnegative(axis.extent - 1)


def _symbols(nest: Nest) -> tuple[Symbol, ...]:
    """Every size that a kernel of a nest needs at run time."""
    polys = [p for s in nest.stores for p in (*s.index, *s.buffer.strides, *(b for r in s.region for b in r[1:]))]
    polys += [a.extent for a in (*nest.classes, *nest.bound)] + list(polys_of(nest.values))
    for buffer in loads_of(nest.values):
        polys += (*buffer.strides, *buffer.shape)
    return tuple(sorted({s for p in polys for s in p.symbols()}, key=lambda s: s.name))


_RAISING = frozenset(("floordiv", "truncdiv", "remainder", "fmod"))


def _may_raise(e: Expr) -> bool:
    return isinstance(e, Pointwise) and (e.op in CHECKED or (e.op in _RAISING and e.dtype.is_integer))


def _is_checked(poly: Poly, size: Poly) -> bool:
    """A data-dependent index that its own check keeps inside a non-empty dimension."""
    atoms = poly.atoms()
    if len(poly.terms) != 1 or poly.terms[0][1] != 1 or len(atoms) != 1 or not size.constant:
        return False
    atom = next(iter(atoms))
    if not isinstance(atom, Indirect) or not isinstance(atom.value, Pointwise) or atom.value.op not in CHECKED:
        return False
    limit = atom.value.args[1]
    if isinstance(limit, Index):
        return limit.poly is size
    return isinstance(limit, Const) and limit.value == size.constant


def _as_poly(operand: ir.Operand) -> Poly:
    if isinstance(operand, Poly):
        return operand
    if isinstance(operand, Const):
        return Poly.of(int(operand.value))
    return Symbol(operand.name, 0).poly()
