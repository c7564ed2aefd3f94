"""The kernel: a loop nest over axes (grid x loop x tile) with tile-valued SSA statements.

A program of the grid owns one block of every grid axis. Inside, `Loop`s are sweeps (serial), tiles
(vector lanes) or strips (a sweep whose step is a tile of `lanes`). Loop axes count from 0; where a
loop starts is in the polys. Emitters turn this into text one statement at a time and decide nothing.

Where a target's programs hold tiles of several axes in registers, `Tile` opens an axis for the rest of
its block instead of a loop, and `Fold` reduces over opened axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from .dtypes import DType
from .expr import Const
from .poly import Axis, Poly, Symbol, is_far, product
from .program import Buffer, Origin
from .schedule import Schedule


@dataclass(frozen=True, slots=True)
class Var:
    """An SSA value. Inside polys it appears as `Symbol(name)`."""

    name: str
    dtype: DType


Operand: TypeAlias = Var | Const | Poly  # a Poly is an int64 index value


@dataclass(frozen=True, slots=True)
class Let:
    """var = op(args); `note` names the operation it came from."""

    var: Var
    op: str
    args: tuple[Operand, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class LoadElement:
    """var = buffer[offset], or zero where `guard` is false.

    `reuse`: whether the chip's cache should hold on to it ("again") or give it up first ("never"); "" leaves it open.
    """

    var: Var
    buffer: Buffer
    offset: Poly
    guard: Operand | None = None
    reuse: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Descriptor:
    """A buffer as a matrix of `rows` x `columns`, rows `columns` apart, that hardware copies `block` by block."""

    name: str
    buffer: Buffer
    rows: int
    columns: int
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LoadTile:
    """var = the block of a matrix at (row, column), `transposed` where its rows are the tile's columns.

    `offset`: the same elements as positions in the buffer, for where it cannot be described.
    """

    var: Var
    descriptor: Descriptor
    row: Poly
    column: Poly
    transposed: bool
    offset: Poly

    @property
    def buffer(self) -> Buffer:
        return self.descriptor.buffer


@dataclass(frozen=True, slots=True)
class StoreTile:
    """The block of a matrix at (row, column) = value, `transposed` where its rows are the value's columns."""

    descriptor: Descriptor
    row: Poly
    column: Poly
    transposed: bool
    offset: Poly
    value: Operand

    @property
    def buffer(self) -> Buffer:
        return self.descriptor.buffer


@dataclass(frozen=True, slots=True)
class StoreElement:
    """buffer[offset] = value, where `guard` holds.

    `staged`: the tiles of a strip gather in this local and leave together, past the caches.
    """

    buffer: Buffer
    offset: Poly
    value: Operand
    guard: Operand | None = None
    staged: Local | None = None


@dataclass(frozen=True, slots=True)
class RandomWord:
    """var = lane index % 4 of Philox(seed, stream, index // 4).

    `along`: index counts up by one along this tile axis from a multiple of four, so one call makes four words.
    `calls`: how many calls make the words of one thread's neighbouring elements.
    """

    var: Var
    seed: Operand
    stream: int
    index: Poly
    along: Axis | None = None
    calls: int = 1


@dataclass(frozen=True, slots=True)
class FillRandom:
    """local[k] = the word of index first + k, for a whole strip: one Philox call makes four words."""

    local: Local
    seed: Operand
    stream: int
    first: Poly


