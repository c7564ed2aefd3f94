"""Sizes: torch's symbolic integers as polys, without adding a guard.

The expression of a SymInt is what counts; its value is only kept as a symbol's hint. A size that has
no polynomial form, or that depends on data, raises `Unsupported`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import sympy
import torch

from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, const, pointwise
from ..ir.poly import Poly, Symbol, nonnegative, product
from .registry import Unsupported
from .torch_private import free_unbacked_symbols, functions, symbol_hint

# Stands for an integer argument of which nothing is known.
_NO_LOWER_BOUND = -(2**62)


class Sizes:
    """Converts sizes; remembers which symbols have been met."""

    def __init__(self) -> None:
        self.symbols: dict[sympy.Symbol, Symbol] = {}
        self._known: dict[tuple[sympy.Expr, bool], Poly] = {}
        self.inputs: dict[sympy.Expr, Symbol] = {}  # what an integer argument stands for

    def poly(self, size: int | torch.SymInt, *, stride: bool = False) -> Poly:
        """The size as a poly. A stride's Max(1, n) is n: they differ only where nothing is read."""
        if not isinstance(size, torch.SymInt):
            return Poly.of(size)
        key = (size.node.expr, stride)
        known = self._known.get(key)
        if known is None:
            expression = self._expression(size)
            if stride:
                expression = expression.replace(_is_at_least_one, _other_than_one)
            known = self._known[key] = self._convert(expression)
        return known

    def number(self, value: torch.SymFloat) -> Expr:
        """A float made of sizes, as a float64 value."""
        return self._float(self._expression(value))

    def _expression(self, size: torch.SymInt | torch.SymFloat) -> sympy.Expr:
        """The expression, simplified by what torch already knows (it adds no guard)."""
        shape_env = size.node.shape_env
        expression = shape_env.simplify(size.node.expr)
        for symbol in expression.free_symbols:
            self._meet(symbol, shape_env)
        return expression

    def shape(self, sizes: Iterable[int | torch.SymInt]) -> tuple[Poly, ...]:
        return tuple(self.poly(s) for s in sizes)

    def strides(self, strides: Iterable[int | torch.SymInt]) -> tuple[Poly, ...]:
        return tuple(self.poly(s, stride=True) for s in strides)

    def _meet(self, symbol: sympy.Symbol, shape_env: Any) -> None:
        if symbol in self.symbols:
            return
        if free_unbacked_symbols(symbol):
            raise Unsupported("a size depends on data")
        bounds = shape_env.var_to_range.get(symbol)
        lower = bounds.lower if bounds is not None else sympy.Integer(0)
        at_least = int(lower) if lower.is_Integer else _NO_LOWER_BOUND
        self.symbols[symbol] = Symbol(symbol.name, at_least, symbol_hint(symbol, shape_env))

    def _convert(self, expression: sympy.Expr) -> Poly:
        if expression in self.inputs and not expression.is_Symbol:
            return self.inputs[expression].poly()
        if expression.is_Integer:
            return Poly.of(int(expression))
        if expression.is_Symbol:
            return self.symbols[expression].poly()
        arguments = expression.args
        if isinstance(expression, sympy.Add):
            return sum(map(self._convert, arguments), Poly.ZERO)
        if isinstance(expression, sympy.Mul):
            return product(map(self._convert, arguments))
        if isinstance(expression, sympy.Pow) and arguments[1].is_Integer and arguments[1] > 0:
            return product([self._convert(arguments[0])] * int(arguments[1]))
        if isinstance(expression, functions.FloorDiv | functions.Mod | functions.PythonMod):
            numerator, denominator = (self._convert(a) for a in arguments)
            if not nonnegative(denominator):  # torch would have failed on 0
                raise Unsupported(f"the divisor of the size {expression} may be negative")
            return numerator // denominator if isinstance(expression, functions.FloorDiv) else numerator % denominator
        raise Unsupported(f"the size {expression} is not a polynomial")

    def _float(self, expression: sympy.Expr) -> Expr:
        if expression.is_Float or expression.is_Rational:
            return const(float(expression), DType.F64)
        operands = expression.args
        if expression.is_integer or isinstance(expression, functions.ToFloat):
            whole = expression if expression.is_integer else operands[0]
            return pointwise("cast", Index(self._convert(whole)), dtype=DType.F64)
        if isinstance(expression, functions.IntTrueDiv | functions.FloatTrueDiv):
            return pointwise("div", self._float(operands[0]), self._float(operands[1]))
        if isinstance(expression, sympy.Add | sympy.Mul):
            op = "add" if isinstance(expression, sympy.Add) else "mul"
            return functools.reduce(lambda left, right: pointwise(op, left, right), map(self._float, operands))
        raise Unsupported(f"the number {expression} has no kernel form")


def _is_at_least_one(expression: sympy.Expr) -> bool:
    return isinstance(expression, functions.Max) and len(expression.args) == 2 and sympy.Integer(1) in expression.args


def _other_than_one(expression: sympy.Expr) -> sympy.Expr:
    return next(a for a in expression.args if a != 1)
