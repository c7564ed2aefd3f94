"""Values between two products of a joint graph, larger than any matrix that these read or make otherwise.

S = q kᵀ, P = softmax(S), O = P v: S, P and what lies between them, of forward and of backward
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..analysis.reach import reached
from ..ir.callables import operators

# What the min-cut is told of a node.
SAVE = {"recompute": CheckpointPolicy.MUST_SAVE, "ac_graph_id": 0}
COMPUTE_AGAIN = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
PRODUCTS = dict.fromkeys(operators("bmm mm"), 0) | dict.fromkeys(operators("baddbmm addmm"), 1)  # the first matrix


@dataclass(slots=True)
class Between:
    """Values of the size of a first product: of forward, up to another product, and of backward."""

    first: Node
    later: set[Node]  # all that depends on tangents
    forward: dict[Node, None] = field(default_factory=dict)
    backward: dict[Node, None] = field(default_factory=dict)

    def is_large(self, node: Node) -> bool:
        """Whether a value is about as large: a row may have a few more positions."""
        return 2 * size_of(node) > size_of(self.first)

    @property
    def products(self) -> list[Node]:
        """The products among the values."""
        return [n for n in (*self.forward, *self.backward) if n.target in PRODUCTS]


def products_between(joint: GraphModule) -> Iterator[Between]:
    """Every growing product that another product of forward reads, with all that lies between.

    The graph may change from one to the next.
    """
    later, count = later_nodes(joint), len(joint.graph.nodes)
    for node in [n for n in joint.graph.nodes if n.target in PRODUCTS and _grows(n)]:
        if count != len(joint.graph.nodes):
            later, count = later_nodes(joint), len(joint.graph.nodes)
        if node in later:
            continue
        found = Between(node, later)
        found.forward = _spread([node], found)
        ends = [u for n in found.forward for u in n.users if u.target in PRODUCTS and u not in found.later]
        if any(size_of(u) < size_of(node) for u in ends):
            users = (u for n in found.forward for u in n.users if u.target not in PRODUCTS)
            start = [u for u in users if u in found.later and found.is_large(u)]
            found.backward = _spread(start, found, backward=True)
            yield found


def _spread(start: Iterable[Node], between: Between, backward: bool = False) -> dict[Node, None]:
    """What is made of values and is large, up to the next product; of backward also what they are made of."""

    def beside(node: Node) -> Iterator[Node]:
        before = node.all_input_nodes if backward and node.target not in PRODUCTS else ()
        for n in (*(u for u in node.users if u.target not in PRODUCTS), *before):
            if n.op == "call_function" and (n in between.later) == backward and between.is_large(n):
                yield n

    return reached(start, beside)


def later_nodes(joint: GraphModule) -> set[Node]:
    """What depends on a tangent."""
    tangents = (p for p in joint.graph.find_nodes(op="placeholder") if "tangents" in str(p.target))
    return nodes_reached(tangents) - {joint.graph.output_node()}


def nodes_reached(start: Iterable[Node], ends: Collection[Node] = (), down: bool = True) -> set[Node]:
    """Nodes below or above these, they among them; none beyond the ends."""
    begin, end = set(start), set(ends)
    return {*reached(begin - end, lambda n: (n.users.keys() if down else {*n.all_input_nodes}) - end)}


def matrices(product: Node) -> tuple[Node, Node]:
    """The operands of a product."""
    at = PRODUCTS[product.target]
    left, right = product.args[at : at + 2]
    assert isinstance(left, Node) and isinstance(right, Node)
    return left, right


def depth(product: Node) -> int:
    """How many terms each sum of a product has."""
    return hint(matrices(product)[0].meta["val"].shape[-1])


def _grows(product: Node) -> bool:
    """Whether a product's result is larger than each of its matrices."""
    return size_of(product) > max(map(size_of, matrices(product)))


def size_of(node: Node) -> int:
    """Elements of a value; none where it is no tensor."""
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, torch.Tensor) else 0


def bytes_of(node: Node) -> int:
    """Bytes of a value, or of the results of a call together."""
    value = node.meta.get("val")
    results = value if isinstance(value, tuple | list) else (value,)
    return sum(hint(v.numel()) * v.element_size() for v in results if isinstance(v, torch.Tensor))


def hint(size: Any) -> int:
    """A size, or what it is assumed to be."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def call(graph: Graph, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
    """A new operation where nodes are inserted now, of the place that another one has in the user's program."""
    node = valued(graph.call_function(target, args, kwargs), like.meta["val"].fake_mode)
    return with_place(node, like)


def valued(node: Node, mode: Any) -> Node:
    """A new operation with the value it has: a tensor without memory, of that mode."""
    values, options = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = node.target(*values, **options)  # type: ignore[operator]
    return node


def with_place(node: Node, like: Node) -> Node:
    """A node with the place that another one has in the user's program."""
    node.meta |= {k: v for k, v in like.meta.items() if k in ("stack_trace", "nn_module_stack", "custom")}
    return node
