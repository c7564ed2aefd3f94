"""`emit_c`: a Kernel as C with OpenMP and SIMD, one statement at a time.

Tiles are simd loops; strips are a main loop of whole tiles plus a scalar tail; accumulators are lane
arrays. The entry returns a status (see prelude.h). Names are positional, so two kernels that do the
same have the same text, and no name of the user's appears outside the header comment.
"""

from __future__ import annotations

import hashlib

from ..ir.dtypes import DType
from ..ir.expr import Const
from ..ir.kernel import (
    Accumulate,
    Accumulator,
    Bind,
    FillRandom,
    Finish,
    FirstElement,
    Kernel,
    Let,
    LoadElement,
    Loop,
    Operand,
    RandomWord,
    ReadLocal,
    Rescale,
    Start,
    Statement,
    StoreElement,
    Var,
    When,
    WriteLocal,
    walk,
)
from ..ir.poly import Poly, Quotient, Remainder, Symbol, nonnegative, product
from ..ir.source import KernelSource
from .c_ops import c_accumulate, c_combine, c_const, c_monoid_identity, c_pointwise, c_type, raises
from .emitter import Emitter, bare, header, operand_dtype


def emit_c(kernel: Kernel) -> KernelSource:
    """The C translation unit of one kernel."""
    text = _Emitter(kernel).unit()
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    heading = header(kernel, "//")
    return KernelSource(
        kernel.name, "c", heading + text, kernel.entry, key, len(kernel.parameters), len(kernel.symbols), kernel.raises
    )


