"""Generated text, and the host program that runs it.

A `KernelSource` is content-addressed: `key` excludes names, comments and origins, so identical layers
build once. A `HostProgram` is a list of plain instructions: names are generated ("a0" an input, "b3" a
buffer, "x1" a host value, "s0" a size), and expressions over sizes are strings over those names, so no
text of the user's ever reaches executed code. JSON both ways: `ir/host_json.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

MULTIPLE = 8  # of a size: rows of 16-bit numbers start on 16 bytes then, and end with whole vectors


@dataclass(frozen=True, slots=True)
class Matrix:
    """What a descriptor is made of: which pointer, rows and columns (rows that far apart)."""

    pointer: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class KernelSource:
    """`text` is a translation unit exporting `int entry(pointers..., int64 symbols..., int64 threads)`.

    In Triton it is a module with the function `entry(pointers..., symbols...)`; `signature` has their types.
    """

    name: str
    language: str  # "c" | "triton"
    text: str
    entry: str
    key: str
    pointers: int
    symbols: int
    raises: bool  # the returned status is checked
    signature: tuple[str, ...] = ()
    warps: int = 0
    stages: int = 0
    exact: bool = False  # a product and a sum are never contracted
    matrices: tuple[Matrix, ...] = ()  # handed over as descriptors, after the symbols
    general: str = ""  # the text without them, for pointers that cannot be described
    aligned: bool = True  # pointers must be on 16 bytes, or another runs
    multiples: tuple[int, ...] = ()  # words after the pointers that must be multiples of MULTIPLE, or another runs
    streams: bool = False  # what descriptors load is read once, and the chip's cache should give it up first
    overlaps: bool = False  # it waits for the kernel before it by itself, and may be started earlier
    denormals: bool = False  # an operation needs denormal numbers
    asserts: bool = False  # a program stops at an index out of range


@dataclass(frozen=True, slots=True)
class Ref:
    """A host name, seen through a view where strides are given."""

    name: str
    shape: tuple[str, ...] | None = None
    strides: tuple[str, ...] | None = None
    offset: str = "0"


@dataclass(frozen=True, slots=True)
class SizeOf:
    """An integer computed from sizes, as a Python expression over symbols."""

    expression: str


@dataclass(frozen=True, slots=True)
class TorchValue:
    """A literal of torch's: kind is "dtype", "device", "layout" or "memory_format"."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Live:
    """An object without a JSON form, found in `HostProgram.live`."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that is part of the graph: `HostProgram.constants[number]`."""

    number: int


# What argument and output trees hold: lists, tuples, dicts and slices of these, Live, None, bool, int, float, complex
# and str.
TreeLeaf: TypeAlias = Ref | SizeOf | TorchValue | Constant
Tree: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Bind:
    """size = the extent of the input `source` along `dim`."""

    size: str
    source: str
    dim: int


@dataclass(frozen=True, slots=True)
class Check:
    """Kernels rely on this layout: where `name` has other strides, it is replaced by a copy that has them.

    Shape and dtype are compared too where the tensor came from a call (`dtype` given): torch guards its
    graphs' inputs but nobody checks what an operator returns. A replaced tensor that kernels write to is
    kept as `original` (see `WriteBack`).
    """

    name: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    dtype: str | None = None
    original: str | None = None


@dataclass(frozen=True, slots=True)
class WriteBack:
    """original.copy_(name), if a `Check` replaced it."""

    original: str
    name: str


@dataclass(frozen=True, slots=True)
class Allocate:
    """name = an uninitialised tensor. A later buffer of equal size may live under the same name."""

    name: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Run kernel number `kernel` on buffers and sizes.

    A tile kernel has a grid of `programs` on a `device`; `numbers` are buffers handed over by value. `table`: what the
    words of the kernel's table are, addresses first.
    """

    kernel: int
    buffers: tuple[str, ...]
    symbols: tuple[str, ...]
    programs: str = ""
    device: str = ""
    numbers: tuple[str, ...] = ()
    table: tuple[Ref | SizeOf, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """result = target(*args, **kwargs). The target is a name (`ir/callables.py`) or one in `live`."""

    result: str
    target: str | Live
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]


@dataclass(frozen=True, slots=True)
class Copy:
    """target.copy_(source)"""

    target: str
    source: str


@dataclass(frozen=True, slots=True)
class Free:
    names: tuple[str, ...]


Instruction: TypeAlias = Bind | Check | WriteBack | Allocate | Launch | Call | Copy | Free
STEPS = (Launch, Call, Copy)  # the instructions that take time


@dataclass(frozen=True, slots=True)
class HostProgram:
    """What runs per call: inputs in call order, instructions, and the tree of each output.

    `constants` are not written down: whoever reads the program back supplies those of the graph at hand.
    """

    inputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Tree, ...]
    constants: tuple[Any, ...] = field(default=(), compare=False)
    live: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def cacheable(self) -> bool:
        """Whether the program can be written down: it holds no live object."""
        return not self.live


@dataclass(frozen=True, slots=True)
class Trial:
    """Launches that run by themselves, to be timed: tensors that stand in for their buffers, then the launches.

    All sizes are numbers. Kernels are numbered in launch order.
    """

    stand_ins: tuple[Allocate, ...]
    launches: tuple[Launch, ...]
