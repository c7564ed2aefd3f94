"""Triton text of what kernels with matrix products have beside all others: blocks, the matrix unit, shared launches."""

from __future__ import annotations

from ..analysis.access import power_above
from ..ir.dtypes import DType
from ..ir.kernel import Contract, LoadElement, LoadTile, Operand, Share, StoreElement, StoreTile, Var
from ..ir.poly import Poly
from ..ir.program import Buffer
from ..ir.states import identities
from .emitter import bare, operand_dtype
from .triton_ops import MATRIX_TYPES, triton_type
from .triton_text import NO_AXES, TileEmitter, tile_rank


class ProductEmitter(TileEmitter):
    """The statements of matrix products."""

    def visit_LoadTile(self, s: LoadTile) -> None:
        """A block that hardware copies, or its elements where it is not described."""
        if s.descriptor.name not in self.described:
            self.visit_LoadElement(LoadElement(s.var, s.buffer, s.offset))
            return
        self.typed |= {s.var.name} if s.buffer in self.kernel.matrices else set()
        block = f"{s.descriptor.name}.load([{bare(self.poly(s.row))}, {bare(self.poly(s.column))}])"
        self.define(s.var, f"{block}.T" if s.transposed else block, self.dims_of(s.offset))
        self.loaded.add(s.var.name)

    def visit_StoreTile(self, s: StoreTile) -> None:
        """The same, to memory."""
        if s.descriptor.name not in self.described:
            self.visit_StoreElement(StoreElement(s.buffer, s.offset, s.value))
            return
        value = self.operand(s.value)
        at = f"[{bare(self.poly(s.row))}, {bare(self.poly(s.column))}]"
        self.line(f"{s.descriptor.name}.store({at}, {value}{'.T' if s.transposed else ''})")

    def visit_Contract(self, s: Contract) -> None:
        """The matrix unit; lanes of the summed axis that do not count are zero on both sides."""
        sides = []
        zero = identities("sum", (s.operands,))[0]
        for side, axis in zip((s.left, s.right), s.summed, strict=True):
            loaded = isinstance(side, Var) and side.name in self.loaded
            text = self.operand(side) if loaded else self.masked(side, zero, (axis,))
            text = text if operand_dtype(side) is s.operands else f"({text}).to({triton_type(s.operands)})"
            raw = s.operands.is_packed and not (isinstance(side, Var) and side.name in self.typed)
            sides.append(f"({text}).to({MATRIX_TYPES[s.operands][1]}, bitcast=True)" if raw else text)
        precision = f', input_precision="{s.precision}"' if s.operands is DType.F32 else ""
        if s.operands.is_integer:
            precision = ", out_dtype=tl.int32"
        elif s.operands.is_packed:  # sums inside the unit are short of bits: they leave it after each step
            precision = f", max_num_imprecise_acc={self.tiles[s.summed[0].name].lanes}"
        if s.accumulator is not None:
            (name,) = self.parts(s.accumulator)
            self.line(f"{name} = tl.dot({', '.join(sides)}, {name}{precision})")
            return
        self.define(s.var, f"tl.dot({', '.join(sides)}{precision})", self.outer(s.left, 0) | self.outer(s.right, 1))

    def outer(self, side: Operand, dim: int) -> frozenset[str]:
        """The axes of a matrix that lie in one dimension."""
        return frozenset(n for n in self.dims_of(side) or NO_AXES if self.tiles[n].dim == dim)

    def visit_Share(self, s: Share) -> None:
        """Programs that stay come from the share before with the next number that is theirs."""
        first, end, number = self.poly(s.first), self.poly(s.end), "program"
        if self.kernel.resident:
            every, number = "tl.num_programs(0)", "turn"
            start = f"program + ({first} - program + {every} - 1) // {every} * {every}"
            start = "program" if s.first is Poly.ZERO else start
            opening = f"for turn in tl.range({start}, {end}, {every}{', flatten=True' if s.flat else ''}):"
        else:
            after = "" if s.first is Poly.ZERO else f"(program >= {first}) & "
            opening = f"if {after}(program < {end}):"
        dims, loaded, rank = dict(self.dims), set(self.loaded), self.rank  # another range may use the same names
        with self.nested(opening):
            if not self.one_rank:
                self.rank = tile_rank(s.body)
                self.zero()
            self.share(s, number)
        self.dims, self.loaded, self.rank = dims, loaded, rank

    def searched(self, count: int) -> str:
        return f", {power_above(count)}"

    def pointer(self, name: str, buffer: Buffer, place: str, written: bool) -> None:
        element = triton_type(buffer.dtype)
        text = f"tl.load({place}).to(tl.pointer_type({element}))"
        self.bind(name, f"tl.multiple_of({text}, 16)" if self.aligned else text)

    def word(self, place: str, divisor: int) -> str:
        text = f"tl.load({place})" + ("" if self.kernel.wide else ".to(tl.int32)")
        return f"tl.multiple_of({text}, {divisor})" if divisor > 1 else text
