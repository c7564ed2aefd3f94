"""Sizes: torch's symbolic integers as polys, without adding a guard.

Only the expression of a SymInt is read, never its value. A size that has no polynomial form, or
that depends on data, raises `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch

from ..ir.poly import Poly, Symbol, nonnegative
from .registry import Unsupported
from .torch_private import CleanDiv, FloorDiv, Max, Mod, PythonMod, free_unbacked_symbols


class Sizes:
    """Converts sizes; remembers which symbols have been met."""

    def __init__(self) -> None:
        self.symbols: dict[sympy.Symbol, Symbol] = {}
        self.inputs: dict[sympy.Expr, Symbol] = {}  # what an integer argument stands for

    def poly(self, size: int | torch.SymInt, *, stride: bool = False) -> Poly:
        """The size as a poly. A stride's Max(1, n) is n: they differ only where nothing is read."""
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            if expression.is_Symbol and expression not in self.symbols:
                self._meet(expression, size.node.shape_env)
            else:
                for symbol in expression.free_symbols:
                    self._meet(symbol, size.node.shape_env)
            if stride:
                expression = expression.replace(_is_at_least_one, _other_than_one)
            return self._convert(expression)
        return Poly.of(size)

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
        if not (lower.is_Integer and lower >= 0):
            raise Unsupported(f"the integer {symbol} may be negative")
        self.symbols[symbol] = Symbol(symbol.name, int(lower))

    def _convert(self, expression: sympy.Expr) -> Poly:
        if expression in self.inputs and not expression.is_Symbol:
            return self.inputs[expression].poly()
        if expression.is_Integer:
            return Poly.of(int(expression))
        if expression.is_Symbol:
            return self.symbols[expression].poly()
        arguments = expression.args
        if isinstance(expression, sympy.Add):
            total = Poly.ZERO
            for term in arguments:
                total = total + self._convert(term)
            return total
        if isinstance(expression, sympy.Mul):
            product = Poly.ONE
            for factor in arguments:
                product = product * self._convert(factor)
            return product
        if isinstance(expression, sympy.Pow) and arguments[1].is_Integer and arguments[1] > 0:
            product = Poly.ONE
            for _ in range(int(arguments[1])):
                product = product * self._convert(arguments[0])
            return product
        if isinstance(expression, FloorDiv | CleanDiv | Mod | PythonMod):
            numerator, denominator = (self._convert(a) for a in arguments)
            if not nonnegative(denominator):  # torch would have failed on 0
                raise Unsupported(f"the divisor of the size {expression} may be negative")
            return numerator // denominator if isinstance(expression, FloorDiv) else numerator % denominator
        raise Unsupported(f"the size {expression} is not a polynomial")


def _is_at_least_one(expression: sympy.Expr) -> bool:
    return isinstance(expression, Max) and len(expression.args) == 2 and sympy.Integer(1) in expression.args


def _other_than_one(expression: sympy.Expr) -> sympy.Expr:
    return next(a for a in expression.args if a != 1)
