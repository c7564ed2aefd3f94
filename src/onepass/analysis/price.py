"""The predicted time of a built kernel on a target.

In: the built `Kernel`, so the price is that of the kernel that runs. The statements are walked once, each with the
number of times it is executed and the lanes it is executed for; lanes beyond the end of an axis idle but take their
time. Out: a `Time`, one number for each limit a kernel may meet. Rates come from the target's table.

On GPUs the planner uses the price of every kernel, with and without matrix products. On CPUs `planner/cost.py` decides,
and the price adds cache lines that are not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..ir import kernel as ir
from ..ir.monoids import MONOIDS
from ..ir.ops import CASTS, OPS
from ..ir.poly import Atom, Axis, Poly, Quotient, Remainder, Symbol
from ..ir.program import Buffer
from ..ir.target import Target
from ..ir.time import LIMITS, Time
from .access import RANDOM_COST, SCAN_STEPS, assumed_size, estimate, storage_bytes
from .contraction import LEAST_TILE

SECTOR, LINE = 32, 64  # bytes that memory hands out at once: to a GPU, to a core
SAMPLES = 8  # positions of an axis that stand for all
RARE = 0.05  # of the programs, those that enter a guarded block
NEAR_BYTES = 64 << 10  # a buffer of this size stays with each processor
MATRIX_ROWS, MATRIX_COLUMNS, MATRIX_DEPTH = 64, 128, 64  # of a tile, and of a step, that keep the matrix unit busy
# Operations that the hardware of a GPU helps with, or hinders, in multiply-adds.
GPU_COSTS = {
    "exp": 6.0, "exp2": 4.0, "log": 7.0, "log2": 5.0, "sin": 40.0, "cos": 40.0, "tan": 60.0, "div": 6.0, "rsqrt": 4.0,
    "tanh": 6.0,
}  # fmt: skip
# The same on 64-bit numbers: two instructions for one, and a slow unit between integers and floats.
WIDE, CONVERTED = 2.0, 8.0
GPU_MONOIDS = {"argmax": 30.0, "argmin": 30.0, "welford": 12.0, "welford_merge": 16.0}


_Steps = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class _Traffic:
    """What all programs move of one buffer, in bytes. `places`: where accesses start -> the most that one asks for,
    the stretch of neighbours that it reads together, and the steps between stretches with how many there are."""

    places: dict[int, tuple[float, float, _Steps]] = field(default_factory=dict)
    touched: float = 0.0
    sectors: float = 0.0
    pass_bytes: float = 0.0  # of the lines that one pass of a loop over lanes touches, at most

    def add(self, start: int, asked: float, sectors: float, run: float, steps: _Steps, pass_bytes: float) -> None:
        self.pass_bytes = max(self.pass_bytes, pass_bytes)
        self.places[start] = max(self.places.get(start, (0.0, 0.0, ())), (asked, run, steps))
        self.touched += asked
        self.sectors += sectors


class _Program:
    """What one program of a grid does, by one walk over its statements."""

    def __init__(self, grid: Iterable[ir.GridAxis], target: Target, stages: int, threads: int) -> None:
        self.target, self.rates, self.stages, self.threads = target, target.rates, stages, threads
        self.extents: dict[Axis, int] = {g.axis: max(1, estimate(g.extent)) for g in grid}
        self.count = math.prod(self.extents.values())
        self.tiles: dict[Axis, tuple[int, float]] = {}  # open tile axis -> lanes, the part of them that counts
        self.axes: dict[str, frozenset[Axis]] = {}  # a value -> the tile axes it varies along
        self.operations = 0.0
        self.products = 0.0  # multiply-adds, at the rate of the library's matmuls
        self.copied: dict[str, Poly] = {}  # matrices that hardware copies to shared memory, and their offsets
        self.shared_bytes = self.loop_bytes = 0.0  # of the program; of the loop with most
        self.loops, self.ahead = 0, 1  # open around the current statement; loads in flight there
        self.folds = 0.0  # across threads
        self.clock = 0  # statements so far
        self.made: dict[str, tuple[int, float]] = {}  # a value -> when it was made, its registers of one thread
        self.used: dict[str, int] = {}  # when it was last used
        self.traffic: dict[Buffer, _Traffic] = {}

    # --- statements ---

    def block(self, body: tuple[ir.Statement, ...], times: float) -> float:
        """Walk a block that runs so many times; the microseconds of one pass through its steps in order."""
        opened = dict(self.tiles)
        waits = own = 0.0
        for s in body:
            self.clock += 1
            match s:
                case ir.Tile():
                    self.tiles[s.axis] = s.lanes, self._valid(s)
                case ir.Loop():
                    waits += self._loop(s, times)
                case ir.When():
                    waits += self.block(s.body, times * RARE) * RARE
                case ir.Stage():
                    waits += self.block(s.body, times)
                case ir.LoadElement() | ir.LoadTile():
                    own = max(own, self.rates.load_us * (2 if _indirect(s.offset) else 1))
                    self._load(s, times)
                case ir.StoreElement() | ir.StoreTile():
                    self._store(s, times)
                case ir.Fold() | ir.Finish():
                    waits += self._fold(s, times)
                case _:
                    waits += self._compute(s, times)
        self.tiles = opened
        return waits + own

    def _vector(self, s: ir.Loop, times: float) -> float:
        """A loop whose positions run as lanes, in a program that is one thread."""
        opened = dict(self.tiles)
        lanes = max(1, round(self._steps(s)))
        self.tiles[s.axis] = lanes, 1.0
        spent = self.block(s.body, times)
        self.tiles = opened
        return spent

    def _loop(self, s: ir.Loop, times: float) -> float:
        if s.kind != "sweep":
            return self._vector(s, times)
        steps, before = max(1.0, self._steps(s)), self.clock
        self.extents[s.axis] = max(1, math.ceil(steps))
        self.loops += 1
        self.ahead = s.ahead(self.stages)
        before_loop = self.shared_bytes
        loads = any(isinstance(x, ir.LoadElement | ir.LoadTile) for x in s.body)
        step = self.block(s.body, times * steps)
        self.loops -= 1
        if not self.loops:  # loops that follow each other use the same shared memory
            self.loop_bytes = max(self.loop_bytes, self.shared_bytes - before_loop)
            self.shared_bytes = before_loop
        for name, when in self.used.items():  # what comes from before the loop stays until it ends
            if when > before and self.made.get(name, (before,))[0] <= before:
                self.used[name] = self.clock
        if self.stages > 1 and loads:  # loads run ahead
            step = max(step - self.rates.load_us, step * self.rates.pipelined)
        return steps * step

    def _steps(self, s: ir.Loop) -> float:
        most = estimate(s.extent)
        if s.limit is not None:
            most = min(most, max(0, round(self._mean(s.limit, 0, most))))
        if not s.after and not s.before:
            return most
        if s.seldom:
            return 1
        positions = dict(self.extents)
        total = 0.0
        for k in range(SAMPLES):
            at: dict[Atom, int] = {a: int((k + 0.5) * n / SAMPLES) for a, n in positions.items()}
            low = max([0, *(self._value(p, at) for p in s.after if not self._is_data(p))])
            high = min([most, *(self._value(p, at) for p in s.before if not self._is_data(p))])
            total += max(0, high - low)
        return total / SAMPLES * s.part - s.beside

    def _compute(self, s: ir.Statement, times: float) -> float:
        match s:
            case ir.Let():
                axes, cost = self._of(s.args), _cost(s.op) * (_width(s) if self.target.warp else 1.0)
                self._define(s.var, axes)
            case ir.RandomWord():
                axes, cost = self._of([s.index]), RANDOM_COST
                self._define(s.var, axes)
            case ir.Start():
                self._keep(s.accumulator)
                return 0.0
            case ir.Accumulate():
                monoid = s.accumulator.monoid
                axes = self._of(s.inputs) | self._open(s.accumulator.tiles)
                cost = GPU_MONOIDS.get(monoid, MONOIDS[monoid].cost)
                self.used[s.accumulator.name] = self.clock
            case ir.Rescale():
                axes, cost = self._open(s.accumulator.tiles) | self._of([s.factor]), 1.0
            case ir.Contract():
                return self._contract(s, times)
            case ir.Advance():
                return self._advance(s, times)
            case _:
                return 0.0
        return self._operate(axes, cost, times)

    def _advance(self, s: ir.Advance, times: float) -> float:
        """A scan: its own elements one after another in each thread, then threads, then all with what came before."""
        a = s.accumulator
        axes = self._of(s.inputs) | (self._open(a.tiles) if a is not None else frozenset())
        if s.along is not None:
            axes |= {s.along}
        for v in s.parts:
            self._define(v, axes)
        if a is not None:
            self.used[a.name] = self.clock
        cost = GPU_MONOIDS.get(s.monoid, MONOIDS[s.monoid].cost)
        if s.along is None:
            return self._operate(axes, cost, times)
        self.folds += 2 * times
        return self._operate(axes, SCAN_STEPS * cost, times) + 2 * self.rates.fold_us * len(s.parts)

    def _contract(self, s: ir.Contract, times: float) -> float:
        left, right = (self._of([side]) for side in (s.left, s.right))
        self._define(s.var, (left | right) - set(s.summed))
        rows, columns = (self._lanes(side - set(s.summed)) for side in (left, right))
        rate = self.rates.matrix * min(1.0, rows / MATRIX_ROWS)
        rate *= self.rates.narrow + (1.0 - self.rates.narrow) * min(
            1.0, (columns - LEAST_TILE) / (MATRIX_COLUMNS - LEAST_TILE)
        )
        copied = [self._as_it_is(side, s) for side in (s.left, s.right)]
        rate *= 1.0 if all(copied) else self.rates.computed
        rate *= self.rates.nested if s.accumulator is None else self.rates.one_ahead if self.stages <= 2 else 1.0
        depth = self._lanes(left & set(s.summed))
        rate *= (1.0 + self.rates.starting_depth / MATRIX_DEPTH) * depth / (depth + self.rates.starting_depth)
        if s.operands.bytes == 4:
            rate *= 0.5 if s.precision == "tf32" else self.rates.exact
        elif s.operands.bytes == 1:
            rate *= 2.0
        self.products += times * self._lanes((left | right) - set(s.summed[1:])) / rate
        if not copied[1]:  # the second matrix is always in shared memory
            self.shared_bytes += self._lanes(right) * s.operands.bytes
        return 0.0

    def _as_it_is(self, side: ir.Operand, s: ir.Contract) -> bool:
        """Whether a matrix goes from memory to the matrix unit by hardware; bytes do along the sum only."""
        offset = self.copied.get(side.name) if isinstance(side, ir.Var) else None
        if offset is None or s.operands.bytes > 1:
            return offset is not None
        return any(offset.coefficient(a) is Poly.ONE for a in s.summed)

    def _define(self, var: ir.Var, axes: frozenset[Axis]) -> None:
        self.axes[var.name] = axes
        words = max(1.0, var.dtype.bytes / 4) if var.dtype.is_float else var.dtype.bytes / 4
        self.made[var.name] = self.clock, words * max(1.0, self._lanes(axes) / self.threads)

    def _keep(self, accumulator: ir.Accumulator) -> None:
        words = sum(max(1.0, d.bytes / 4) for d in accumulator.dtypes)
        states = max(1.0, self._lanes(self._open(accumulator.tiles)) / self.threads)
        self.made[accumulator.name] = self.clock, words * states

    @property
    def live(self) -> float:
        """Registers of a thread that values alive at once fill, at most."""
        changes: dict[int, float] = {}
        for name, (made, size) in self.made.items():
            if (used := self.used.get(name, made)) > made:
                changes[made] = changes.get(made, 0.0) + size
                changes[used] = changes.get(used, 0.0) - size
        alive = most = 0.0
        for when in sorted(changes):
            alive += changes[when]
            most = max(most, alive)
        return most

    def _operate(self, axes: frozenset[Axis], cost: float, times: float) -> float:
        lanes = self._lanes(axes)
        self.operations += times * cost * max(lanes, self.threads if axes else 32)
        return cost * self.rates.issue_us * max(1.0, lanes / self.threads)

    def _fold(self, s: ir.Fold | ir.Finish, times: float) -> float:
        if isinstance(s, ir.Fold):
            axes, over, monoid = self._of(s.inputs), frozenset(s.over), s.monoid
        else:
            over, monoid = self._open(s.accumulator.folded), s.accumulator.monoid
            axes = self._open(s.accumulator.tiles)
        for v in s.parts:
            self._define(v, axes - over)
        if isinstance(s, ir.Finish):
            self.used[s.accumulator.name] = self.clock
        if not over:
            return 0.0
        cost = GPU_MONOIDS.get(monoid, MONOIDS[monoid].cost)
        spent = self._operate(axes, cost, times)
        self.folds += times
        return spent + self.rates.fold_us * len(s.parts)

    # --- memory ---

    def _load(self, s: ir.LoadElement | ir.LoadTile, times: float) -> None:
        axes = self._of([s.offset])
        self._define(s.var, axes)
        if isinstance(s, ir.LoadTile):
            self.copied[s.var.name] = s.offset
        if (self.loops and self.stages > 1) or isinstance(s, ir.LoadTile):
            ahead = self.ahead if self.loops else 1
            self.shared_bytes += self._lanes(axes) * s.buffer.dtype.bytes * ahead
        self._move(s.buffer, s.offset, axes, times)

    def _store(self, s: ir.StoreElement | ir.StoreTile, times: float) -> None:
        self._move(s.buffer, s.offset, self._of([s.offset, s.value]), times)

    def _move(self, buffer: Buffer, offset: Poly, axes: frozenset[Axis], times: float) -> None:
        width = buffer.dtype.bytes
        lanes, run, part, steps = self._distinct(offset, axes, width)
        asked = self.count * times * lanes * width
        run *= width
        if self.target.warp:
            digits = sum(isinstance(a, Quotient | Remainder) and bool(a.numerator.axes & axes) for a in offset.atoms())
            cost = (
                self.rates.access_cost * width / self._vector_bytes(offset, axes, width)
                + self.rates.digit_cost * digits
            )
            self.operations += times * cost * self._lanes(axes)
        line = SECTOR if self.target.warp else LINE
        inflated = (1.0 if run >= 4 * line else (math.ceil(run / line) * line) / run) / part
        start = sum(c for m, c in offset.terms if not m)
        self.traffic.setdefault(buffer, _Traffic()).add(
            start, asked, asked * inflated, run, steps, lanes * width * inflated
        )

    def _vector_bytes(self, offset: Poly, axes: frozenset[Axis], width: int) -> int:
        """Bytes that one instruction of a thread accesses: rows that begin anywhere are accessed one by one."""
        along = next((a for a in axes if offset.coefficient(a) is Poly.ONE), None)
        if along is None:
            return width
        apart = math.gcd(self.target.vector_bytes, *(c * width for m, c in offset.terms if along not in m))
        return max(width, apart)

    def _distinct(self, offset: Poly, axes: frozenset[Axis], width: int) -> tuple[float, float, float, _Steps]:
        """Elements that one execution accesses, how far a run of them reaches in memory, the part of it that they are,
        and the steps from one run to the next.

        On a GPU a run has no gap that memory would not hand out all the same.
        """
        at: dict[Atom, int] = dict.fromkeys(offset.axes, 0)
        first, steps, total = self._value(offset, at), [], 1.0
        for a in axes:
            lanes = self.tiles[a][0] * self.tiles[a][1]
            if a in offset.axes:
                step = abs(self._value(offset, {**at, a: 1}) - first)
                far = abs(self._value(offset, {**at, a: self.tiles[a][0] - 1}) - first)
                lanes = lanes if step else min(lanes, far + 1.0)
                steps.append((step, lanes))
            total *= lanes
        run, part, apart = 1.0, 1.0, []
        for step, lanes in sorted(steps):
            if 0 < step <= max(run, SECTOR // 2 // width if self.target.warp else 0):
                part *= min(1.0, run / step)
                run = max(run, step * lanes)
            elif step:
                apart.append((step * width, lanes))
        return total, run, part, tuple(apart)

    # --- sizes ---

    def _of(self, operands: Iterable[ir.Operand]) -> frozenset[Axis]:
        """The open tile axes along which operands vary."""
        found: set[Axis] = set()
        for o in operands:
            if isinstance(o, ir.Var):
                self.used[o.name] = self.clock
                found |= self.axes.get(o.name, frozenset())
            elif isinstance(o, Poly):
                found |= {a for a in o.axes if a in self.tiles}
                for symbol in o.symbols():
                    self.used[symbol.name] = self.clock
                    found |= self.axes.get(symbol.name, frozenset())
        return frozenset(a for a in found if a in self.tiles)

    def _open(self, axes: Iterable[Axis]) -> frozenset[Axis]:
        return frozenset(a for a in axes if a in self.tiles)

    def _lanes(self, axes: Iterable[Axis]) -> float:
        return math.prod((self.tiles[a][0] for a in axes), start=1.0)

    def _valid(self, tile: ir.Tile) -> float:
        """The part of a tile's lanes that counts, in the mean."""
        part = 1.0
        for limit in tile.limits:
            part = min(part, self._mean(limit, 0, tile.lanes) / tile.lanes)
        return max(part, 1.0 / tile.lanes)

    def _mean(self, poly: Poly, low: int, high: int) -> float:
        """A number between two bounds, in the mean over the positions of the axes it depends on."""
        axes = [a for a in poly.axes if a in self.extents]
        if not axes:
            return min(high, max(low, self._value(poly, {})))
        longest = max(axes, key=lambda a: self.extents[a])
        n = self.extents[longest]
        base: dict[Atom, int] = dict.fromkeys(poly.axes, 0)
        last = min(high, max(low, self._value(poly, {**base, longest: n - 1})))
        if n == 1:
            return last
        others = [int((k + 0.5) * (n - 1) / SAMPLES) for k in range(min(SAMPLES, n - 1))]
        rest = [min(high, max(low, self._value(poly, {**base, longest: k}))) for k in others]
        return (last + (n - 1) * sum(rest) / len(rest)) / n

    def _is_data(self, bound: Poly) -> bool:
        """Whether a bound of a loop is a value of the kernel: nothing is known of it."""
        return any(s.name in self.axes for s in bound.symbols())

    def _value(self, poly: Poly, at: dict[Atom, int]) -> int:
        known: dict[Atom, int] = {**dict.fromkeys(poly.axes, 0), **at}
        for s in poly.symbols():
            known[s] = 0 if s.name in self.axes else assumed_size(s)
        return poly.evaluate(known)


