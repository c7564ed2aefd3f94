"""Orders: what a user asks of single operations and values, carried from the program to the plan.

An order is an entry of `node.meta["custom"]`, which torch copies from dynamo's graph to the operations of forward and
of backward. Orders about a value (`keep`, `save`, `recompute`) are entries of an alias of it. `onepass.steering` writes
them; lowering puts the orders of an operation on its statements, where the planner reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

FUSE, NO_FUSE, VALUE = "onepass fuse ", "onepass no_fuse", "onepass value"  # FUSE is followed by the region's name
KEEP, SAVE, RECOMPUTE = "onepass.keep", "onepass.save", "onepass.recompute"
BOTH, FORWARD = "both", "forward"  # the graphs in which a region shares a kernel


@dataclass(frozen=True, slots=True)
class Orders:
    """`fuse`: the outermost region that shares a kernel. `no_fuse`: who asked for a kernel of its own."""

    fuse: str = ""
    no_fuse: str = ""


NO_ORDERS = Orders()


def orders_of(node: Node) -> Orders:
    """What is asked of an operation."""
    custom = node.meta.get("custom") or {}
    fuse = next((name.removeprefix(FUSE) for name in custom if str(name).startswith(FUSE)), "")
    no_fuse = custom.get(NO_FUSE, "")
    return Orders(fuse, no_fuse) if fuse or no_fuse else NO_ORDERS


def asked_of(node: Node) -> str:
    """What is asked of the value that a node is an alias of; empty for all other nodes."""
    custom = node.meta.get("custom")
    return str(custom.get(VALUE, "")) if custom and node.target is torch.ops.aten.alias.default else ""


def is_asked(node: Node) -> bool:
    """Whether a user wants an operation to be as the program says, or its value in memory."""
    return orders_of(node) is not NO_ORDERS or asked_of(node) in (KEEP, SAVE)


def only_forward(node: Node) -> None:
    """Drop the orders of a node of backward that are for forward alone."""
    if custom := node.meta.get("custom"):
        kept = {k: v for k, v in custom.items() if not (str(k).startswith(FUSE) and v == FORWARD)}
        node.meta["custom"] = kept
