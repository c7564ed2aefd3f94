"""Graphs whose numbers must come out the same twice.

The gradient of a maximum compares its inputs with the maximum: one last bit apart, and no element is the largest. So
what a maximum is taken of is saved, not computed again. And where tensors of floats are compared, products and sums
stay apart in all kernels of the graph, and of the graph that was made with it; elsewhere a GPU may contract them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir.callables import operators

EXACT = "onepass_exact"
_EQUALITIES = operators("eq.Tensor ne.Tensor")
_COMPARISONS = _EQUALITIES + operators("lt.Tensor le.Tensor gt.Tensor ge.Tensor")
_EXTREMES = operators("amax amin max min")
_VIEWS = operators("view _unsafe_view unsqueeze squeeze.default/dim/dims expand permute transpose.int t alias")


def needs_exact(graph_module: GraphModule) -> bool:
    """Whether this graph, or the other one of its pair, compares floats with floats."""
    return bool(graph_module.meta.get(EXACT)) or compares_floats(graph_module.graph)


def compares_floats(graph: Graph) -> bool:
    """Whether tensors of floats are compared."""
    return any(
        node.target in _COMPARISONS and all(isinstance(a, Node) and _is_float(a) for a in node.args)
        for node in graph.nodes
    )


def compared_with_extremes(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Values that are compared with a maximum or minimum of themselves, each with the comparison."""
    for target in _EQUALITIES:
        for node in graph.find_nodes(op="call_function", target=target):
            first, second = (viewed(a) for a in node.args[:2])
            for value, extreme in ((first, second), (second, first)):
                if not isinstance(value, Node) or not isinstance(extreme, Node) or value.op != "call_function":
                    continue
                if extreme.target in _EXTREMES and viewed(extreme.args[0]) is value:
                    yield value, node


def viewed(value: Any) -> Any:
    """What a value is a view of."""
    while isinstance(value, Node) and value.target in _VIEWS:
        value = value.args[0]
    return value


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
