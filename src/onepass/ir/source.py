"""Generated text, and the host program that runs it.

A `KernelSource` is content-addressed: `key` excludes names, comments and origins, so identical layers
build once. A `HostProgram` is a list of plain instructions; its expressions over sizes are strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, Union


@dataclass(frozen=True, slots=True)
class KernelSource:
    """`text` is a translation unit exporting `entry(pointers..., int64 symbols..., int64 threads)`."""

    name: str
    language: str  # "c"
    text: str
    entry: str
    key: str
    pointers: int
    symbols: int
    raises: bool


@dataclass(frozen=True, slots=True)
class Allocate:
    name: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Run kernel number `kernel` on buffers and sizes; skip it where `unless` (a size expression) is 0."""

    kernel: int
    buffers: tuple[str, ...]
    symbols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """result = target(*args, **kwargs). Argument trees hold `Ref`, `SizeOf` and JSON literals."""

    result: str
    target: str
    args: Any
    kwargs: Any
    shape: tuple[str, ...] | None = None  # what kernels expect of the result, checked when it runs
    strides: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """target.copy_(source)"""

    target: str
    source: str


@dataclass(frozen=True, slots=True)
class Free:
    names: tuple[str, ...]


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


Instruction: TypeAlias = Union[Allocate, Launch, Call, Copy, Free]


@dataclass(frozen=True, slots=True)
class HostProgram:
    """inputs: names in call order ("a0" a tensor, "s0" an integer). sizes: symbol -> (input, dim)."""

    inputs: tuple[str, ...]
    sizes: tuple[tuple[str, str, int], ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Any, ...]
    checks: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = ()  # input, shape, strides expected