@dataclass(frozen=True, slots=True)
class Local:
    """Per-program scratch: an array of `size` elements, or one cell that has a value for each lane of open tiles."""

    name: str
    dtype: DType
    size: int | Poly
    tiles: tuple[Axis, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadLocal:
    var: Var
    local: Local
    index: Poly


@dataclass(frozen=True, slots=True)
class WriteLocal:
    local: Local
    index: Poly
    value: Operand


@dataclass(frozen=True, slots=True)
class Accumulator:
    """The running state of a reduction: `lanes` independent states.

    `compensated`: a long float sum carries the rounding errors of its additions, of which that many in a row may be
    plain ones; 0: all are plain. `shifted`: a Welford state is kept as the sums of x - origin and of its square.
    """

    name: str
    monoid: str
    dtypes: tuple[DType, ...]
    lanes: int
    compensated: int = 0
    tiles: tuple[Axis, ...] = ()  # the open tile axes it has a state for each lane of
    folded: tuple[Axis, ...] = ()  # those of them that `Finish` merges
    shifted: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Set every lane of an accumulator to the identity."""

    accumulator: Accumulator


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Combine one element into a lane.

    `rounds`: how many elements this lane has met before, where the position says it: lanes share one 1 / count.
    """

    accumulator: Accumulator
    lane: Poly
    inputs: tuple[Operand, ...]
    rounds: Poly | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """Merge all lanes (lane None) or take one lane; the parts become variables."""

    accumulator: Accumulator
    lane: Poly | None
    parts: tuple[Var, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """For the rest of this block, `axis` runs over [0, lanes) at once; lanes from any of `limits` on do not count.

    `dim`: the dimension it takes, where several axes that never meet share one; None: the next.
    """

    axis: Axis
    lanes: int
    limits: tuple[Poly, ...] = ()
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """parts = the monoid over tile axes of what is held: lanes that do not count are left out."""

    monoid: str
    inputs: tuple[Operand, ...]
    over: tuple[Axis, ...]
    parts: tuple[Var, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """parts = the state of a scan after another element; over a tile axis `along`, after each of its elements.

    What came before is in the accumulator, which moves on; None: the tile has all elements. `reverse`: its last is
    the first.
    """

    monoid: str
    inputs: tuple[Operand, ...]
    parts: tuple[Var, ...]
    accumulator: Accumulator | None = None
    lane: Poly = Poly.ZERO
    along: Axis | None = None
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Of a strip that has nothing else in its body: its lanes do this when all of them have done what stands before it.

    `in_turn`: one after another.
    """

    body: tuple[Statement, ...]
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class Contract:
    """accumulator += left @ right, or var = left @ right: the first tile's columns against the second's rows.

    `operands`: the type the matrix unit is given; `precision`: how it treats float32 ("ieee" or "tf32"); `summed`: the
    tile axes that meet, as columns and as rows.
    """

    var: Var
    left: Operand
    right: Operand
    operands: DType
    precision: str
    summed: tuple[Axis, ...]
    accumulator: Accumulator | None = None


@dataclass(frozen=True, slots=True)
class Rescale:
    """Carry a stale sum to a new reference: every lane *= factor (transport rule).

    `guarded`: 0 where the factor is 0, whatever the sum was.
    """

    accumulator: Accumulator
    factor: Operand
    guarded: bool = True


@dataclass(frozen=True, slots=True)
class FirstElement:
    """The origin of a shifted accumulator: `value`, computed by `body` at the first position of a strip."""

    accumulator: Accumulator
    body: tuple[Statement, ...]
    value: Operand


@dataclass(frozen=True, slots=True)
class Loop:
    """for axis in [0, extent), at most `limit` where given; from the largest of `after`, below the least of `before`.

    kind: "sweep" runs in order; "tile" runs as vector lanes; "strip" is a sweep over tiles of `lanes`
    elements, inside which `lane` is the position in the tile.
    """

    axis: Axis
    extent: Poly
    kind: str
    body: tuple[Statement, ...]
    lanes: int = 1
    lane: Axis | None = None
    limit: Poly | None = None
    prologue: tuple[Statement, ...] = ()  # of a strip: runs before each tile, whose start is Symbol("<axis>_at")
    after: tuple[Poly, ...] = ()  # of a sweep in a tile program
    before: tuple[Poly, ...] = ()
    seldom: bool = False  # of a sweep: data says how many steps it has, and few are expected
    part: float = 1.0  # of the steps between its ends: what data is expected to leave
    beside: int = 0  # seldom sweeps before and after it that have taken a step each
    stages: int = 0  # of a sweep: loads in flight ahead of it
    ordered: bool = False  # of a tile or strip: its lanes enter one state, so they take turns
    origins: tuple[FirstElement, ...] = ()  # of a strip: taken before it runs, where no strip before it had elements

    @property
    def statements(self) -> tuple[Statement, ...]:
        """What a lane does, its stages one after another."""
        return tuple(x for s in self.body for x in (s.body if isinstance(s, Stage) else (s,)))

    def ahead(self, stages: int) -> int:
        """Loads in flight, of as many as a kernel asks for: a loop of few steps leaves shared memory to the others."""
        return min(stages, 2) if self.seldom else stages


@dataclass(frozen=True, slots=True)
class Bind:
    """axis = value: a name for a position whose range is known to be [0, axis.extent)."""

    axis: Axis
    value: Poly


@dataclass(frozen=True, slots=True)
class When:
    """Run the body where the condition holds."""

    condition: Operand
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Barrier:
    """All threads of a program have done what stands before it."""


@dataclass(frozen=True, slots=True)
class GridAxis:
    """`axis` counts the programs of one grid dimension: 0 <= axis < extent."""

    axis: Axis
    extent: Poly


@dataclass(frozen=True, slots=True)
class Parts:
    """Kernels with one body, in which the first one's buffers stand and a symbol for every number that differs.

    `firsts`: the first program of each; `buffers`: what each has in the place of a buffer; `numbers`: of a symbol. A
    table in memory holds them all, `buffers_at` and `numbers_at` words from its start: a row of words, one for each
    part, for every buffer, then one for `firsts` and one for every symbol.
    """

    count: int
    end: Poly
    firsts: tuple[Poly, ...]
    buffers: tuple[tuple[Buffer, ...], ...]
    numbers: tuple[tuple[Symbol, tuple[Poly, ...]], ...]
    buffers_at: int = 0
    numbers_at: int = 0

    def divisor(self, number: int) -> int:
        """A power of two, at most 16, that divides a number of every part."""
        constants = [p.constant for p in self.numbers[number][1]]
        return math.gcd(16, *(1 if n is None else n for n in constants))


@dataclass(frozen=True, slots=True)
class Share:
    """Programs of a launch that have a grid and a body of their own: those from `first` on, as many as it has.

    `flat`, `locals`: as of a kernel. `parts`: the programs are several kernels', one after another.
    """

    first: Poly
    grid: tuple[GridAxis, ...]
    body: tuple[Statement, ...]
    flat: bool = False
    locals: tuple[Local, ...] = ()
    parts: Parts | None = None

    @property
    def end(self) -> Poly:
        """The first program that is not one of them."""
        return self.parts.end if self.parts is not None else self.first + product(g.extent for g in self.grid)


Statement: TypeAlias = (
    Let | LoadElement | LoadTile | StoreTile | StoreElement | RandomWord | FillRandom | ReadLocal | WriteLocal
    | Start | Accumulate | Finish | Rescale | Contract | Loop | Bind | When | Tile | Fold | Share | Barrier | Advance
    | Stage
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One launch. `reads` and `writes` are the parameters, in order (a buffer in both appears once).

    Where several kernels share the launch, its body is a list of `Share`s and its grid counts all their programs.
    """

    name: str
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    symbols: tuple[Symbol, ...]
    grid: tuple[GridAxis, ...]
    locals: tuple[Local, ...]
    body: tuple[Statement, ...]
    origins: tuple[Origin, ...]
    schedule: Schedule  # how the axes are factored
    work: Poly  # elements visited, to decide on threads
    raises: bool = False
    entry: str = ""  # what the function is called, by what it computes: equal kernels have equal names
    team_work: int = 0  # elements from which several threads share the programs
    warps: int = 0  # of a tile program: how many share it
    stages: int = 0  # loads in flight ahead of a sweep
    wide: bool = False  # offsets need 64 bits
    descriptors: tuple[Descriptor, ...] = ()
    resident: int = 0  # programs that stay and take one position of the grid after another; 0: one each
    flat: bool = False  # their positions and the sweeps inside become one loop
    multiples: tuple[Symbol, ...] = ()  # sizes that must be multiples of MULTIPLE, or a variant of the kernel runs
    matrices: tuple[Buffer, ...] = ()  # of packed types, read by the matrix unit alone: handed over in its own type
    streams: bool = False  # what descriptors load is read once, and the chip's cache should give it up first
    denormals: bool = False  # an operation needs denormal numbers
    asserts: bool = False  # a program stops at an index out of range
    like: Kernel | None = None  # the same over other buffers: their texts are equal

    def over(self, own: Mapping[Buffer, Buffer], name: str, origins: tuple[Origin, ...]) -> Kernel:
        """The same kernel over other buffers of the same layouts."""
        described = {d: replace(d, buffer=own[d.buffer]) for d in self.descriptors}

        def change(s: Statement) -> Statement:
            match s:
                case LoadElement() | StoreElement():
                    return replace(s, buffer=own[s.buffer])
                case LoadTile() | StoreTile():
                    return replace(s, descriptor=described[s.descriptor])
                case Loop(origins=firsts) if firsts:
                    return replace(s, origins=tuple(replace(f, body=rewritten(f.body, change)) for f in firsts))
            return s

        def mapped(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
            return tuple(own[b] for b in buffers)

        return replace(
            self,
            name=name,
            reads=mapped(self.reads),
            writes=mapped(self.writes),
            body=rewritten(self.body, change),
            origins=origins,
            descriptors=tuple(described.values()),
            matrices=mapped(self.matrices),
            like=self.like or self,
        )

    @property
    def parameters(self) -> tuple[Buffer, ...]:
        return tuple(dict.fromkeys((*self.writes, *self.reads)))

    @property
    def parts(self) -> tuple[Parts, ...]:
        """The ranges of programs with a table."""
        return tuple(s.parts for s in self.body if isinstance(s, Share) and s.parts is not None)

    @property
    def passed(self) -> tuple[Buffer, ...]:
        """The parameters that are arguments of the launch; all others are in its table."""
        if not self.parts:
            return self.parameters
        alone = walk(tuple(s for s in self.body if not isinstance(s, Share) or s.parts is None))
        used = {s.buffer for s in alone if isinstance(s, LoadElement | LoadTile | StoreElement | StoreTile)}
        return tuple(b for b in self.parameters if b in used)

    @property
    def programs(self) -> Poly:
        """How many programs are launched."""
        count = product(g.extent for g in self.grid)
        return Poly.of(min(count.constant, self.resident)) if self.resident and count.constant is not None else count

    @property
    def numbers(self) -> tuple[Buffer, ...]:
        """Parameters handed over by value: single numbers that live on another device than the results."""
        device = self.writes[0].device
        return tuple(b for b in self.parameters if b.device != device and not b.shape)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledGroup:
    """The kernels of one group in launch order, and the workspace buffers between them."""

    kernels: tuple[Kernel, ...]
    workspace: tuple[Buffer, ...] = ()
    before: int = 0  # kernels that come before the one which runs by the group's schedule

    @property
    def timed(self) -> tuple[Kernel, ...]:
        """The kernels whose times depend on the schedule, without those that answer questions about data."""
        return self.kernels[self.before :]

    @property
    def main(self) -> Kernel:
        """The kernel that runs by the group's schedule."""
        return self.kernels[self.before]

    def over(self, own: Mapping[Buffer, Buffer], name: str, origins: tuple[Origin, ...]) -> ScheduledGroup:
        """The same kernels over other buffers of the same layouts, with a workspace of their own."""
        fresh = {b: replace(b, name=f"{name}{b.name}") for b in self.workspace}
        buffers = {**own, **fresh}
        kernels = tuple(k.over(buffers, f"{name}{k.name}", origins) for k in self.kernels)
        return ScheduledGroup(kernels, tuple(fresh.values()), self.before)


def walk(body: tuple[Statement, ...]) -> list[Statement]:
    """Every statement, outer before inner."""
    found: list[Statement] = []
    for statement in body:
        found.append(statement)
        if isinstance(statement, Loop):
            found += walk(statement.prologue)
        if isinstance(statement, Loop | When | Share | Stage):
            found += walk(statement.body)
    return found


def rewritten(body: tuple[Statement, ...], change: Callable[[Statement], Statement]) -> tuple[Statement, ...]:
    """Every statement as `change` has it, inner before outer."""

    def inside(s: Statement) -> Statement:
        if isinstance(s, Loop):
            s = replace(s, body=rewritten(s.body, change), prologue=rewritten(s.prologue, change))
        elif isinstance(s, When | Share | Stage):
            s = replace(s, body=rewritten(s.body, change))
        return change(s)

    return tuple(inside(s) for s in body)


_NOT_READ = frozenset(("var", "parts", "body", "prologue"))


def reads(s: Statement) -> list[Operand]:
    """The operands of a statement; of a loop or a condition, not those of its body."""
    found: list[object] = []
    for name in s.__match_args__:
        value = getattr(s, name) if name not in _NOT_READ else None
        found += value if isinstance(value, tuple) else (value,)
    return [o for o in found if isinstance(o, Var | Const | Poly)]


def names(operands: Iterable[Operand]) -> set[str]:
    """The variables and axes in operands; a variable inside an index is a symbol of its name."""
    found: set[str] = set()
    for o in operands:
        found |= {o.name} if isinstance(o, Var) else o.names() if isinstance(o, Poly) else set()
    return found


def defined(s: Statement) -> tuple[Var, ...]:
    """The variables that a statement gives a value."""
    if isinstance(s, Finish | Fold | Advance):
        return s.parts
    variable: Var | None = getattr(s, "var", None)
    into_state = isinstance(s, Contract) and s.accumulator is not None
    return () if variable is None or into_state else (variable,)


def place_of(value: Operand) -> Poly | None:
    """An operand as a position of 32 bits, or of as many as positions have; None if it is none."""
    if isinstance(value, Const) and value.dtype is DType.I64 and not is_far(Poly.of(int(value.value))):
        return Poly.of(int(value.value))
    return value if isinstance(value, Poly) else None
