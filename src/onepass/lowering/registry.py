"""The table of lowering rules: one small function per operation.

    @lowers("neg")
    def neg(ctx: Context, x: Ref) -> Expr: ...

A rule is called like the operation, with its context in front. It returns the value of the result (an `Expr`, which is
then defined) or a view of an operand (a `Ref`), one for each result; or raises `Unsupported` with the reason, and the
operation then runs as eager would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..ir.callables import operators

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)
T = TypeVar("T")
RULES: dict[object, Rule] = {}


class Unsupported(Exception):
    """An operation cannot become a kernel; the message says why."""


def supported(function: Callable[..., T], *arguments: Any) -> T | None:
    """The result of a function; None where it says `Unsupported`."""
    try:
        return function(*arguments)
    except Unsupported:
        return None


def lowers(names: str, table: dict[object, Rule] = RULES) -> Callable[[R], R]:
    """Register a rule for the operators of these names (`ir/callables.py: operators`)."""

    def register(rule: R) -> R:
        for target in operators(names):
            assert target not in table, f"two rules for {target}"
            table[target] = rule
        return rule

    return register
