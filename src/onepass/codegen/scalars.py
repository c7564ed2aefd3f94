"""How an operation's text is found by the type of its operands, whatever the language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ir.dtypes import DType

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BIT_OPERATORS = {"bitand": "&", "bitor": "|", "bitxor": "^"}
BOOL_OPERATORS = BIT_OPERATORS | {"add": "|", "mul": "&", "maximum": "|", "minimum": "&", "fmax": "|", "fmin": "&"}
SAME_ON_INTEGERS = frozenset(["floor", "ceil", "trunc", "round"])

OnType = Callable[[str, Sequence[str], DType], str | None]


@dataclass(frozen=True, slots=True)
class Scalars:
    """A language's operations by type of operand (None: it has no meaning there), and its casts."""

    on_float: OnType
    on_integer: OnType
    on_bool: OnType
    cast: Callable[[str, DType, DType], str]
    nextafter_half: Callable[[Sequence[str], DType], str]

    def text(self, op: str, args: Sequence[str], arg_dtypes: Sequence[DType], dtype: DType) -> str:
        """An operation on arguments of one type; ValueError where it has no meaning on it."""
        operand = arg_dtypes[0]
        if any(d is not operand for d in arg_dtypes):
            raise ValueError(f"{op} takes arguments of one type, not {list(arg_dtypes)}")
        if operand.is_half:
            return self._on_half(op, args, operand, dtype)
        if op in COMPARISONS:
            return f"({args[0]} {COMPARISONS[op]} {args[1]})"
        on_type = self.on_bool if operand is DType.BOOL else self.on_float if operand.is_float else self.on_integer
        found = on_type(op, args, operand)
        if found is None:
            raise ValueError(f"{op} has no meaning on {operand}")
        return found

    def _on_half(self, op: str, args: Sequence[str], operand: DType, dtype: DType) -> str:
        """In float32, rounded once at the end; nextafter steps in the type's own values."""
        if op == "nextafter":
            return self.nextafter_half(args, operand)
        wide = [self.cast(a, operand, DType.F32) for a in args]
        text = self.text(op, wide, [DType.F32] * len(wide), DType.F32 if dtype.is_half else dtype)
        return self.cast(text, DType.F32, dtype) if dtype.is_half else text
