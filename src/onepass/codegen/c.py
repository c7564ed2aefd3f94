"""`emit_c`: a Kernel as C with OpenMP and SIMD, one statement at a time.

Tiles are simd loops; strips are a main loop of whole tiles plus a scalar tail; accumulators are lane
arrays. The entry returns a status (see prelude.h). Names are positional, so two kernels that do the
same have the same text, and no name of the user's appears outside the header comment.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager

from ..ir import kernel as ir
from ..ir.dtypes import DType
from ..ir.poly import Poly, Symbol, product
from ..ir.program import Buffer
from ..ir.source import KernelSource
from .c_ops import c_accumulate, c_combine, c_const, c_monoid_identity, c_pointwise, c_type, raises
from .emitter import Emitter, bare, header, operand_dtype
from .scalars import suffix

BLOCKS = 16  # of programs that a thread takes, one after another, where some take longer than others


def emit_c(kernel: ir.Kernel) -> KernelSource:
    """The C translation unit of one kernel."""
    text = _Emitter(kernel).unit()
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    heading = header(kernel, "//")
    return KernelSource(
        kernel.name, "c", heading + text, kernel.entry, key, len(kernel.passed) + bool(kernel.parts),
        len(kernel.symbols), kernel.raises,
    )  # fmt: skip


class _Emitter(Emitter):
    naming, literal = "const int64_t {} = {};", staticmethod(c_const)

    # --- the unit ---

    def unit(self) -> str:
        """Everything but the header comment."""
        constant = {b: "" if b in self.kernel.writes else "const " for b in self.pointers}
        parameters = [f"{constant[b]}{c_type(b.dtype)} *{n}" for b, n in self.pointers.items()]
        parameters += ["const int64_t *table"] if self.kernel.parts else []
        sizes = [f"int64_t {n}" for n in self.sizes.values()]
        stores = [x for x in ir.walk(self.kernel.body) if isinstance(x, ir.StoreElement) and x.staged is not None]
        streamed = list(dict.fromkeys(self.pointers[x.buffer] for x in stores))
        flags = [f"int {name}_touched" for name in streamed]
        pointers = (*self.pointers.values(), *(("table",) if self.kernel.parts else ()))
        arguments = ", ".join((*pointers, *self.sizes.values(), *(f"{n}_touched" for n in streamed)))
        self.line('#include "prelude.h"\n')
        taken = ", ".join((*parameters, *sizes, *flags, "int64_t first", "int64_t last"))
        with self.braces(f"static int programs({taken})"):
            self.line("int status = 0;")
            with self.braces("for (int64_t program = first; program < last; ++program)"):
                if not self.shared:
                    self.positions(self.kernel.grid, "program")
                self.arrays(self.kernel.locals)
                self.block(self.kernel.body)
            if streamed:
                self.line("op_stream_end();")
            self.line("return status;")
        self.line("")
        self.entry(parameters, sizes, streamed, arguments)
        return "\n".join(self.lines) + "\n"

    def braces(self, opening: str) -> AbstractContextManager[None]:
        """A block of C."""
        return self.nested(f"{opening} {{".lstrip(), "}")

    @property
    def shared(self) -> bool:
        """Whether several kernels share the launch."""
        return any(isinstance(s, ir.Share) for s in self.kernel.body)

    def arrays(self, found: tuple[ir.Local, ...]) -> None:
        """The scratch of a program."""
        for local in found:
            self.array(local.dtype, local.name, self.size(local.size))

    def array(self, dtype: DType, name: str, size: int | str, start: str = "") -> None:
        """An array, in whole cache lines."""
        self.line(f"{_held(dtype)} {name}[{size}] __attribute__((aligned(64))){start};")

    def size(self, value: int | Poly) -> str:
        return str(value) if isinstance(value, int) else self.poly(value)

    def entry(self, parameters: list[str], sizes: list[str], streamed: list[str], arguments: str) -> None:
        count = self.poly(product(g.extent for g in self.kernel.grid))
        work = self.poly(self.kernel.work)
        with self.braces(f"int {self.kernel.entry}({', '.join((*parameters, *sizes, 'int64_t threads'))})"):
            self.line(f"const int64_t count = {count};")
            self.line("if (count <= 0) return 0;")
            for name in streamed:
                self.line(f"const int {name}_touched = op_touched({name});")
            self.line("if (threads > count) threads = count;")
            self.line(f"if (threads <= 1 || {work} < {self.kernel.team_work}) return programs({arguments}, 0, count);")
            self.line("int status = 0;")
            team = "num_threads(threads) reduction(| : status)"
            if self.shared:  # programs of one kernel take longer than those of another
                self.line(f"const int64_t block = count / ({BLOCKS} * threads) + 1;")
                self.line(f"#pragma omp parallel for schedule(dynamic, 1) {team}")
                with self.braces("for (int64_t first = 0; first < count; first += block)"):
                    self.line(f"status |= programs({arguments}, first, op_index_min(first + block, count));")
                self.line("return status;")
                return
            self.line(f"#pragma omp parallel {team}")
            with self.braces(""):
                self.line("const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();")
                self.line(f"status |= programs({arguments}, count * me / team, count * (me + 1) / team);")
            self.line("return status;")

    # --- text ---

    def number(self, value: int) -> str:
        return f"{value}LL" if value > 0x7FFFFFFF else str(value)

    def split(self, name: str, number: int, left: str, extent: str) -> str:
        self.bind(name, f"{left} % {extent}, rest{number} = {left} / {extent}")
        return f"rest{number}"

    # --- statements ---

    def visit_Let(self, s: ir.Let) -> None:
        dtypes = [operand_dtype(a) for a in s.args]
        self.define(s.var, c_pointwise(s.op, [self.operand(a) for a in s.args], dtypes, s.var.dtype))

    def visit_LoadElement(self, s: ir.LoadElement) -> None:
        text = f"{self.pointers[s.buffer]}[{self.poly(s.offset)}]"
        self.define(s.var, text if s.guard is None else f"{self.operand(s.guard)} ? {text} : 0")

    def visit_StoreElement(self, s: ir.StoreElement) -> None:
        store = f"{self.pointers[s.buffer]}[{self.poly(s.offset)}] = {self.operand(s.value)};"
        self.line(store if s.guard is None else f"if ({self.operand(s.guard)}) {store}")

    def visit_RandomWord(self, s: ir.RandomWord) -> None:
        seed, index = self.operand(s.seed), self.poly(s.index)
        self.define(s.var, f"op_random((uint64_t){seed}, {s.stream}u, (uint64_t){index})")

    def visit_FillRandom(self, s: ir.FillRandom) -> None:
        seed, first, count = self.operand(s.seed), self.poly(s.first), self.size(s.local.size)
        self.line(f"op_random_fill((uint64_t){seed}, {s.stream}u, (uint64_t){first}, {s.local.name}, {count});")

    def visit_ReadLocal(self, s: ir.ReadLocal) -> None:
        self.define(s.var, f"{s.local.name}[{self.poly(s.index)}]")

    def visit_WriteLocal(self, s: ir.WriteLocal) -> None:
        self.line(f"{s.local.name}[{self.poly(s.index)}] = {self.operand(s.value)};")

    def visit_Share(self, s: ir.Share) -> None:
        after = "" if s.first is Poly.ZERO else f"program >= {self.poly(s.first)} && "
        with self.braces(f"if ({after}program < {self.poly(s.end)})"):
            self.arrays(s.locals)
            self.share(s, "program")

    def pointer(self, name: str, buffer: Buffer, place: str, written: bool) -> None:
        kind = f"{'' if written else 'const '}{c_type(buffer.dtype)} *"
        self.line(f"{kind}const {name} = ({kind})*({place});")

    def word(self, place: str, divisor: int) -> str:
        return f"*({place})"

    def visit_When(self, s: ir.When) -> None:
        with self.braces(f"if ({self.operand(s.condition)})"):
            self.block(s.body)

    def define(self, var: ir.Var, text: str) -> None:
        self.line(f"const {_held(var.dtype)} {var.name} = {bare(text)};")

    def visit_Loop(self, s: ir.Loop) -> None:
        stop = self.poly(s.extent)
        if s.limit is not None:
            stop = f"op_index_min({stop}, {self.poly(s.limit)})"
        if s.kind == "strip":
            self.strip(s, stop)
            return
        name, started = s.axis.name, f"{s.axis.name} = 0"
        if s.kind == "tile":
            self.simd(s)
        else:
            started, stop = f"{started}, {name}_stop = {stop}", f"{name}_stop"
        with self.braces(f"for (int64_t {started}; {name} < {stop}; ++{name})"):
            self.block(s.body)

    def simd(self, s: ir.Loop) -> None:
        if not s.ordered:
            failing = any(isinstance(x, ir.Let) and raises(x.op, operand_dtype(x.args[0])) for x in ir.walk(s.body))
            self.line("#pragma omp simd reduction(| : status)" if failing else "#pragma omp simd")

    def strip(self, s: ir.Loop, stop: str) -> None:
        """Whole tiles of lanes, then a scalar tail over the first lanes."""
        name, lanes = s.axis.name, s.lanes
        assert s.lane is not None
        lane, at, end = s.lane.name, f"{name}_at", f"{name}_end"
        by_lane = [x.accumulator for x in s.statements if isinstance(x, ir.Accumulate) and _by_lane(x, s)]
        long_sums = [a for a in by_lane if a.compensated]
        with self.braces(""):
            self.line(f"int64_t {at} = 0;")
            self.line(f"const int64_t {end} = {stop};")
            for first in s.origins:
                self.shift(first, s)
            if long_sums:
                with self.braces(f"while ({at} + {lanes} <= {end})"):
                    block = f"op_index_min({end}, {at} + {long_sums[0].compensated * lanes})"
                    self.line(f"const int64_t {name}_block = {block};")
                    for a in long_sums:
                        self.array(a.dtypes[0], f"{a.name}_part", lanes, " = {0}")
                    self.tiles(s, f"{name}_block")
                    with self.braces(f"for (int lane = 0; lane < {lanes}; ++lane)"):
                        for a in long_sums:
                            self.line(self.lossless(a, "lane", f"{a.name}_part[lane]"))
            else:
                self.tiles(s, end)
            if s.prologue:
                with self.braces(f"if ({at} < {end})"):
                    self.block(s.prologue)
            self.lanes(s, f"{at} + {lane} < {end}", whole=False)

    def tiles(self, s: ir.Loop, stop: str) -> None:
        """The loop over whole tiles of a strip."""
        assert s.lane is not None
        at = f"{s.axis.name}_at"
        with self.braces(f"for (; {at} + {s.lanes} <= {stop}; {at} += {s.lanes})"):
            self.block(s.prologue)
            self.lanes(s, f"{s.lane.name} < {s.lanes}", whole=True)
            start = {s.axis: Symbol(at).poly()}
            for store in s.statements:
                if isinstance(store, ir.StoreElement) and store.staged is not None:
                    place = f"{self.pointers[store.buffer]} + {self.poly(store.offset.substitute(start))}"
                    size, touched = s.lanes * store.buffer.dtype.bytes, f"{self.pointers[store.buffer]}_touched"
                    self.line(f"op_stream({place}, {store.staged.name}, {size}, {touched});")

    def lanes(self, s: ir.Loop, condition: str, whole: bool) -> None:
        """The loop over the lanes of a strip: of a whole tile, or of the tail; one for each stage."""
        for stage in s.body if isinstance(s.body[0], ir.Stage) else (ir.Stage(s.body),):
            assert isinstance(stage, ir.Stage)
            if whole and not stage.in_turn:
                self.simd(s)
            self.stage(s, stage, condition, whole)

    def stage(self, s: ir.Loop, stage: ir.Stage, condition: str, whole: bool) -> None:
        assert s.lane is not None
        lane = s.lane.name
        with self.braces(f"for (int64_t {lane} = 0; {condition}; ++{lane})"):
            self.line(f"const int64_t {s.axis.name} = {s.axis.name}_at + {lane};")
            for x in stage.body:
                if isinstance(x, ir.Accumulate):
                    self.visit_Accumulate(x, s, whole)
                elif whole and isinstance(x, ir.StoreElement) and x.staged is not None:
                    self.line(f"{x.staged.name}[{lane}] = {self.operand(x.value)};")
                else:
                    self.statement(x)

    # --- accumulators ---

    def visit_Start(self, s: ir.Start) -> None:
        a = s.accumulator
        if a.shifted:
            self.line(f"double {a.name}_shift = 0;")
            self.line(f"int64_t {a.name}_count = 0;")
        states = list(zip(a.dtypes, c_monoid_identity(_base(a.monoid), a.dtypes), strict=True))
        for k, (dtype, value) in enumerate(states[:2] if a.shifted else states):
            self.filled(dtype, f"{a.name}_{k}", a.lanes, value)
        if a.compensated:
            self.filled(a.dtypes[0], f"{a.name}_lost", a.lanes, "0")

    def filled(self, dtype: DType, name: str, lanes: int, value: str) -> None:
        """An array with a value for each lane."""
        self.array(dtype, name, lanes)
        self.line(f"for (int lane = 0; lane < {lanes}; ++lane) {name}[lane] = {value};")

    def parts(self, a: ir.Accumulator, lane: str) -> list[str]:
        return [f"{a.name}_{k}[{lane}]" for k in range(len(a.dtypes))]

    def visit_Accumulate(self, s: ir.Accumulate, strip: ir.Loop | None = None, whole: bool = False) -> None:
        """One element into a lane; in whole tiles of a strip, long sums go to the block's own part first."""
        a, lane = s.accumulator, self.poly(s.lane)
        values = [self.operand(v) for v in s.inputs]
        if a.compensated:
            part = f"{a.name}_part[{lane}]"
            short = whole and strip is not None and _by_lane(s, strip)
            self.line(f"{part} = {part} + {values[0]};" if short else self.lossless(a, lane, values[0]))
            return
        base, held = _base(a.monoid), self.parts(a, lane)
        if a.shifted:
            self.line(f"op_moments(&{held[0]}, &{held[1]}, {values[0]} - {a.name}_shift);")
        elif base != a.monoid:
            self.line(c_combine(base, held, values, a.dtypes))
        else:
            self.line(c_accumulate(base, held, values, a.dtypes, self.reciprocal(s)))

    def visit_Advance(self, s: ir.Advance) -> None:
        a = s.accumulator
        assert a is not None
        held = self.parts(a, self.poly(s.lane))
        self.line(c_accumulate(a.monoid, held, [self.operand(v) for v in s.inputs], a.dtypes))
        for var, text in zip(s.parts, held, strict=True):
            self.define(var, text)

    def reciprocal(self, s: ir.Accumulate) -> str | None:
        """1 / (count + 1) of a Welford state, where the position says it."""
        if s.accumulator.monoid != "welford" or s.rounds is None:
            return None
        return f"(1 / ({c_type(s.accumulator.dtypes[0])}){self.poly(s.rounds + 1)})"

    def shift(self, first: ir.FirstElement, strip: ir.Loop) -> None:
        """The first element becomes the origin of the sums of a shifted state."""
        assert strip.lane is not None
        a, name, lane = first.accumulator, strip.axis.name, strip.lane.name
        with self.braces(f"if ({a.name}_count == 0 && {name}_end > 0)"):
            self.block(strip.prologue)
            self.line(f"const int64_t {lane} = 0, {name} = 0;")
            self.block(first.body)
            self.line(f"{a.name}_shift = {self.operand(first.value)};")
        self.line(f"if ({name}_end > 0) {a.name}_count += {name}_end;")

    def lossless(self, a: ir.Accumulator, lane: str, value: str) -> str:
        return f"op_add_lossless_{suffix(a.dtypes[0])}(&{a.name}_0[{lane}], &{a.name}_lost[{lane}], {value});"

    def total(self, a: ir.Accumulator, part: int, lane: str) -> str:
        """One lane's part, what its additions lost given back."""
        text = f"{a.name}_{part}[{lane}]"
        return f"op_give_back_{suffix(a.dtypes[0])}({text}, {a.name}_lost[{lane}])" if a.compensated else text

    def visit_Finish(self, s: ir.Finish) -> None:
        a = s.accumulator
        if s.lane is not None or a.lanes == 1:
            lane = "0" if s.lane is None else self.poly(s.lane)
            for k, var in enumerate(s.parts):
                self.define(var, self.total(a, k, lane))
            return
        if a.shifted:
            self.fold("sum", [v.name for v in s.parts[:2]], a, a.dtypes[:1])
            sums = [f"{v.name}_lanes[0]" for v in s.parts[:2]]
            mean, m2, count = s.parts
            self.define(count, f"(double){a.name}_count")
            self.define(mean, f"op_moments_mean({a.name}_shift, {sums[0]}, {count.name})")
            self.define(m2, f"op_moments_m2({', '.join(sums)}, {count.name})")
            return
        self.fold(_base(a.monoid), [v.name for v in s.parts], a, a.dtypes)
        for var in s.parts:
            self.define(var, f"{var.name}_lanes[0]")

    def fold(self, monoid: str, names: list[str], a: ir.Accumulator, dtypes: tuple[DType, ...]) -> None:
        """All lanes into the first of the arrays `<name>_lanes`, in halves: a state of all names, or one each."""
        for k, (name, dtype) in enumerate(zip(names, a.dtypes, strict=False)):
            self.filled(dtype, f"{name}_lanes", a.lanes, self.total(a, k, "lane"))
        self.line(f"for (int half = {a.lanes // 2}; half > 0; half /= 2)")
        self.line("  for (int lane = 0; lane < half; ++lane) {")
        states = [names] if len(dtypes) == len(names) else [[n] for n in names]
        for state in states:
            merge = [[f"{n}_lanes[{at}]" for n in state] for at in ("lane", "lane + half")]
            self.line(f"    {c_combine(monoid, merge[0], merge[1], dtypes)}")
        self.line("  }")

    def visit_Barrier(self, _: ir.Barrier) -> None:
        """A program is one thread."""

    def visit_Rescale(self, s: ir.Rescale) -> None:
        a, factor = s.accumulator, self.operand(s.factor)
        for text in (f"{a.name}_0[lane]", *([f"{a.name}_lost[lane]"] if a.compensated else [])):
            self.line(f"for (int lane = 0; lane < {a.lanes}; ++lane) {text} = {factor} == 0 ? 0 : {text} * {factor};")


def _held(dtype: DType) -> str:
    """The type of a value outside memory: a bool is an int, since gcc gives up on masks held in bytes."""
    return "int32_t" if dtype is DType.BOOL else c_type(dtype)


def _by_lane(s: ir.Accumulate, strip: ir.Loop) -> bool:
    """Whether the strip's lanes are the accumulator's; else each position of the loop has a state of its own."""
    return strip.lane is not None and strip.lane in s.lane.axes


def _base(monoid: str) -> str:
    return monoid.removesuffix("_merge")
