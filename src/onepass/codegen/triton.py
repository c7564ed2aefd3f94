"""`emit_triton`: a Kernel of tiles as a Triton function, one statement at a time.

Every open tile axis is a dimension; all tensors have the full rank, with extent 1 where they do not vary, so
operations broadcast by themselves. Lanes beyond an axis' end are masked in loads and stores and replaced by the
identity where a reduction takes them in. Names are positional, as in C.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from ..ir import kernel as ir
from ..ir.dtypes import DType
from ..ir.expr import Const, const
from ..ir.ops import CHECKED
from ..ir.poly import Axis, Poly, in_range, product
from ..ir.source import MULTIPLE, KernelSource, Matrix
from ..ir.states import identities
from .emitter import bare, header, operand_dtype
from .scalars import COMPARISONS
from .triton_ops import signature_type, triton_fold, triton_join, triton_number, triton_pointwise, triton_type
from .triton_products import ProductEmitter
from .triton_text import NO_AXES, OpenTile


def emit_triton(kernel: ir.Kernel, exact: bool = False, overlaps: bool = False) -> KernelSource:
    """The Triton module of one kernel. `exact`: a product and a sum are never contracted."""
    text = TritonEmitter(kernel, overlaps, describe=True).unit()
    special = kernel.descriptors or kernel.parts
    general = TritonEmitter(kernel, overlaps, describe=False).unit() if special else ""
    pointers = [b for b in kernel.passed if b not in kernel.numbers]
    table = ("*i64",) if kernel.parts else ()
    words = len(kernel.numbers) + len(kernel.symbols)
    types = {b: signature_type(b.dtype, b in kernel.matrices) for b in pointers}
    signature = tuple(f"*{types[b]}" for b in pointers) + table + ("i64",) * words
    signature += tuple(f"tensordesc<{types[d.buffer]}{list(d.block)}>" for d in kernel.descriptors)
    matrices = tuple(Matrix(pointers.index(d.buffer), d.rows, d.columns) for d in kernel.descriptors)
    multiples = tuple(len(kernel.numbers) + kernel.symbols.index(s) for s in kernel.multiples)
    options = f"{kernel.warps} {kernel.stages} {exact} {kernel.streams} {kernel.denormals} {kernel.asserts}"
    facts = f"{signature} {matrices} {multiples} {MULTIPLE} {options}"
    key = hashlib.sha256(f"{text}\0{facts}".encode()).hexdigest()[:32]
    return KernelSource(
        kernel.name, "triton", header(kernel, "#") + text, kernel.entry, key, len(pointers) + len(table), words,
        raises=False, signature=signature, warps=kernel.warps, stages=kernel.stages, exact=exact,
        matrices=matrices, general=general, multiples=multiples, streams=kernel.streams, overlaps=overlaps,
        denormals=kernel.denormals, asserts=kernel.asserts,
    )  # fmt: skip


class TritonEmitter(ProductEmitter):
    """The unit, and the statements that are not of products."""

    # --- the unit ---

    def unit(self) -> str:
        """Everything but the header comment."""
        table = ("table",) if self.kernel.parts else ()
        named = (*self.pointers.values(), *table, *self.numbers.values(), *self.sizes.values(), *self.described)
        self.line("@triton.jit")
        self.line(f"def {self.kernel.entry}({', '.join(named)}):")
        self.depth += 1
        if self.overlaps:  # before anything is read or written
            self.line("op_wait_for_last_kernel()")
        self.grid()
        if self.one_rank:
            self.zero()
        self.block(self.kernel.body)
        body = "\n".join(self.lines) + "\n"
        names = sorted(set(re.findall(r"\bop_\w+", body)))
        imports = ["import triton", "import triton.language as tl"]
        imports += ["from triton.language.extra import libdevice"] if "libdevice." in body else []
        imports += [f"from onepass.codegen.triton_prelude import {', '.join(names)}"] if names else []
        return "\n".join(imports) + "\n\n\n" + body

    def grid(self) -> None:
        """The program number becomes one position per grid axis, the last one fastest."""
        left = "tl.program_id(0)"
        axes = self.kernel.grid
        if self.kernel.resident and not any(isinstance(s, ir.Share) for s in self.kernel.body):
            total = self.poly(product(g.extent for g in axes))
            flat = ", flatten=True" if self.kernel.flat else ""
            self.line(f"for program in tl.range({left}, {total}, tl.num_programs(0){flat}):")
            self.depth += 1
            left = "program"
        self.positions(axes, left)

    # --- statements ---

    def visit_ReadLocal(self, s: ir.ReadLocal) -> None:
        self.define(s.var, s.local.name, self.dims.get(s.local.name))

    def visit_Rescale(self, s: ir.Rescale) -> None:
        name, factor = f"{s.accumulator.name}_0", self.operand(s.factor)
        scaled = f"{name} * {factor}"
        self.line(f"{name} = {f'tl.where({factor} == 0, 0.0, {scaled})' if s.guarded else scaled}")

    def visit_Barrier(self, _: ir.Barrier) -> None:
        self.line("tl.debug_barrier()")

    def visit_When(self, s: ir.When) -> None:
        with self.nested(f"if {self.operand(s.condition)}:"):
            self.block(s.body)

    def visit_Let(self, s: ir.Let) -> None:
        dims = self.dims_of(*s.args)
        if s.op in COMPARISONS and len(places := [p for a in s.args if (p := ir.place_of(a)) is not None]) == 2:
            text = triton_pointwise(s.op, [self.poly(p) for p in places], [DType.I64] * 2, DType.BOOL)
            varies = any(p.names() for p in places)
            self.define(s.var, text if varies else f"tl.full([], {text}, tl.int1)", dims)
            return
        if s.op == "cast" and isinstance(s.args[0], Poly) and s.args[0].names() and not self.kernel.wide:
            text = f"tl.cast({bare(self.poly(s.args[0]))}, {triton_type(s.var.dtype)})"  # from 32 bits
            self.define(s.var, text, dims)
            return
        args = [self.operand(a) for a in s.args]
        if s.op in CHECKED:
            self.checked_index(s, args, dims)
        else:
            text = triton_pointwise(s.op, args, [operand_dtype(a) for a in s.args], s.var.dtype)
            self.define(s.var, bare(text), dims)

    def checked_index(self, s: ir.Let, args: list[str], dims: frozenset[str] | None) -> None:
        """An index from data: outside its dimension the program stops, as eager's does on a GPU."""
        index, size = args
        wrapped = f"tl.where({index} < 0, {index} + {size}, {index})"
        self.define(s.var, wrapped if s.op == "wrap_index" else index, dims)
        inside = f"(({s.var.name} >= 0) & ({s.var.name} < {size}))"
        mask = self.mask(dims)
        asserted = inside if mask is None else f"{inside} | (({mask}) == 0)"
        self.line(f'tl.device_assert({asserted}, "index out of range in self")')

    def visit_RandomWord(self, s: ir.RandomWord) -> None:
        seed, dims = self.operand(s.seed), self.dims_of(s.index)
        if s.along is None:
            index = self.offset(s.index)
            index = index if dims is not None else f"({index} + tl.full([], 0, tl.int64))"
            self.define(s.var, f"op_random({seed}, {s.stream}, {index})", dims)
            return
        assert dims is not None
        lanes, rest, calls = self.tiles[s.along.name].lanes, (s.index - s.along) // 4, s.calls
        quarter = f"{s.along.name}_quarter"
        places = f"tl.arange(0, {lanes // (4 * calls)}){self.spread(self.tiles[s.along.name].dim)}"
        self.line(f"{quarter} = {places}{f' * {calls}' if calls > 1 else ''}")
        words = [[f"{s.var.name}_{4 * call + k}" for k in range(4)] for call in range(calls)]
        for call, names in enumerate(words):
            at = f"{self.offset(rest)} + {quarter}{f' + {call}' if call else ''}"
            self.line(f"{', '.join(names)} = op_random4({seed}, {s.stream}, {at})")
        self.define(s.var, f"tl.reshape({_joined([w for names in words for w in names])}, {self.shape(dims)})", dims)

    def spread(self, dim: int) -> str:
        """The subscript that puts a vector into one dimension of the full rank."""
        if self.rank == 1:
            return ""
        return f"[{', '.join(':' if k == dim else 'None' for k in range(self.rank))}]"

    def visit_Tile(self, s: ir.Tile) -> None:
        name = s.axis.name
        open_tiles = {n: t for n, t in self.tiles.items() if n != name}
        dim = len(open_tiles) if s.dim is None else s.dim
        self.line(f"{name} = tl.arange(0, {s.lanes}){self.spread(dim)}")
        self.dims[name] = frozenset((name,))
        mask, count = None, str(s.lanes)
        if s.limits:
            mask = f"{name}_in"
            self.line(f"{mask} = {' & '.join(f'({name} < {self.lanes_before(p, s.lanes)})' for p in s.limits)}")
            fits = len(s.limits) == 1 and s.limits[0].constant is not None and s.limits[0].constant <= s.lanes
            for p in s.limits:
                count = self.poly(p) if fits else f"min({count}, {self.poly(p)})"
        self.tiles[name] = OpenTile(dim, s.lanes, mask, count)

    def lanes_before(self, limit: Poly, lanes: int) -> str:
        """A limit for the lanes of a tile, in 32 bits as they are."""
        text = self.poly(limit)
        return f"tl.cast(min({lanes}, {text}), tl.int32)" if self.kernel.wide and limit.names() else text

    def visit_Loop(self, s: ir.Loop) -> None:
        start, stop = "0", self.poly(s.extent)
        for bound in (*s.before, *((s.limit,) if s.limit is not None else ())):
            stop = f"min({stop}, {self.poly(bound)})"
        for bound in s.after:
            start = f"max({start}, {self.poly(bound)})"
        if self.kernel.wide:  # a loop counts in 32 bits whatever its bounds are computed in
            start, stop = (t if t.isdigit() else f"tl.cast({t}, tl.int32)" for t in (start, stop))
        name = s.axis.name
        steps = f"tl.range({start}, {stop}, num_stages={s.stages})" if s.stages else f"range({start}, {stop})"
        with self.nested(f"for {name} in {steps}:"):
            self.block(s.body)

    # --- cells and accumulators ---

    def visit_WriteLocal(self, s: ir.WriteLocal) -> None:
        local, value, text = s.local, s.value, self.operand(s.value)
        assert local.size == 1, "tile programs have no arrays"
        if local.name not in self.dims:
            assert isinstance(value, Const), "a cell starts as a number"
            shape, self.dims[local.name] = self.lanes_of(local.tiles)
            text = f"tl.full({shape}, {triton_number(value)}, {triton_type(local.dtype)})"
        self.line(f"{local.name} = {text}")

    def lanes_of(self, tiles: tuple[Axis, ...]) -> tuple[list[int], frozenset[str]]:
        """The shape and axes of a state for each lane of tiles."""
        shape = [1] * self.rank
        for axis in tiles:
            shape[self.dim_of(axis)] = axis.extent.constant or 1
        return shape, frozenset(a.name for a in tiles)

    def dim_of(self, axis: Axis) -> int:
        """The dimension of a tile axis; one that is not open yet is the next."""
        return self.tiles[axis.name].dim if axis.name in self.tiles else len(self.tiles)

    def visit_Start(self, s: ir.Start) -> None:
        a = s.accumulator
        shape, dims = self.lanes_of(a.tiles)
        for name, dtype, value in zip(self.parts(a), a.dtypes, identities(a.monoid, a.dtypes), strict=True):
            number = triton_number(value) if dtype is not DType.BOOL else str(int(value.value))
            narrow = f".to({triton_type(dtype)})" if dtype.is_half else ""
            self.line(f"{name} = tl.full({shape}, {number}, {_held(dtype)}){narrow}")
            self.dims[name] = dims

    def entering(
        self, monoid: str, dtypes: Sequence[DType], inputs: tuple[ir.Operand, ...], axes: tuple[Axis, ...], folded: bool
    ) -> list[str]:
        """Values as they enter a reduction; positions that are `folded` do so in 32 bits where they fit."""
        neutral, position = identities(monoid, dtypes), inputs[-1]
        short = folded and len(inputs) == 2 and isinstance(position, Poly) and in_range(position, Poly.of(1 << 31))
        if short:
            neutral[1] = const((1 << 31) - 1, DType.I32)
        beside = self.dims_of(*inputs) or NO_AXES if len(inputs) > 1 else NO_AXES
        values = [self.masked(v, n, axes, beside) for v, n in zip(inputs, neutral, strict=False)]
        return [values[0], f"{values[1]}.to(tl.int32)"] if short else values

    def visit_Accumulate(self, s: ir.Accumulate) -> None:
        a = s.accumulator
        axes = tuple(x for x in s.lane.axes if x.name in self.tiles)
        if a.monoid == "welford" and set(axes) <= set(a.tiles):
            mask, kind = self.mask(frozenset(x.name for x in axes)), triton_type(a.dtypes[0])
            inside = f"({mask}).to({kind})" if mask is not None else f"tl.full([], 1, {kind})"
            entering = ", ".join((*self.parts(a), self.operand(s.inputs[0]), inside))
            self.line(f"{', '.join(self.parts(a))} = op_step_welford({entering})")
            return
        if a.monoid == "welford":
            state = self.welford(s.inputs[0], axes, f"{a.name}_new")
            self.line(f"{', '.join(self.parts(a))} = op_join_welford({', '.join((*self.parts(a), *state))})")
            return
        folded = tuple(x for x in axes if x not in a.tiles)  # which have no states of their own
        values = self.entering(a.monoid, a.dtypes, s.inputs, axes, bool(folded))
        values = self.folded([f"{name}_new" for name in self.parts(a)], a.monoid, values, folded)
        self.line(f"{', '.join(self.parts(a))} = {triton_join(a.monoid, self.parts(a), values, a.dtypes[0])}")

    def visit_Advance(self, s: ir.Advance) -> None:
        a, names = s.accumulator, [v.name for v in s.parts]
        dims = self.dims_of(*s.inputs) or NO_AXES
        states = self.parts(a) if a is not None else []
        if a is not None:
            dims |= {x.name for x in a.tiles}
        if s.along is None:
            values = [self.operand(v) for v in s.inputs] + ["1.0"] * (s.monoid == "logsumexp")
            self.line(f"{', '.join(states)} = {triton_join(s.monoid, states, values, s.parts[0].dtype)}")
            self.line(f"{', '.join(names)} = {', '.join(states)}")
        else:
            dims |= {s.along.name}
            self.scanned(s, s.along, states)
        self.dims |= dict.fromkeys(names, dims)

    def scanned(self, s: ir.Advance, along: Axis, states: list[str]) -> None:
        """The states along a tile, after those before it; the last of them goes on."""
        names, dtypes, dim = [v.name for v in s.parts], [v.dtype for v in s.parts], self.dim_of(along)
        tile = [f"{n}_tile" for n in names] if states else names
        values = self.entering(s.monoid, dtypes, s.inputs, (along,), folded=True)
        self.line(f"{', '.join(tile)} = op_scan_{s.monoid}({', '.join(values)}, {dim}, {s.reverse})")
        if s.monoid in ("argmax", "argmin"):
            self.line(f"{tile[1]} = {tile[1]}.to(tl.int64)")
        if states:
            self.line(f"{', '.join(names)} = {triton_join(s.monoid, states, tile, dtypes[0])}")
            last = f"{along.name} == {0 if s.reverse else self.tiles[along.name].lanes - 1}"
            for state, name in zip(states, names, strict=True):
                self.line(f"{state} = op_single_of({name}, {last}, {dim})")

    def welford(self, value: ir.Operand, axes: tuple[Axis, ...], name: str) -> list[str]:
        """Mean, sum of squared distances and count of the lanes that count, in two passes over the held tile."""
        dtype = operand_dtype(value)
        kind = triton_type(dtype)
        zero = identities("welford", (dtype,))[0]
        self.line(f"{name}_x = {self.masked(value, zero, axes)}")
        counts = " * ".join(f"tl.cast({self.tiles[a.name].count}, {kind})" for a in axes) or f"tl.full([], 1, {kind})"
        self.line(f"{name}_count = {counts} + tl.full({[1] * self.rank}, 0, {kind})")
        self.line(f"{name}_mean = {self.summed(f'{name}_x', axes)} / {name}_count")
        mask = self.mask(frozenset(a.name for a in axes))
        distance = f"{name}_x - {name}_mean"
        self.line(f"{name}_d = {distance if mask is None else f'tl.where({mask}, {distance}, 0.0)'}")
        self.line(f"{name}_m2 = {self.summed(f'{name}_d * {name}_d', axes)}")
        return [f"{name}_mean", f"{name}_m2", f"{name}_count"]

    def summed(self, text: str, axes: tuple[Axis, ...]) -> str:
        """The sum of a value over several axes."""
        for axis in axes:
            text = triton_fold("sum", [text], self.dim_of(axis))
        return text

    def folded(self, names: list[str], monoid: str, values: list[str], axes: tuple[Axis, ...]) -> list[str]:
        """What holds values after they are folded over axes, one by one: the names, or still the values."""
        for axis in axes:
            self.line(f"{', '.join(names)} = {triton_fold(monoid, values, self.dim_of(axis))}")
            values = names
        return values

    def visit_Fold(self, s: ir.Fold) -> None:
        dims = (self.dims_of(*s.inputs) or NO_AXES) - {a.name for a in s.over}
        names = [v.name for v in s.parts]
        if s.monoid == "welford":
            state = self.welford(s.inputs[0], s.over, names[0])
            for var, text in zip(s.parts, state, strict=True):
                self.define(var, text, dims)
            return
        values = self.entering(s.monoid, [v.dtype for v in s.parts], s.inputs, s.over, folded=True)
        self.folded(names, s.monoid, values, s.over)
        for var in s.parts:
            if var.dtype is DType.BOOL:
                self.line(f"{var.name} = {var.name} != 0")
            elif var.dtype is DType.I64 and s.monoid in ("argmax", "argmin"):
                self.line(f"{var.name} = {var.name}.to(tl.int64)")
            self.dims[var.name] = dims

    def visit_Finish(self, s: ir.Finish) -> None:
        a = s.accumulator
        dims = self.dims[self.parts(a)[0]] - {x.name for x in a.folded}
        values = self.folded([v.name for v in s.parts], a.monoid, self.parts(a), a.folded)
        for var, value in zip(s.parts, values, strict=True):
            if value != var.name:
                self.line(f"{var.name} = {value}")
            if var.dtype is DType.BOOL:
                self.line(f"{var.name} = {var.name} != 0")
            self.dims[var.name] = dims


def _joined(words: list[str]) -> str:
    """Words that belong to neighbouring elements, in a dimension for each bit of their number."""
    if len(words) == 1:
        return words[0]
    return f"tl.join({_joined(words[::2])}, {_joined(words[1::2])})"


def _held(dtype: DType) -> str:
    """The type an accumulator's part starts in: bools count in int32, 16-bit floats come from float32."""
    if dtype is DType.BOOL:
        return "tl.int32"
    return "tl.float32" if dtype.is_half else triton_type(dtype)
