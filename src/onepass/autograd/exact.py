"""Graphs whose numbers must come out the same twice.

The gradient of a maximum compares its inputs, computed again, with the maximum that was saved: one last bit apart, and
no element is the largest. So where tensors of floats are compared, products and sums stay apart in all kernels of the
graph, and of the graph that was made with it; elsewhere a GPU may contract them.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

EXACT = "onepass_exact"
_aten = torch.ops.aten
_COMPARISONS = frozenset(getattr(_aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))


def needs_exact(graph_module: GraphModule) -> bool:
    """Whether this graph, or the other one of its pair, compares floats with floats."""
    return bool(graph_module.meta.get(EXACT)) or compares_floats(graph_module.graph)


def compares_floats(graph: Graph) -> bool:
    """Whether tensors of floats are compared."""
    return any(
        node.target in _COMPARISONS and all(isinstance(a, Node) and _is_float(a) for a in node.args)
        for node in graph.nodes
    )


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