def price(kernel: ir.Kernel, target: Target) -> Time:
    """The predicted time of one launch."""
    if not target.warp:
        return _wasted(kernel, target)
    shares = [(s.grid, s.body) for s in kernel.body if isinstance(s, ir.Share)]
    threads = max(1, kernel.warps) * target.warp
    times = []
    for grid, body in shares or [(kernel.grid, kernel.body)]:
        program = _Program(grid, target, kernel.stages, threads)
        waits = program.block(body, 1.0)
        times.append(_time(kernel, program, waits, target))
    return times[0] if len(times) == 1 else _side_by_side(times)


def price_together(kernels: Sequence[ir.Kernel], target: Target) -> Time:
    """The predicted time of kernels without products that share a launch: its programs have the chip together.

    Programs start in order, so kernels that fill the chip alone follow each other.
    """
    if len(kernels) == 1:
        return price(kernels[0], target)
    walked: dict[ir.Kernel, tuple[_Program, float]] = {}
    warps = max(k.warps for k in kernels)
    for k in kernels:
        if (k.like or k) not in walked:
            program = _Program(k.grid, target, k.stages, max(1, warps) * target.warp)
            walked[k.like or k] = program, program.block(k.body, 1.0)
    each = [walked[k.like or k] for k in kernels]
    count = sum(p.count for p, _ in each)
    resident = min(_resident(k, p, target) for k, (p, _) in zip(kernels, each, strict=True))
    wide = [replace(k, warps=warps) for k in kernels]
    times = [_time(k, p, waits, target, (count, resident)) for k, (p, waits) in zip(wide, each, strict=True)]
    longest = max(waits for _, waits in each)  # nothing ends before its own steps are done
    filling = [t for t in times if t.programs >= target.processors * resident]
    whole = _side_by_side([t for t in times if t not in filling] or [Time(launch_us=target.launch_us)])
    limits = {name: getattr(whole, name) for name in LIMITS} | {"serial_us": max(whole.serial_us, longest)}
    most = max(limits, key=limits.__getitem__)
    limits[most] += sum(t.total_us - t.launch_us for t in filling)
    return replace(whole, **limits, programs=count, resident=resident, rates=target.rates)


