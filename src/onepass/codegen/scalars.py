"""The text of scalar operations, whatever the language: a template for each operation and type of operand.

A template names its arguments `{0}`, `{1}`, `{2}`, or `{all}` with commas in between; `{op}` is the operation, `{type}`
and `{suffix}` are the language's names of the operands' type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..ir.dtypes import DType

Templates = dict[str, str]

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BIT_OPERATORS = {"bitand": "&", "bitor": "|", "bitxor": "^"}
_BOOL_OPERATORS = BIT_OPERATORS | {"add": "|", "mul": "&", "maximum": "|", "minimum": "&", "fmax": "|", "fmin": "&"}
INTEGER_DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")


def infix(operators: Mapping[str, str]) -> Templates:
    """Templates of binary operators."""
    return {op: f"({{0}} {operator} {{1}})" for op, operator in operators.items()}


def by_type(floats: Templates, integers: Callable[[DType], Templates], bools: Templates) -> dict[DType, Templates]:
    """The templates of every type that is computed with: a language's own, and those that all languages share."""
    floats = floats | {"neg": "(-{0})"}
    bools = bools | infix(_BOOL_OPERATORS) | dict.fromkeys(("abs", "sign"), "{0}")
    whole = dict.fromkeys(("floor", "ceil", "trunc", "round"), "{0}") | {"signbit": "({0} < 0)"}
    tables = {DType.F64: floats, DType.F32: floats, DType.BOOL: bools}
    tables |= {d: integers(d) | whole for d in DType if d.is_integer}
    return {d: table | infix(COMPARISONS) for d, table in tables.items()}


@dataclass(frozen=True, slots=True)
class Scalars:
    """A language: its types, the templates by type of operand, those for operands of any types, and conversions."""

    type_of: Callable[[DType], str]
    templates: dict[DType, Templates]
    any_types: Templates
    cast: Callable[[str, DType, DType], str]
    bits: Callable[[str, DType, DType], str]  # of types of one width
    nextafter_half: str

    def text(self, op: str, args: Sequence[str], arg_dtypes: Sequence[DType], dtype: DType) -> str:
        """An expression; ValueError where the operation has no meaning on the types of its operands."""
        operand = arg_dtypes[0]
        if op in self.any_types:
            return self._filled(self.any_types[op], op, args, operand)
        match op:
            case "cast" | "narrow" | "widen":
                return self.cast(args[0], operand, dtype)
            case "bitcast":
                return self._bitcast(args[0], operand, dtype)
            case "uniform" if operand is DType.U32 and dtype in (DType.F32, DType.F64):
                return f"op_uniform_{suffix(dtype)}({args[0]})"
        if any(d is not operand for d in arg_dtypes):
            raise ValueError(f"{op} takes arguments of one type, not {list(arg_dtypes)}")
        if operand.is_half:
            return self._on_half(op, args, operand, dtype)
        template = self.templates.get(operand, {}).get(op)
        if template is None:
            raise ValueError(f"{op} has no meaning on {operand}")
        return self._filled(template, op, args, operand)

    def _filled(self, template: str, op: str, args: Sequence[str], operand: DType) -> str:
        return template.format(*args, op=op, all=", ".join(args), type=self.type_of(operand), suffix=suffix(operand))

    def _on_half(self, op: str, args: Sequence[str], operand: DType, dtype: DType) -> str:
        """In float32, rounded once at the end; nextafter steps in the type's own values."""
        if op == "nextafter":
            return self._filled(self.nextafter_half, op, args, operand)
        wide = [self.cast(a, operand, DType.F32) for a in args]
        text = self.text(op, wide, [DType.F32] * len(wide), DType.F32 if dtype.is_half else dtype)
        return self.cast(text, DType.F32, dtype) if dtype.is_half else text

    def _bitcast(self, arg: str, source: DType, target: DType) -> str:
        if source.bytes != target.bytes:
            raise ValueError(f"a bitcast keeps the width: {source} to {target}")
        return f"({arg} != 0)" if target is DType.BOOL else self.bits(arg, source, target)


def suffix(dtype: DType) -> str:
    """How names of functions end: f32, bf16, i64, u8."""
    return dtype.name.lower()
