"""Index expressions, masks, loads and stores in Triton: what every kind of statement is written with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from ..ir import kernel as ir
from ..ir.dtypes import DType
from ..ir.expr import Const
from ..ir.poly import Atom, Axis, Poly, Quotient, Remainder, is_far
from .emitter import Emitter, bare, operand_dtype
from .triton_ops import from_word, triton_const

NO_AXES: frozenset[str] = frozenset()
_EVICTION = {"again": "evict_last", "never": "evict_first"}
_NUMBERED = Axis | Quotient | Remainder  # what 32 bits are tried for


@dataclass(frozen=True, slots=True)
class OpenTile:
    """An open tile axis: its dimension, lanes, and the name of its mask if some lanes do not count."""

    dim: int
    lanes: int
    mask: str | None
    count: str  # how many lanes count


class TileEmitter(Emitter):
    """Emits what statements have in common; the statements themselves are a subclass's."""

    indent, quotient, literal = "    ", "//", staticmethod(triton_const)

    def __init__(self, kernel: ir.Kernel, overlaps: bool, describe: bool) -> None:
        super().__init__(kernel)
        self.overlaps = overlaps
        self.described = [d.name for d in kernel.descriptors] if describe else []
        self.aligned = describe  # addresses in a table are on 16 bytes
        self.numbers = {b: self.pointers.pop(b) for b in kernel.numbers}
        self.index = "tl.int64" if kernel.wide else "tl.int32"
        self.tiles: dict[str, OpenTile] = {}
        self.dims: dict[str, frozenset[str]] = {}  # the tile axes of every block-valued name; scalars have no entry
        self.loaded: set[str] = set()  # names that hold zero where lanes do not count
        self.typed: set[str] = set()  # names that have the type of the matrix unit
        self.rank = tile_rank(kernel.body)
        self.one_rank = len({tile_rank(s.body) for s in kernel.body if isinstance(s, ir.Share)}) < 2
        self.near = True  # whether 32 bits are enough for what is written

    def zero(self) -> None:
        """What makes a scalar a tile."""
        if self.rank:
            self.line(f"zero = tl.full({[1] * self.rank}, 0, {self.index})")

    def split(self, name: str, number: int, left: str, extent: str) -> str:
        self.bind(f"program{number}", left)
        self.bind(name, f"program{number} % {extent}")
        return f"(program{number} // {extent})"

    def divides_plainly(self, numerator: Poly) -> bool:
        return not numerator.names() or super().divides_plainly(numerator)  # numbers are Python's

    def poly(self, poly: Poly) -> str:
        """Programs, lanes and counters have 32 bits. In a kernel with far offsets they get 64 where they may need them;
        what is put together with a size has them anyway."""
        outer = self.near
        alone = Poly(tuple((m, c) for m, c in poly.terms if all(isinstance(a, _NUMBERED) for a in m)))
        self.near = not self.kernel.wide or not is_far(alone)
        text = super().poly(poly)
        self.near = outer
        return text

    def atom(self, atom: Atom) -> str:
        near, text = self.near, super().atom(atom)
        return text if near or not isinstance(atom, _NUMBERED) else f"tl.cast({bare(text)}, tl.int64)"

    def offset(self, poly: Poly) -> str:
        """What is added to a pointer. Of a far one, what all lanes share is a scalar of 64 bits."""
        if not self.kernel.wide or self.poly_dims(poly) is None:
            return self.poly(poly)
        moving = Poly(tuple((m, c) for m, c in poly.terms if self.poly_dims(Poly(((m, 1),))) is not None))
        fixed = poly - moving
        return f"{self.shared(fixed)} + {self.poly(moving)}" if fixed.terms else self.poly(moving)

    def shared(self, poly: Poly) -> str:
        """A far scalar: 32 bits as long as they are enough, then times what its terms have in common."""
        rest = poly - poly.offset
        common = gcd(*(c for _, c in rest.terms))
        place = Poly(tuple((m, c // common) for m, c in rest.terms)) if common > 1 else rest
        if common == 1 or not is_far(poly) or is_far(place):
            return self.poly(poly)
        after = f" + {poly.offset}" if poly.offset else ""
        return f"(tl.cast({bare(self.poly(place))}, tl.int64) * {common}{after})"

    def poly_dims(self, poly: Poly) -> frozenset[str] | None:
        """The tile axes an index varies over; None for a scalar."""
        return _together(self.dims.get(name) for name in poly.names())

    def dims_of(self, *operands: ir.Operand | None) -> frozenset[str] | None:
        """The tile axes that operands together vary over; None if all are scalars."""
        variables = (self.dims.get(o.name) for o in operands if isinstance(o, ir.Var))
        return _together((*variables, *(self.poly_dims(o) for o in operands if isinstance(o, Poly))))

    def operand(self, value: ir.Operand) -> str:
        if not isinstance(value, Poly):
            return super().operand(value)
        if not value.names():
            return f"tl.full([], {self.poly(value)}, tl.int64)"
        return f"tl.cast({bare(self.poly(value))}, tl.int64)"

    def mask(self, dims: frozenset[str] | None, *conditions: str) -> str | None:
        """Which lanes of these axes count, and the conditions; None where all do."""
        masks = [t.mask for n, t in self.tiles.items() if t.mask is not None and dims is not None and n in dims]
        return " & ".join((*masks, *conditions)) or None

    def shape(self, dims: frozenset[str]) -> list[int]:
        """Lanes of these axes in their dimensions, 1 elsewhere."""
        shape = [1] * self.rank
        for name in dims:
            shape[self.tiles[name].dim] = self.tiles[name].lanes
        return shape

    def define(self, var: ir.Var, text: str, dims: frozenset[str] | None) -> None:
        self.line(f"{var.name} = {text}")
        if dims is not None:
            self.dims[var.name] = dims

    def block(self, body: tuple[ir.Statement, ...]) -> None:
        tiles = dict(self.tiles)
        super().block(body)
        self.tiles = tiles  # what a block opens, it closes

    def visit_LoadElement(self, s: ir.LoadElement) -> None:
        if s.buffer in self.numbers:
            self.define(s.var, from_word(self.numbers[s.buffer], s.buffer.dtype), None)
            return
        place, dims, mask = self.place(s.offset, s.guard)
        arguments = [f"{self.pointers[s.buffer]} + {place}"]
        self.typed |= {s.var.name} if s.buffer in self.kernel.matrices else set()
        arguments += [f"mask={mask}, other={'0.0' if s.var.name in self.typed else 0}"] if mask is not None else []
        arguments += [f'eviction_policy="{_EVICTION[s.reuse]}"'] if s.reuse else []
        self.define(s.var, f"tl.load({', '.join(arguments)})", dims)
        self.loaded.add(s.var.name)

    def visit_StoreElement(self, s: ir.StoreElement) -> None:
        value = self.operand(s.value)
        place, _, mask = self.place(s.offset, s.guard, self.dims_of(s.value, s.guard))
        self.line(f"tl.store({self.pointers[s.buffer]} + {place}, {value}{f', mask={mask}' if mask else ''})")

    def place(
        self, offset: Poly, guard: ir.Operand | None, held: frozenset[str] | None = None
    ) -> tuple[str, frozenset[str] | None, str | None]:
        """An offset with the lanes of its guard, the axes it varies over, and which lanes count. `held`: the axes of
        a value that is a tile, even if of one lane: so is its place."""
        dims, text = self.dims_of(offset), self.offset(offset)
        if dims is None and held is not None:
            text, dims = f"({text} + zero)", NO_AXES
        conditions = [self.operand(guard)] if guard is not None else []
        extra = self.dims_of(guard)
        if extra is not None and (dims is None or not extra <= dims):
            text, dims = f"({text} + tl.where({conditions[0]}, zero, zero))", (dims or NO_AXES) | extra
        return text, dims, self.mask(dims, *conditions)

    def parts(self, a: ir.Accumulator) -> list[str]:
        return [f"{a.name}_{k}" for k in range(len(a.dtypes))]

    def masked(
        self, value: ir.Operand, neutral: Const, axes: tuple[Axis, ...], beside: frozenset[str] = NO_AXES
    ) -> str:
        """A value as it enters a reduction over tile axes: identity where lanes do not count, all lanes present.

        `beside`: axes of the values that enter with it.
        """
        text, other = self.operand(value), triton_const(neutral)
        if neutral.dtype is DType.BOOL:
            text = f"({text} != 0).to(tl.int32)" if operand_dtype(value) is not DType.BOOL else f"{text}.to(tl.int32)"
            other = f"tl.full([], {int(neutral.value)}, tl.int32)"
        dims = self.dims_of(value) or NO_AXES
        over = frozenset(a.name for a in axes)
        whole = over | beside
        mask = self.mask(over)
        if mask is not None:
            text = f"tl.where({mask}, {text}, {other})"
            dims |= frozenset(n for n in over if self.tiles[n].mask is not None)
        if not whole <= dims or self.dims_of(value) is None:
            text = f"tl.broadcast_to({text}, {self.shape(dims | whole)})"
        return text


def _together(parts: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """All tile axes of some values; None if all are scalars."""
    found = [axes for axes in parts if axes is not None]
    return NO_AXES.union(*found) if found else None


def tile_rank(body: tuple[ir.Statement, ...]) -> int:
    """How many tile axes are open at once, at most; where they name their dimensions, how many of these."""
    named = [s.dim for s in ir.walk(body) if isinstance(s, ir.Tile) and s.dim is not None]
    return 1 + max(named) if named else _deepest(body, frozenset())


def _deepest(body: tuple[ir.Statement, ...], names: frozenset[str]) -> int:
    most = len(names)
    for s in body:
        if isinstance(s, ir.Tile):
            names = names | {s.axis.name}
        elif isinstance(s, ir.Loop | ir.When | ir.Share):
            most = max(most, _deepest(s.body, names))
        most = max(most, len(names))
    return most