def _time(kernel: ir.Kernel, p: _Program, waits: float, target: Target, company: tuple[int, int] | None = None) -> Time:
    """`company`: the programs of all kernels of the launch, and how many of them a processor holds."""
    count, resident = company or (p.count, _resident(kernel, p, target))
    places = target.processors * resident
    rounds = p.count / places
    if rounds <= 8 and company is None:
        rounds = math.ceil(rounds)
    each = count / target.processors  # programs of a processor; the one that has most of them is done last
    work = math.ceil(each) * target.processors * p.count / count
    warps = min(resident, max(1.0, each)) * kernel.warps
    operations = p.operations + (target.rates.fold_cost * p.folds if p.products else 0.0)
    memory, cache = _memory(p, min(1.0, target.rates.own_share * each), places, target)
    if not p.products:
        memory, cache = max(memory, cache) + target.rates.cache_adds * min(memory, cache), 0.0
    return Time(
        memory_us=memory,
        cache_us=target.rates.copied_cache * cache,
        scalar_us=work * operations / (target.operations_per_us * min(1.0, warps / target.rates.busy_warps)),
        matrix_us=work * p.products / target.products_per_us if p.products else 0.0,
        serial_us=rounds * waits,
        start_us=target.rates.start_us * p.count / target.processors,
        launch_us=target.launch_us,
        programs=p.count,
        resident=resident,
        at_once=min(float(resident), each) * (target.rates.staying if kernel.resident else 1.0),
        rates=target.rates,
    )


