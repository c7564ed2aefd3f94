"""What users ask of values that backward may need: `onepass.save`, `onepass.recompute`.

Each is an alias of a value in the joint graph. The value is marked as the min-cut understands it, and prices decide on
all other values.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from ..errors import UnmetOrder
from ..ir.orders import RECOMPUTE, asked_of
from ..ir.orders import SAVE as ASKED_SAVE
from ..ir.origins import origin_of
from ..ir.plan import Decision
from .between import COMPUTE_AGAIN, SAVE
from .exact import compared_with_extremes, viewed

ASKED = "onepass_asked"  # who asked that a value is kept


def follow_hints(joint: GraphModule) -> list[Decision]:
    """Mark the values that users say something about; a decision on each that is computed again."""
    asked: dict[Node, Node] = {}
    decisions: list[Decision] = []
    compared = {value for value, _ in compared_with_extremes(joint.graph)}
    for alias in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
        what, value = asked_of(alias), viewed(alias)
        if what not in (ASKED_SAVE, RECOMPUTE) or value.op != "call_function":
            continue  # what is given is there in backward, whoever asks
        by = f"{what}, {origin_of(alias).line}"
        if (before := asked.setdefault(value, alias)) is not alias and asked_of(before) != what:
            raise UnmetOrder(
                what, origin_of(alias).line, f"{asked_of(before)} asks the contrary", "Take one of both out."
            )
        call = value.all_input_nodes[0] if value.target is operator.getitem else value
        if what == RECOMPUTE and value in compared:
            reason = "it is compared with its own maximum, and must be the same to the last bit"
            decisions.append(Decision(value.name, "backward", "asked", False, f"{by}: {reason}"))
            continue
        if what == RECOMPUTE:
            _require_equal(call, alias)
            call.meta |= COMPUTE_AGAIN
            decisions.append(Decision(value.name, "backward", "asked", True, f"computed again: {by}"))
        else:
            value.meta[ASKED] = by
        value.meta |= SAVE if what == ASKED_SAVE else COMPUTE_AGAIN
    return decisions


def _require_equal(value: Node, alias: Node) -> None:
    """Refuse to compute again what would not be the same."""
    if value.is_impure() or torch.Tag.nondeterministic_seeded in getattr(value.target, "tags", ()):
        reason = f"{value.target} would give another value"
        raise UnmetOrder(RECOMPUTE, origin_of(alias).line, reason, "Use onepass.save, or leave it to the compiler.")
