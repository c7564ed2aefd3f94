"""The joint graph becomes a forward and a backward graph: what is saved, what is computed again.

Predicted times decide on the decomposed joint graph (`saved.py`), and torch's min-cut carries it out; where the program
has checkpoint regions, or no times are known, its own rules decide. Saving an input of the forward graph is free (its
owner keeps it), so norms and losses save their statistics, not a second full-size tensor. Random values are drawn again
from their saved seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from ..ir.orders import only_forward
from ..ir.plan import Decision
from ..ir.target import Target
from .between import COMPUTE_AGAIN, SAVE, products_between
from .exact import EXACT, compared_with_extremes, compares_floats, viewed
from .hints import ASKED, follow_hints
from .merge import merge_equal
from .recomputed import recompute_between_products
from .row_loops import DECISIONS, loop_results
from .torch_private import functorch_config, min_cut_rematerialization_partition

SAVED = "onepass_saved"
# What marks which values are kept, given the joint graph and how many results are forward's: why, and the decisions.
Saving = Callable[[GraphModule, int], tuple[dict[str, str], list[Decision]]]
# One of the min-cut's rules of thumb guesses that values after a long chain of fusible operations will not be fused
# again. Here point-wise work is recomputed inside whatever kernel reads it. Its rule against recomputing values used
# far apart stays: without it, backward would add up a residual stream again from what each layer added.
# Equal values are merged before.
_RECOMPUTE = {"ban_recompute_long_fusible_chains": False, "cse": False}
DIVIDED = "the program says itself what is kept (checkpoint, memory budget of a region); torch's min-cut follows it"


def partition(
    joint: GraphModule,
    inputs: Any,
    target: Target | None = None,
    strict: bool = False,
    loops: Callable[[GraphModule], object] | None = None,
    saving: Saving | None = None,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """(forward, backward) of a joint graph. `target`: the chip whose kernels may compute products again, if any.

    `loops`: what puts losses of products into loops over rows; `saving`: what says which values are kept.
    """
    divided = any(map(_is_divided, joint.graph.nodes))
    _drop_detach(joint)
    _keep_overwritten(joint)
    for node in joint.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "onepass":
            continue
        drawn = node.target is torch.ops.onepass.seed.default
        node.meta |= SAVE if drawn else COMPUTE_AGAIN
    merge_equal(joint.graph)
    if loops is not None:
        loops(joint)
        for node in loop_results(joint.graph):
            node.meta |= SAVE
    decisions = follow_hints(joint)
    cut = functools.partial(_cut, joint, inputs, None if divided else saving, strict, divided, **kwargs)
    if target is None or not any(between.backward for between in products_between(joint)):
        return cut(decisions=decisions)
    before = Graph()
    before.output(before.graph_copy(joint.graph, {})).meta = dict(joint.graph.output_node().meta)
    again = _recomputed(joint, target, strict, before)
    try:
        return cut(decisions=[*decisions, *again])
    except Exception as error:
        if strict or not any(d.accepted for d in again):
            raise
        joint.graph = before
        reason = f"not computed again: {type(error).__name__}: {error}"
        return cut(decisions=[*decisions, Decision("graph", "backward", "recompute", False, reason)])


def _cut(
    joint: GraphModule,
    inputs: Any,
    saving: Saving | None,
    strict: bool,
    divided: bool,
    decisions: list[Decision],
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """Forward and backward, when the marks are made."""
    exact = compares_floats(joint.graph)
    for value, comparison in compared_with_extremes(joint.graph):
        value.meta |= SAVE
        comparison.meta |= COMPUTE_AGAIN
    primals = inputs[0] if isinstance(inputs, tuple | list) and len(inputs) == 2 else ()
    kwargs["static_lifetime_input_indices"] = list(range(len(primals)))
    outputs = kwargs["num_fwd_outputs"]
    why: dict[str, str] = {}
    if saving is not None:
        joint.graph.eliminate_dead_code()
        why, chosen = _chosen(saving, joint, outputs, strict)
        decisions += chosen
    elif divided:
        decisions.append(Decision("graph", "backward", "memory", False, DIVIDED))
    with functorch_config.patch(_RECOMPUTE | ({"activation_memory_budget": 1.0} if why else {})):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    for node in backward.graph.nodes:
        only_forward(node)
    forward.meta[EXACT] = backward.meta[EXACT] = exact
    backward.meta[DECISIONS] = decisions
    forward.meta[DECISIONS] = joint.meta.get(DECISIONS, [])
    forward.meta[SAVED] = [(n, n.meta.get(ASKED) or why.get(n.name, "")) for n in _kept(forward, outputs)]
    return forward, backward


def _is_divided(node: Node) -> bool:
    """Whether the program says of an operation if its result is kept."""
    return "recompute" in node.meta or "_region_activation_memory_budget" in (node.meta.get("custom") or ())


def _chosen(saving: Saving, joint: GraphModule, outputs: int, strict: bool) -> tuple[dict[str, str], list[Decision]]:
    """What is kept, and why; where that fails torch's own rules decide."""
    try:
        return saving(joint, outputs)
    except Exception as error:
        if strict:
            raise
        return {}, [Decision("graph", "backward", "memory", False, f"{type(error).__name__}: {error}")]