def _resident(kernel: ir.Kernel, p: _Program, target: Target) -> int:
    """Programs that one processor holds at once, as far as values say before the kernel is built."""
    registers = min(
        255.0,
        target.rates.base_registers
        + target.rates.live_registers * p.live
        + (target.rates.ahead_registers if kernel.stages else 0.0),
    )
    return max(1, target.resident_programs(int(registers), int(p.shared_bytes + p.loop_bytes), p.threads))


def _memory(p: _Program, share: float, places: int, target: Target) -> tuple[float, float]:
    """First touches at the rate of memory, everything at the rate of the cache that all processors share."""
    fetched = cached = 0.0
    active = min(1.0, places / p.count)
    for buffer, t in p.traffic.items():
        asked = sum(a for a, _, _ in t.places.values())
        unique = min(asked, max(t.touched / max(1, p.count), float(storage_bytes(buffer)), 1.0))
        again = max(0.0, t.sectors - unique)
        stays = bool(p.products) or min(unique, t.touched * active) <= target.rates.cache_part * target.chip_cache_bytes
        scattered = sum(a * (1.0 + target.rates.page / run) for a, run in _stretches(t, buffer)) / max(1.0, asked)
        fetched += (unique if stays else unique + again) * scattered
        cached += t.sectors if unique > NEAR_BYTES else min(t.sectors, unique * min(target.processors, p.count))
    return fetched / (target.memory_bytes_per_us * share), cached / (target.cache_bytes_per_us * share)


