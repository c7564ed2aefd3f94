"""The table of lowering rules: one small function per operation.

    @lowers(aten.neg.default)
    def neg(ctx: Context, x: Ref) -> Ref: ...

A rule is called like the operation, with its context in front; it returns a value, or raises
`Unsupported` with the reason, and the operation then runs as eager would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)
RULES: dict[object, Rule] = {}


class Unsupported(Exception):
    """An operation cannot become a kernel; the message says why."""


def lowers(*targets: object, table: dict[object, Rule] = RULES) -> Callable[[R], R]:
    """Register a rule for FX targets."""

    def register(rule: R) -> R:
        for target in targets:
            assert target not in table, f"two rules for {target}"
            table[target] = rule
        return rule

    return register
