"""Orders of dynamo's graph, before AOTAutograd copies them to forward and backward.

The option `no_fuse` names operations by the user's lines (`model.py:10-20`) or by modules (`layers.*.mlp`); they get
the order that `onepass.no_fuse()` gives. Orders that contradict each other are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch.fx import GraphModule, Node

from ..errors import UnmetOrder
from ..ir.options import LINES, is_among
from ..ir.orders import NO_FUSE, orders_of
from ..ir.origins import frames_of, origin_of


def mark(graph: GraphModule, no_fuse: str) -> None:
    """Give the orders of the option to the nodes it names, and refuse those that contradict each other."""
    patterns = [p for part in no_fuse.split(",") if (p := part.strip())]
    for node in _calls(graph):
        if (found := next((p for p in patterns if _names(p, node)), None)) is not None:
            custom = {NO_FUSE: f'option no_fuse="{found}"'}
            node.meta["custom"] = {**custom, **(node.meta.get("custom") or {})}
        orders = orders_of(node)
        if orders.fuse and orders.no_fuse:
            reason = f"{orders.no_fuse} asks for a kernel of its own"
            raise UnmetOrder("onepass.fuse", origin_of(node).line, reason, "Take the operation out of one of both.")


def _calls(graph: GraphModule) -> Iterator[Node]:
    for part in (m for m in graph.modules() if isinstance(m, GraphModule)):
        yield from (n for n in part.graph.nodes if n.op.startswith("call"))


def _names(pattern: str, node: Node) -> bool:
    """Whether a pattern names an operation: a line that it was called from, or a module that it is part of."""
    if (lines := LINES.fullmatch(pattern)) is None:
        modules = (re.sub(r"^\w\['?\w+'?\]", "", path) for path, _ in (node.meta.get("nn_module_stack") or {}).values())
        return any(fnmatchcase(path, f"*.{pattern}") for path in modules)
    return any(is_among(lines, path, number) for path, number in frames_of(node))
