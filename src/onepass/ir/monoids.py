"""Monoids: what a reduction or scan combines. A state is a tuple of parts.

`welford` takes (value,) and keeps (mean, m2, count); its sum of squares is merged by Chan's rule,
never E[x^2] - E[x]^2. `argmax`/`argmin` take (value, index) and keep eager's order: NaN first, then
the extreme, ties to the lower index. Two are of scans alone: `logsumexp` takes (value,) and keeps (maximum, sum of
exp(value - maximum)); `linear` composes maps h -> a * h + b, the first applied first, and `linear_step` keeps what they
make of zero, which can be joined with nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .dtypes import DType


@dataclass(frozen=True, slots=True)
class Monoid:
    """Shape of a monoid: how many values enter per element and how many parts its state has."""

    name: str
    inputs: int
    parts: int
    cost: float


MONOIDS: dict[str, Monoid] = {
    m.name: m
    for m in (
        *(Monoid(name, 1, 1, 1.0) for name in ("sum", "prod", "max", "min", "any", "all")),
        Monoid("argmax", 2, 2, 3.0),
        Monoid("argmin", 2, 2, 3.0),
        Monoid("welford", 1, 3, 6.0),
        Monoid("logsumexp", 1, 2, 16.0),
        Monoid("linear", 2, 2, 2.0),
        Monoid("linear_step", 2, 1, 2.0),
        Monoid("welford_merge", 3, 3, 8.0),  # elements are states already: finishing a split
    )
}


def part_dtypes(monoid: str, inputs: tuple[DType, ...]) -> tuple[DType, ...]:
    """The dtypes of a state's parts, given the dtypes of what enters."""
    match monoid:
        case "argmax" | "argmin":
            return (inputs[0], DType.I64)
        case "welford":
            return (inputs[0], inputs[0], inputs[0])
        case "logsumexp":
            return (inputs[0], inputs[0])
        case "any" | "all":
            return (DType.BOOL,)
        case "linear_step":
            return inputs[1:]
    return inputs


_IDENTITIES = {
    "sum": 0,
    "prod": 1,
    "linear": 1,
    "any": False,
    "all": True,
    "welford": 0,
    "welford_merge": 0,
    "linear_step": 0,
}


def identity(monoid: str, dtype: DType) -> float | int | bool:
    """The identity of the first part (min/max of integers: the type's bound)."""
    if monoid in ("max", "argmax", "logsumexp"):
        return lowest(dtype)
    if monoid in ("min", "argmin"):
        return highest(dtype)
    number = _IDENTITIES[monoid]
    return float(number) if dtype.is_float else number


def lowest(dtype: DType) -> float | int | bool:
    """The smallest value of a type."""
    return _range(dtype)[0]


def highest(dtype: DType) -> float | int | bool:
    """The largest value of a type."""
    return _range(dtype)[1]


def _range(dtype: DType) -> tuple[float | int | bool, float | int | bool]:
    if dtype.is_float:
        return -math.inf, math.inf
    if dtype is DType.BOOL:
        return False, True
    values = 1 << dtype.bytes * 8
    return (0, values - 1) if dtype in (DType.U8, DType.U32) else (-values // 2, values // 2 - 1)
