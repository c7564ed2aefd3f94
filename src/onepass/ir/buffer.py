"""Buffers: storage that expressions load from and statements define."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from .dtypes import DType
from .interning import digest
from .poly import Poly


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Buffer:
    """Storage of one tensor. Strides are in elements; identity is the object.

    `place` orders the buffers of a program as they were made; `form` is equal for buffers of the same layout.
    """

    name: str
    dtype: DType
    shape: tuple[Poly, ...]
    strides: tuple[Poly, ...]
    device: str = "cpu"
    place: int = field(default_factory=itertools.count().__next__, init=False)
    form: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = tuple(p.form for p in (*self.shape, *self.strides))
        object.__setattr__(self, "form", hash((digest(self.dtype.value), *sizes)))

    def __repr__(self) -> str:
        return self.name