def _recomputed(joint: GraphModule, target: Target, strict: bool, before: Graph) -> list[Decision]:
    """The decisions on products that backward computes again; where that fails the graph is as it was before."""
    try:
        return recompute_between_products(joint, target)
    except Exception as error:
        if strict:
            raise
        joint.graph = before
        return [Decision("graph", "graph", "recompute", False, f"{type(error).__name__}: {error}")]


def _drop_detach(joint: GraphModule) -> None:
    """A detach means nothing inside a graph, and the min-cut would take it for a reader that needs memory."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            joint.graph.erase_node(node)


def _keep_overwritten(joint: GraphModule) -> None:
    """Backward must not read an input that is overwritten before: what it needs is a copy of the old value.

    Forward overwrites some, and torch others when forward has run: these are described by what is written into them.
    An input whose shape alone is changed (`x.t_()`) is described by a view of itself, which stays that.
    """
    output = joint.graph.output_node()
    described = pytree.tree_leaves(output.meta.get("desc"))
    written = [getattr(of, "mutated_input", joint) for of in described]
    results = pytree.tree_leaves(output.args[0])
    shapes = {r for r, of in zip(results, described, strict=False) if hasattr(of, "mutated_input")}
    for target in joint.graph.find_nodes(op="placeholder"):
        updates = [u for u in target.users if u.target is torch.ops.aten.copy_.default and u.args[0] is target]
        readers = [user for user in target.users if user not in updates]
        if not readers or not (updates or target.meta.get("desc") in written):
            continue
        with joint.graph.inserting_after(target):
            old = joint.graph.call_function(torch.ops.aten.clone.default, (target,))
        old.meta = target.meta | SAVE
        for reader in readers:
            reader.replace_input_with(target, old)
        for view in (s for s in shapes if isinstance(s, Node) and s is not old and viewed(s) is old):
            output.replace_input_with(view, _same_view(view, old, target))


def _same_view(view: Node, of: Node, instead: Node) -> Node:
    """A view, and the views between, of another tensor."""
    source = view.args[0]
    assert isinstance(source, Node)
    made = instead if source is of else _same_view(source, of, instead)
    with view.graph.inserting_after(view):
        return view.graph.node_copy(view, lambda n: made if n is source else n)


def _kept(forward: GraphModule, outputs: int) -> list[Node]:
    """What is kept for backward that is neither an input nor a result of the forward graph."""
    results = forward.graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    returned = {id(viewed(n)) for n in results[:outputs]}
    found = [n for n in results[outputs:] if isinstance(n, Node) and isinstance(n.meta.get("val"), torch.Tensor)]
    return [n for n in found if (base := viewed(n)).op != "placeholder" and id(base) not in returned]
