"""Element types: the ones kernels compute in and store.

A `DType` knows its width and class; its name is torch's name for it, so
`getattr(torch, dtype.value)` is the torch dtype. `uint32` exists only inside kernels (Philox words).
"""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """An element type; the value is torch's attribute name."""

    F64 = "float64"
    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"
    I64 = "int64"
    I32 = "int32"
    I16 = "int16"
    I8 = "int8"
    U8 = "uint8"
    U32 = "uint32"
    BOOL = "bool"
    F8E4M3 = "float8_e4m3fn"
    F8E5M2 = "float8_e5m2"

    def __repr__(self) -> str:
        return self.value

    @property
    def bytes(self) -> int:
        """Bytes of one element in memory."""
        return _BYTES[self]

    @property
    def is_float(self) -> bool:
        return self in (DType.F64, DType.F32, DType.F16, DType.BF16)

    @property
    def is_half(self) -> bool:
        """16-bit floats: stored narrow, computed in float32."""
        return self in (DType.F16, DType.BF16)

    @property
    def is_integer(self) -> bool:
        """Integers, bool excluded."""
        return not self.is_float and self is not DType.BOOL and not self.is_packed

    @property
    def is_packed(self) -> bool:
        """float8: bytes that are moved and converted, never computed with."""
        return self in (DType.F8E4M3, DType.F8E5M2)

    @property
    def compute(self) -> DType:
        """The type arithmetic on this type runs in."""
        return DType.F32 if self.is_half else self

    @property
    def torch(self) -> object:
        """The torch dtype of the same name."""
        import torch

        return getattr(torch, self.value)


_BYTES = {
    DType.F64: 8, DType.F32: 4, DType.F16: 2, DType.BF16: 2,
    DType.I64: 8, DType.I32: 4, DType.I16: 2, DType.I8: 1, DType.U8: 1, DType.U32: 4, DType.BOOL: 1,
    DType.F8E4M3: 1, DType.F8E5M2: 1,
}  # fmt: skip


def from_torch(dtype: object) -> DType | None:
    """The DType of a torch dtype, None where kernels do not handle it (complex, quantised)."""
    name = str(dtype).removeprefix("torch.")
    return _BY_NAME.get(name)


_BY_NAME = {d.value: d for d in DType if d is not DType.U32}
