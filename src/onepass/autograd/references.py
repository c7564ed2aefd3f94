"""The number that a softmax subtracts from each row changes nothing, so that it has no gradient.

    m = amax(s), e = exp(s - m), p = e / sum(e)    ->    m + t divides e and its sum by exp(t): p is as it was

Where a program spells a softmax out, autograd sends the gradient of m, which is zero but for its rounding, to the
largest elements of s. Such maxima are found by what a number t added to m does to each value of forward: t is added to
the value some times, or the value is multiplied by exp(t) to some power. No result may change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..ir.callables import operators
from .between import PRODUCTS, later_nodes, matrices, nodes_reached
from .exact import compared_with_extremes, viewed
from .undefined import drop

aten = torch.ops.aten
_PASSES = operators("_to_copy clone alias view _unsafe_view reshape expand unsqueeze squeeze.default/dim/dims")
MOST_STEPS = 4  # from a maximum to what is subtracted
Change = tuple[bool, int]  # multiplied rather than added; how many times


def drop_references(joint: GraphModule) -> int:
    """Remove the gradients of maxima that change no result; how many there were."""
    later = later_nodes(joint)
    results = [n for n in joint.graph.output_node().all_input_nodes if n not in later]
    needed = nodes_reached(results, down=False)
    nothing: set[Node] = set()
    for value, comparison in compared_with_extremes(joint.graph):
        extremes = [n for n in map(viewed, comparison.all_input_nodes) if n is not value]
        if comparison not in needed and len(extremes) == 1 and _changes_nothing(extremes[0], results, needed):
            nothing |= _selected(comparison)
    drop(joint.graph, nothing)
    return len(nothing)


def _selected(comparison: Node) -> set[Node]:
    """The gradients of a maximum, shared out among the elements that are equal to it."""
    equal = {comparison, *(u for u in comparison.users if u.target is aten._to_copy.default)}
    counts = {u for n in equal for u in n.users if u.target is aten.sum.dim_IntList}
    counts |= {u for n in counts for u in n.users if u.target is aten._to_copy.default}
    found: set[Node] = set()
    for user in {u for n in equal for u in n.users} - equal - counts:
        shares = [viewed(n) for n in user.all_input_nodes if n not in equal]
        if user.target is not aten.mul.Tensor or not all(
            n.target is aten.div.Tensor and n.args[1] in counts for n in shares
        ):
            return set()
        found.add(user)
    return found


def _changes_nothing(root: Node, results: list[Node], needed: set[Node]) -> bool:
    """Whether no result changes with a number for each row that is added to a value, or to what is made of it alone."""
    for _ in range(MOST_STEPS):
        if root.meta["val"].shape[-1:] != (1,):
            return False
        changed = _changes(root, needed)
        if changed is not None and not any(r in changed for r in results):
            return True
        users = [u for u in root.users if u in needed]
        if len(users) != 1:
            return False
        (root,) = users
    return False


def _changes(root: Node, needed: set[Node]) -> dict[Node, Change] | None:
    """What a number added to each row of `root` does to values of forward; None where that is not known."""
    found: dict[Node, Change] = {root: (False, 1)}
    for node in root.graph.nodes:
        if node is root or node not in needed or not any(n in found for n in node.all_input_nodes):
            continue
        known, change = _change(node, found) if _keeps_rows(node, root) else (False, (False, 0))
        if not known:
            return None
        if change[1]:
            found[node] = change
    return found


def _keeps_rows(node: Node, root: Node) -> bool:
    """Whether what is summed over a dimension is one of `root`'s rows, and a view leaves rows as they are."""
    if node.target is aten.sum.dim_IntList or node.target in PRODUCTS:
        summed = node.all_input_nodes[0] if node.target not in PRODUCTS else matrices(node)[0]
        return bool(summed.meta["val"].shape[:-1].numel() == root.meta["val"].numel())
    if node.target not in _PASSES:
        return True
    before, after = (n.meta["val"].shape[-1:] for n in (node.all_input_nodes[0], node))
    return before == after or (1,) in (before, after)


def _change(node: Node, found: dict[Node, Change]) -> tuple[bool, Change]:
    """Whether it is known what happens to an operation's result, and what it is."""
    nothing: Change = (False, 0)
    operands = [a for a in node.args[:2] if not isinstance(a, list | tuple)]
    changes = [found.get(a, nothing) if isinstance(a, Node) else nothing for a in operands]
    (multiplied, times), (other, more) = (*changes, nothing, nothing)[:2]
    unknown, alike = (False, nothing), _are_aligned(node, [a for a in operands if a in found])
    match node.target:
        case target if target in PRODUCTS:
            left, right = matrices(node)
            fine = target in (aten.mm.default, aten.bmm.default) and right not in found and found[left][0]
            return (True, found[left]) if fine else unknown
        case target if target in _PASSES:
            return True, changes[0]
        case aten.neg.default:
            return True, (multiplied, times if multiplied else -times)
        case aten.exp.default if not multiplied:
            return True, (True, times)
        case aten.log.default if multiplied:
            return True, (False, times)
        case aten.sum.dim_IntList if multiplied and list(node.args[1]) in ([-1], [node.args[0].meta["val"].dim() - 1]):
            return True, (True, times)
        case aten.masked_fill.Scalar if node.args[0] in found and node.args[1] not in found:
            ends = node.args[2] in ((0,) if multiplied else (float("inf"), float("-inf")))
            return (True, changes[0]) if ends else unknown
        case aten.add.Tensor | aten.sub.Tensor if not node.kwargs and alike:
            if multiplied or other:  # a sum of what is all multiplied alike
                return (True, changes[0]) if changes[0] == changes[1] else unknown
            return True, (False, times + (more if node.target is aten.add.Tensor else -more))
        case aten.mul.Tensor | aten.mul.Scalar | aten.div.Tensor if alike:
            sign = -1 if node.target is aten.div.Tensor else 1
            if all(c == nothing or c[0] for c in changes):
                return True, (True, times + sign * more)
    return unknown


def _are_aligned(node: Node, changed: list[Any]) -> bool:
    """Whether rows of what changes are the rows of the result."""
    shape = node.meta["val"].shape
    return all(a.meta["val"].shape[:-1] == shape[:-1] for a in changed)