class _Emitter(Emitter):
    # --- the unit ---

    def unit(self) -> str:
        """Everything but the header comment."""
        constant = {b: "" if b in self.kernel.writes else "const " for b in self.pointers}
        parameters = [f"{constant[b]}{c_type(b.dtype)} *{n}" for b, n in self.pointers.items()]
        sizes = [f"int64_t {n}" for n in self.sizes.values()]
        stores = [x for x in walk(self.kernel.body) if isinstance(x, StoreElement) and x.staged is not None]
        streamed = list(dict.fromkeys(self.pointers[x.buffer] for x in stores))
        flags = [f"int {name}_touched" for name in streamed]
        arguments = ", ".join((*self.pointers.values(), *self.sizes.values(), *(f"{n}_touched" for n in streamed)))
        self.line('#include "prelude.h"\n')
        taken = ", ".join((*parameters, *sizes, *flags, "int64_t first", "int64_t last"))
        self.line(f"static int programs({taken}) {{")
        self.depth += 1
        self.line("int status = 0;")
        self.line("for (int64_t program = first; program < last; ++program) {")
        self.depth += 1
        self.grid()
        for local in self.kernel.locals:
            self.line(f"{_held(local.dtype)} {local.name}[{self.size(local.size)}] __attribute__((aligned(64)));")
        self.block(self.kernel.body)
        self.depth -= 1
        self.line("}")
        if streamed:
            self.line("op_stream_end();")
        self.line("return status;")
        self.depth -= 1
        self.line("}\n")
        self.entry(parameters, sizes, streamed, arguments)
        return "\n".join(self.lines) + "\n"

    def size(self, value: int | Poly) -> str:
        return str(value) if isinstance(value, int) else self.poly(value)

    def grid(self) -> None:
        """The program number becomes one position per grid axis, the last one fastest."""
        left = "program"
        axes = self.kernel.grid
        for k in range(len(axes) - 1, -1, -1):
            name = axes[k].axis.name
            if k == 0:
                self.line(f"const int64_t {name} = {left};")
                continue
            extent = self.divisor(axes[k].extent)
            self.line(f"const int64_t {name} = {left} % {extent}, rest{k} = {left} / {extent};")
            left = f"rest{k}"

    def entry(self, parameters: list[str], sizes: list[str], streamed: list[str], arguments: str) -> None:
        count = self.poly(product(g.extent for g in self.kernel.grid))
        work = self.poly(self.kernel.work)
        self.line(f"int {self.kernel.entry}({', '.join((*parameters, *sizes, 'int64_t threads'))}) {{")
        self.depth += 1
        self.line(f"const int64_t count = {count};")
        self.line(f"if ({work} <= 0) return 0;")
        for name in streamed:
            self.line(f"const int {name}_touched = op_touched({name});")
        self.line("if (threads > count) threads = count;")
        self.line(f"if (threads <= 1 || {work} < {self.kernel.team_work}) return programs({arguments}, 0, count);")
        self.line("int status = 0;")
        self.line("#pragma omp parallel num_threads(threads) reduction(| : status)")
        self.line("{")
        self.line("  const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();")
        self.line(f"  status |= programs({arguments}, count * me / team, count * (me + 1) / team);")
        self.line("}")
        self.line("return status;")
        self.depth -= 1
        self.line("}")

    # --- text ---

    def number(self, value: int) -> str:
        return f"{value}LL" if value > 0x7FFFFFFF else str(value)

    def division(self, atom: Quotient | Remainder) -> str:
        a, b = self.poly(atom.numerator), self.divisor(atom.denominator)
        quotient = isinstance(atom, Quotient)
        if nonnegative(atom.numerator):
            return f"({a} {'/' if quotient else '%'} {b})"
        return f"op_index_{'floordiv' if quotient else 'remainder'}({a}, {b})"

    def operand(self, value: Operand) -> str:
        match value:
            case Var():
                return value.name
            case Const():
                return c_const(value)
        return self.poly(value)

    # --- statements ---

    def statement(self, s: Statement) -> None:
        match s:
            case Let():
                dtypes = [operand_dtype(a) for a in s.args]
                self.define(s.var, c_pointwise(s.op, [self.operand(a) for a in s.args], dtypes, s.var.dtype))
            case LoadElement():
                text = f"{self.pointers[s.buffer]}[{self.poly(s.offset)}]"
                self.define(s.var, text if s.guard is None else f"{self.operand(s.guard)} ? {text} : 0")
            case StoreElement():
                store = f"{self.pointers[s.buffer]}[{self.poly(s.offset)}] = {self.operand(s.value)};"
                self.line(store if s.guard is None else f"if ({self.operand(s.guard)}) {store}")
            case RandomWord():
                self.define(
                    s.var, f"op_random((uint64_t){self.operand(s.seed)}, {s.stream}u, (uint64_t){self.poly(s.index)})"
                )
            case FillRandom():
                first = f"(uint64_t){self.poly(s.first)}"
                count = self.size(s.local.size)
                seed = f"(uint64_t){self.operand(s.seed)}"
                self.line(f"op_random_fill({seed}, {s.stream}u, {first}, {s.local.name}, {count});")
            case ReadLocal():
                self.define(s.var, f"{s.local.name}[{self.poly(s.index)}]")
            case WriteLocal():
                self.line(f"{s.local.name}[{self.poly(s.index)}] = {self.operand(s.value)};")
            case Start():
                self.start(s.accumulator)
            case Accumulate():
                self.accumulate(s)
            case Finish():
                self.finish(s)
            case Rescale():
                self.rescale(s)
            case Loop():
                self.loop(s)
            case Bind():
                self.line(f"const int64_t {s.axis.name} = {self.poly(s.value)};")
            case When():
                self.enclosed(f"if ({self.operand(s.condition)}) {{", s.body)

    def enclosed(self, opening: str, body: tuple[Statement, ...]) -> None:
        """A block in braces."""
        self.line(opening)
        self.nested(body)
        self.line("}")

    def define(self, var: Var, text: str) -> None:
        self.line(f"const {_held(var.dtype)} {var.name} = {bare(text)};")

    def loop(self, s: Loop) -> None:
        stop = self.poly(s.extent)
        if s.limit is not None:
            stop = f"op_index_min({stop}, {self.poly(s.limit)})"
        name = s.axis.name
        match s.kind:
            case "strip":
                self.strip(s, stop)
            case "tile":
                self.simd(s)
                self.enclosed(f"for (int64_t {name} = 0; {name} < {stop}; ++{name}) {{", s.body)
            case _:
                end = f"{name}_stop"
                self.enclosed(f"for (int64_t {name} = 0, {end} = {stop}; {name} < {end}; ++{name}) {{", s.body)

    def simd(self, s: Loop) -> None:
        if not s.ordered:
            failing = any(isinstance(x, Let) and raises(x.op, operand_dtype(x.args[0])) for x in walk(s.body))
            self.line("#pragma omp simd reduction(| : status)" if failing else "#pragma omp simd")

    def strip(self, s: Loop, stop: str) -> None:
        """Whole tiles of lanes, then a scalar tail over the first lanes."""
        name, lanes = s.axis.name, s.lanes
        assert s.lane is not None
        lane, at, end = s.lane.name, f"{name}_at", f"{name}_end"
        long_sums = [
            x.accumulator for x in s.body if isinstance(x, Accumulate) and x.accumulator.compensated and _by_lane(x, s)
        ]
        self.line("{")
        self.depth += 1
        self.line(f"int64_t {at} = 0;")
        self.line(f"const int64_t {end} = {stop};")
        for first in s.origins:
            self.shift(first, s)
        if long_sums:
            self.line(f"while ({at} + {lanes} <= {end}) {{")
            self.depth += 1
            self.line(f"const int64_t {name}_block = op_index_min({end}, {at} + {long_sums[0].compensated * lanes});")
            for a in long_sums:
                self.line(f"{_held(a.dtypes[0])} {a.name}_part[{lanes}] __attribute__((aligned(64))) = {{0}};")
            self.tiles(s, f"{name}_block")
            self.line(f"for (int lane = 0; lane < {lanes}; ++lane) {{")
            for a in long_sums:
                self.line("  " + self.lossless(a, "lane", f"{a.name}_part[lane]"))
            self.line("}")
            self.depth -= 1
            self.line("}")
        else:
            self.tiles(s, end)
        if s.prologue:
            self.enclosed(f"if ({at} < {end}) {{", s.prologue)
        self.line(f"for (int64_t {lane} = 0; {at} + {lane} < {end}; ++{lane}) {{")
        self.lanes(s, whole=False)
        self.line("}")
        self.depth -= 1
        self.line("}")

    def tiles(self, s: Loop, stop: str) -> None:
        """The loop over whole tiles of a strip."""
        assert s.lane is not None
        lane, at = s.lane.name, f"{s.axis.name}_at"
        self.line(f"for (; {at} + {s.lanes} <= {stop}; {at} += {s.lanes}) {{")
        self.depth += 1
        self.block(s.prologue)
        self.simd(s)
        self.line(f"for (int64_t {lane} = 0; {lane} < {s.lanes}; ++{lane}) {{")
        self.lanes(s, whole=True)
        self.line("}")
        start = {s.axis: Symbol(at).poly()}
        for store in s.body:
            if isinstance(store, StoreElement) and store.staged is not None:
                place = f"{self.pointers[store.buffer]} + {self.poly(store.offset.substitute(start))}"
                size, touched = s.lanes * store.buffer.dtype.bytes, f"{self.pointers[store.buffer]}_touched"
                self.line(f"op_stream({place}, {store.staged.name}, {size}, {touched});")
        self.depth -= 1
        self.line("}")

    def lanes(self, s: Loop, whole: bool) -> None:
        """The body of a strip at one lane: of a whole tile, or of the tail."""
        assert s.lane is not None
        self.depth += 1
        self.line(f"const int64_t {s.axis.name} = {s.axis.name}_at + {s.lane.name};")
        for x in s.body:
            if isinstance(x, Accumulate):
                self.accumulate(x, s, whole)
            elif whole and isinstance(x, StoreElement) and x.staged is not None:
                self.line(f"{x.staged.name}[{s.lane.name}] = {self.operand(x.value)};")
            else:
                self.statement(x)
        self.depth -= 1

    # --- accumulators ---

    def start(self, a: Accumulator) -> None:
        if a.shifted:
            self.line(f"double {a.name}_shift = 0;")
            self.line(f"int64_t {a.name}_count = 0;")
        states = list(zip(a.dtypes, c_monoid_identity(_base(a.monoid), a.dtypes), strict=True))
        for k, (dtype, value) in enumerate(states[:2] if a.shifted else states):
            self.line(f"{_held(dtype)} {a.name}_{k}[{a.lanes}] __attribute__((aligned(64)));")
            self.line(f"for (int lane = 0; lane < {a.lanes}; ++lane) {a.name}_{k}[lane] = {value};")
        if a.compensated:
            self.line(f"{_held(a.dtypes[0])} {a.name}_lost[{a.lanes}] __attribute__((aligned(64)));")
            self.line(f"for (int lane = 0; lane < {a.lanes}; ++lane) {a.name}_lost[lane] = 0;")

    def parts(self, a: Accumulator, lane: str) -> list[str]:
        return [f"{a.name}_{k}[{lane}]" for k in range(len(a.dtypes))]

    def accumulate(self, s: Accumulate, strip: Loop | None = None, whole: bool = False) -> None:
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
            return
        if base != a.monoid:
            statements = c_combine(base, held, values, a.dtypes)
        else:
            statements = c_accumulate(base, held, values, a.dtypes, self.reciprocal(s))
        for text in statements:
            self.line(text)

    def reciprocal(self, s: Accumulate) -> str | None:
        """1 / (count + 1) of a Welford state, where the position says it."""
        if s.accumulator.monoid != "welford" or s.rounds is None:
            return None
        return f"(1 / ({c_type(s.accumulator.dtypes[0])}){self.poly(s.rounds + 1)})"

    def shift(self, first: FirstElement, strip: Loop) -> None:
        """The first element becomes the origin of the sums of a shifted state."""
        assert strip.lane is not None
        a, name, lane = first.accumulator, strip.axis.name, strip.lane.name
        self.line(f"if ({a.name}_count == 0 && {name}_end > 0) {{")
        self.nested(strip.prologue)
        self.depth += 1
        self.line(f"const int64_t {lane} = 0, {name} = 0;")
        self.block(first.body)
        self.line(f"{a.name}_shift = {self.operand(first.value)};")
        self.depth -= 1
        self.line("}")
        self.line(f"if ({name}_end > 0) {a.name}_count += {name}_end;")

    def lossless(self, a: Accumulator, lane: str, value: str) -> str:
        suffix = "f32" if a.dtypes[0] is DType.F32 else "f64"
        return f"op_add_lossless_{suffix}(&{a.name}_0[{lane}], &{a.name}_lost[{lane}], {value});"

    def total(self, a: Accumulator, part: int, lane: str) -> str:
        """One lane's part, what its additions lost given back."""
        text = f"{a.name}_{part}[{lane}]"
        if not a.compensated:
            return text
        suffix = "f32" if a.dtypes[0] is DType.F32 else "f64"
        return f"op_give_back_{suffix}({text}, {a.name}_lost[{lane}])"

    def finish(self, s: Finish) -> None:
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

    def fold(self, monoid: str, names: list[str], a: Accumulator, dtypes: tuple[DType, ...]) -> None:
        """All lanes into the first of the arrays `<name>_lanes`, in halves: a state of all names, or one each."""
        for k, (name, dtype) in enumerate(zip(names, a.dtypes, strict=False)):
            self.line(f"{_held(dtype)} {name}_lanes[{a.lanes}] __attribute__((aligned(64)));")
            self.line(f"for (int lane = 0; lane < {a.lanes}; ++lane) {name}_lanes[lane] = {self.total(a, k, 'lane')};")
        self.line(f"for (int half = {a.lanes // 2}; half > 0; half /= 2)")
        self.line("  for (int lane = 0; lane < half; ++lane) {")
        states = [names] if len(dtypes) == len(names) else [[n] for n in names]
        for state in states:
            merge = [[f"{n}_lanes[{at}]" for n in state] for at in ("lane", "lane + half")]
            for text in c_combine(monoid, merge[0], merge[1], dtypes):
                self.line(f"    {text}")
        self.line("  }")

    def rescale(self, s: Rescale) -> None:
        a, factor = s.accumulator, self.operand(s.factor)
        held = [f"{a.name}_0[lane]"] + ([f"{a.name}_lost[lane]"] if a.compensated else [])
        for text in held:
            self.line(f"for (int lane = 0; lane < {a.lanes}; ++lane) {text} = {factor} == 0 ? 0 : {text} * {factor};")


def _held(dtype: DType) -> str:
    """The type of a value outside memory: a bool is an int, since gcc gives up on masks held in bytes."""
    return "int32_t" if dtype is DType.BOOL else c_type(dtype)


def _by_lane(s: Accumulate, strip: Loop) -> bool:
    """Whether the strip's lanes are the accumulator's; else each position of the loop has a state of its own."""
    return strip.lane is not None and strip.lane in s.lane.axes


def _base(monoid: str) -> str:
    return monoid.removesuffix("_merge")
