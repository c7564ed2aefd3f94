"""Equal values of a joint graph become one, so that the min-cut does not save or recompute the same thing twice.

Torch has this step too, behind an import of Inductor that takes longer than compiling most programs.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ..ir.orders import asked_of, orders_of

_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def merge_equal(graph: Graph) -> None:
    """Readers of a repeated operation read its first result."""
    returned = {s for n in graph.output_node().all_input_nodes if (s := _storage(n)) is not None}
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _storage(node) in returned:
            continue  # results that eager keeps apart stay apart
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return  # only the updates of inputs are left
        key = _key(node)
        if key is None:
            continue
        if (same := first.setdefault(key, node)) is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except NotImplementedError:
        return None


def _key(node: Node) -> Any:
    """Equal for equal values; None where a value is its own: drawn at random, uninitialised, of unknown size."""
    if isinstance(node.target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in node.target.tags or node.target.namespace == "onepass":
            return None
        if node.target.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_strided):
            return None
    elif node.target is not operator.getitem:
        return None
    if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    leaves, layout = pytree.tree_flatten((node.args, node.kwargs))
    if any(not isinstance(leaf, (Node, *_PLAIN)) for leaf in leaves):
        return None
    marks = (node.meta.get("recompute"), node.meta.get("ac_graph_id"), orders_of(node), asked_of(node))
    exact = (repr(leaf) if isinstance(leaf, float | complex) else leaf for leaf in leaves)  # 0.0 is not -0.0
    return node.target, tuple((type(leaf), leaf) for leaf in exact), str(layout), marks
