"""Backward where nobody differentiates some of the results: their tangents are not tensors of zeros, they are nothing.

A language model returns its loss and its logits; `loss.backward()` leaves the logits' tangent out. What is linear in
nothing is nothing, a sum with nothing is its other term, and everything else gets zeros, written in the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from ..ir.callables import operators
from .scaled import SCALED

aten = torch.ops.aten
# Each result is linear in every operand: nothing if one of them is.
_LINEAR = (
    SCALED,
    *operators("mul.Tensor/Scalar mm bmm neg clone _to_copy alias detach view _unsafe_view reshape permute t"),
    *operators("transpose.int expand unsqueeze squeeze.default/dim/dims select.int slice.Tensor"),
    *operators("sum.default/dim_IntList mean.default/dim constant_pad_nd split.Tensor split_with_sizes unbind.int"),
    *operators("div.Scalar diagonal flip roll tril triu index.Tensor index_select gather cumsum"),
)
_SUMS = operators("add.Tensor sub.Tensor")
_ALL = operators("cat stack")  # nothing if all operands are


def tangents_of(backward: GraphModule) -> list[int]:
    """Positions of the tangents among the inputs of a backward graph; none where any size is known at run time only."""
    inputs = backward.graph.find_nodes(op="placeholder")
    values = [p.meta.get("val") for p in inputs]
    sizes = [n for x in values for n in (x.shape if isinstance(x, torch.Tensor) else [x])]
    if any(isinstance(n, torch.SymInt) for n in sizes):
        return []
    return [k for k, p in enumerate(inputs) if "tangents" in str(p.target)]


def without_tangents(backward: GraphModule, missing: Collection[int]) -> GraphModule:
    """The graph of the other inputs, where those at these positions are undefined; gradients may be, too."""
    graph = Graph()
    closing = graph.output(graph.graph_copy(backward.graph, {}))
    closing.meta = dict(backward.graph.output_node().meta)
    inputs = graph.find_nodes(op="placeholder")
    undefined = {inputs[k] for k in missing}
    _spread(graph, undefined)
    closing.args = torch.fx.node.map_arg(closing.args, lambda n: None if n in undefined else n)
    _erase(graph, undefined)
    made = GraphModule(backward, graph)
    made.meta.update(backward.meta)
    return made


def drop(graph: Graph, nothing: set[Node]) -> None:
    """Values of a graph that are nothing leave it; where they are results, they are zeros."""
    _spread(graph, nothing)
    closing = graph.output_node()
    for node in nothing.intersection(closing.all_input_nodes):
        closing.replace_input_with(node, _zeros(graph, closing, node))
    _erase(graph, nothing)


def _spread(graph: Graph, undefined: set[Node]) -> None:
    """What is made of nothing is nothing, or does without it; such values are added to `undefined`."""
    for node in list(graph.nodes)[:-1]:
        if node in undefined or not (found := undefined.intersection(node.all_input_nodes)):
            continue
        if _is_nothing(node, undefined):
            undefined.add(node)
        elif (term := _other_term(node, undefined)) is not None:
            node.replace_all_uses_with(term)
        else:
            for operand in found:
                node.replace_input_with(operand, _zeros(graph, node, operand))


def _erase(graph: Graph, undefined: set[Node]) -> None:
    for node in reversed(graph.nodes):
        if node in undefined or (node.op == "call_function" and not node.users and not node.is_impure()):
            graph.erase_node(node)


def _is_nothing(node: Node, undefined: set[Node]) -> bool:
    first, *rest = node.args
    if node.target in _LINEAR or (node.target in _ALL and undefined.issuperset(node.all_input_nodes)):
        return True
    if node.target in _SUMS:
        return first in undefined and rest[0] in undefined
    if node.target in (operator.getitem, aten.div.Tensor):
        return first in undefined
    return bool(gradients := _gradients(node)) and undefined.issuperset(gradients)


def is_linear_in(node: Node, tangents: set[Node]) -> bool:
    """Whether a result is linear in those of its operands that depend on tangents."""
    given = [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node) and x in tangents]
    if node.target in _SUMS:
        return tangents.issuperset(node.args[:2])  # type: ignore[arg-type]
    if node.target in _ALL:
        return tangents.issuperset(node.all_input_nodes)
    if node.target in (operator.getitem, aten.div.Tensor) or node.target in _LINEAR:
        return len(given) == 1 and (node.target in _LINEAR or given[0] is node.args[0])
    gradients = _gradients(node)
    return bool(gradients) and set(given) <= set(gradients)


def _gradients(node: Node) -> list[Node]:
    """What one of torch's derivatives is linear in, the first operand among it; empty for everything else."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not (schema.name.startswith("aten::") and "backward" in schema.name):
        return []
    named = zip(schema.arguments, node.args, strict=False)  # arguments left out have their defaults
    return [x for argument, x in named if argument.name.startswith("grad") and isinstance(x, Node)]


def _other_term(node: Node, undefined: set[Node]) -> Node | None:
    """What a sum with nothing is, where that is a tensor of the same kind."""
    if node.target not in _SUMS:
        return None
    first, second = node.args[:2]
    if second not in undefined:
        first = None if node.target is aten.sub.Tensor or node.kwargs else second
    if not isinstance(first, Node):
        return None
    mine, terms = node.meta["val"], first.meta["val"]
    alike = (mine.dtype, mine.shape, mine.stride()) == (terms.dtype, terms.shape, terms.stride())
    return first if alike else None


def _zeros(graph: Graph, reader: Node, operand: Node) -> Node:
    value = operand.meta["val"]
    with graph.inserting_before(reader):
        options = {"dtype": value.dtype, "device": value.device}
        node = graph.call_function(aten.full.default, (list(value.shape), 0), options)
    node.meta = dict(operand.meta)
    return node
