"""Triton text of what kernels with matrix products have beside all others: blocks, the matrix unit, shared launches."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.kernel import Contract, LoadElement, LoadTile, Operand, Share, StoreElement, StoreTile, Var
from ..ir.poly import Poly
from .emitter import bare, operand_dtype
from .triton_ops import MATRIX_TYPES, identities, triton_type
from .triton_text import NO_AXES, TileEmitter


def load_tile(emitter: TileEmitter, s: LoadTile) -> None:
    """A block that hardware copies, or its elements where it is not described."""
    if s.descriptor.name not in emitter.described:
        emitter.load(LoadElement(s.var, s.descriptor.buffer, s.offset))
        return
    emitter.typed |= {s.var.name} if s.descriptor.buffer in emitter.kernel.matrices else set()
    block = f"{s.descriptor.name}.load([{bare(emitter.poly(s.row))}, {bare(emitter.poly(s.column))}])"
    emitter.define(s.var, f"{block}.T" if s.transposed else block, emitter.dims_of(s.offset))
    emitter.loaded.add(s.var.name)


def store_tile(emitter: TileEmitter, s: StoreTile) -> None:
    """The same, to memory."""
    if s.descriptor.name not in emitter.described:
        emitter.store(StoreElement(s.descriptor.buffer, s.offset, s.value))
        return
    value = emitter.operand(s.value)
    at = f"[{bare(emitter.poly(s.row))}, {bare(emitter.poly(s.column))}]"
    emitter.line(f"{s.descriptor.name}.store({at}, {value}{'.T' if s.transposed else ''})")


def contract(emitter: TileEmitter, s: Contract) -> None:
    """The matrix unit; lanes of the summed axis that do not count are zero on both sides."""
    sides = []
    zero = identities("sum", (s.operands,))[0]
    for side, axis in zip((s.left, s.right), s.summed, strict=True):
        loaded = isinstance(side, Var) and side.name in emitter.loaded
        text = emitter.operand(side) if loaded else emitter.masked(side, zero, (axis,))
        text = text if operand_dtype(side) is s.operands else f"({text}).to({triton_type(s.operands)})"
        raw = s.operands.is_packed and not (isinstance(side, Var) and side.name in emitter.typed)
        sides.append(f"({text}).to({MATRIX_TYPES[s.operands][1]}, bitcast=True)" if raw else text)
    precision = f', input_precision="{s.precision}"' if s.operands is DType.F32 else ""
    if s.operands.is_integer:
        precision = ", out_dtype=tl.int32"
    elif s.operands.is_packed:  # sums inside the unit are short of bits: they leave it after each step
        precision = f", max_num_imprecise_acc={emitter.tiles[s.summed[0].name].lanes}"
    if s.accumulator is not None:
        (name,) = emitter.parts(s.accumulator)
        emitter.line(f"{name} = tl.dot({', '.join(sides)}, {name}{precision})")
        return
    emitter.define(
        s.var, f"tl.dot({', '.join(sides)}{precision})", _outer(emitter, s.left, 0) | _outer(emitter, s.right, 1)
    )


def _outer(emitter: TileEmitter, side: Operand, dim: int) -> frozenset[str]:
    """The axes of a matrix that lie in one dimension."""
    return frozenset(n for n in emitter.dims_of(side) or NO_AXES if emitter.tiles[n].dim == dim)


def share(emitter: TileEmitter, s: Share) -> None:
    """Programs that stay come from the share before with the next number that is theirs."""
    first, end, number = emitter.poly(s.first), emitter.poly(s.end), "program"
    if emitter.kernel.resident:
        every, number = "tl.num_programs(0)", "turn"
        start = f"program + ({first} - program + {every} - 1) // {every} * {every}"
        start = "program" if s.first is Poly.ZERO else start
        emitter.line(f"for turn in tl.range({start}, {end}, {every}{', flatten=True' if s.flat else ''}):")
    else:
        after = "" if s.first is Poly.ZERO else f"(program >= {first}) & "
        emitter.line(f"if {after}(program < {end}):")
    emitter.depth += 1
    emitter.positions(s.grid, number if s.first is Poly.ZERO else f"({number} - {first})")
    emitter.block(s.body)
    emitter.depth -= 1
