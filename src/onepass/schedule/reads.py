"""What statements read, for passes over finished statements."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Const
from ..ir.kernel import Operand, Statement, Var
from ..ir.poly import Poly

_NOT_READ = frozenset(("var", "parts", "body", "prologue"))


def reads(s: Statement) -> list[Operand]:
    """The operands of a statement; of a loop or a condition, not those of its body."""
    found: list[object] = []
    for name in s.__match_args__:
        value = getattr(s, name) if name not in _NOT_READ else None
        found += value if isinstance(value, tuple) else (value,)
    return [o for o in found if isinstance(o, Var | Const | Poly)]


def names(operands: Iterable[Operand]) -> set[str]:
    """The variables and axes in operands; a variable inside an index is a symbol of its name."""
    found: set[str] = set()
    for o in operands:
        found |= {o.name} if isinstance(o, Var) else o.names() if isinstance(o, Poly) else set()
    return found
