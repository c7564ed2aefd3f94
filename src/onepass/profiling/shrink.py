"""The smallest part of a graph that still fails: its shortest beginning, of which the shortest end.

A part's inputs are those of the graph, or tensors like the values that it does not compute any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

Part = tuple[GraphModule, list[Any]]


def shrunk(graph: GraphModule, inputs: Sequence[Any], fails: Callable[[GraphModule, list[Any]], bool]) -> Part:
    """A part that fails, and its inputs; the whole graph where no smaller one does."""
    given = dict(zip((n for n in graph.graph.nodes if n.op == "placeholder"), inputs, strict=True))
    calls = [n for n in graph.graph.nodes if n.op.startswith("call")]
    found: Part = (graph, list(inputs))

    def attempt(nodes: list[Node]) -> bool:
        nonlocal found
        try:
            part = _part(graph, nodes, given)
            if part is None or not fails(*part):
                return False
        except Exception:  # what cannot be taken apart stays together
            return False
        found = part
        return True

    low, high = 0, len(calls)  # calls before `low` do not fail; all do
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if attempt(calls[:middle]) else (middle, high)
    if high < len(calls) or attempt(calls):
        count = 1
        while count < high and not attempt(calls[high - count : high]):
            count *= 2
    return found


def _part(graph: GraphModule, nodes: list[Node], given: dict[Node, Any]) -> Part | None:
    """The nodes as a graph whose result is the last one's; None where that is no tensor."""
    own, inputs = Graph(), []
    places: dict[Node, Node] = {}

    def place(node: Node) -> Node:
        if node not in places and node.op == "get_attr":
            places[node] = own.node_copy(node)
        elif node not in places:
            value = given[node] if node in given else _like(node.meta["example_value"])
            places[node] = own.placeholder(node.name)
            inputs.append(value)
        return places[node]

    inside = _needed(nodes)
    outer = dict.fromkeys(a for n in nodes if n in inside for a in n.all_input_nodes if a not in inside)
    for node in outer:
        place(node)
    for node in nodes:
        if node in inside:
            places[node] = own.node_copy(node, place)
    if not isinstance(nodes[-1].meta.get("example_value"), torch.Tensor):
        return None
    own.output((places[nodes[-1]],))
    return GraphModule(graph, own), inputs


def _needed(nodes: list[Node]) -> set[Node]:
    """Those that the last one needs."""
    needed = {nodes[-1]}
    for node in reversed(nodes):
        if node in needed:
            needed |= {a for a in node.all_input_nodes if a in nodes}
    return needed


def _like(value: Any) -> torch.Tensor:
    """A tensor of the same layout; anything else cannot be an input."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"no tensor: {type(value).__name__}")
    shape, strides = ([int(n) for n in sizes] for sizes in (value.shape, value.stride()))
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).zero_()
    return made.requires_grad_(value.requires_grad and value.is_floating_point())