def _stretches(t: _Traffic, buffer: Buffer) -> Iterable[tuple[float, float]]:
    """What is asked for at each place, and the stretch of neighbours that it is a part of: places that follow each
    other without a gap are read together."""
    joined: list[tuple[list[float], float, float, _Steps]] = []  # what is asked for, the length, where it ends
    for start, (asked, run, steps) in sorted(t.places.items()):
        first = start * buffer.dtype.bytes
        if joined and joined[-1][2] == first and joined[-1][3] == steps:
            parts, length, _, _ = joined.pop()
            joined.append(([*parts, asked], length + run, first + run, steps))
        else:
            joined.append(([asked], run, first + run, steps))
    for parts, length, _, steps in joined:
        for step, count in steps if len(parts) > 1 else ():
            length = max(length, step * count) if step <= length else length
        yield from ((asked, length) for asked in parts)


def _side_by_side(times: list[Time]) -> Time:
    """Kernels that share a launch: each takes its turn on the same processors."""
    summed = {name: sum(getattr(t, name) for t in times) for name in (*LIMITS, "programs")}
    resident = min(t.resident for t in times)
    return Time(**summed, launch_us=times[0].launch_us, resident=resident, rates=times[0].rates)


def _wasted(kernel: ir.Kernel, target: Target) -> Time:
    """What a program of threads moves of cache lines without using them: rows that lie across memory.

    Lines of one pass that a core's cache cannot hold until the next pass come from memory each time.
    """
    program = _Program(kernel.grid, target, 0, 1)
    program.block(kernel.body, 1.0)
    across = [t for t in program.traffic.values() if t.sectors > t.touched]
    held = sum(t.pass_bytes for t in across) <= target.cache_bytes // 2
    wasted = 0.0 if held else sum(t.sectors - t.touched for t in across)
    busy = min(1.0, program.count / target.processors)
    return Time(memory_us=wasted / (target.memory_bytes_per_us * busy), programs=program.count, resident=1)


def _cost(op: str) -> float:
    """What a lane of a GPU takes for an operation, in multiply-adds."""
    return GPU_COSTS.get(op) or (OPS[op].cost if op in OPS else 1.0)


def _width(s: ir.Let) -> float:
    """How much longer an operation takes because its numbers have 64 bits."""
    dtypes = [s.var.dtype, *(a.dtype for a in s.args if not isinstance(a, Poly))]
    if all(d.bytes < 8 for d in dtypes):
        return 1.0
    return CONVERTED if s.op in CASTS and len({d.is_float for d in dtypes}) > 1 else WIDE


def _indirect(offset: Poly) -> bool:
    return any(isinstance(a, Symbol) and a.hint is None and not a.lower for a in offset.atoms())
