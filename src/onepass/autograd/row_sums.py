"""Rules by which backward needs nothing of a whole row but what forward has reduced it to.

Each is about values between two products (`between.py`), and true of real numbers:

    row sums    sum_k p[q, k] (x vᵀ)[q, k] = sum_d x[q, d] (p v)[q, d]: both are x p v summed over k and d. Other factors
                of the sum, a dropout's mask, must be factors of what multiplies v
    normalised  exp(x - m) / l = exp(x - (m + log l)) for l > 0: one number for each row is read, and nothing divided
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..ir.callables import operators
from .between import PRODUCTS, SAVE, Between, call, matrices

aten = torch.ops.aten
_SHAPED = operators("view _unsafe_view reshape expand")
_VIEWS = _SHAPED + operators("unsqueeze squeeze.default/dim/dims alias")
_CASTS = operators("_to_copy clone detach")
_TURNS = operators("transpose.int permute t")
MOST_FACTORS = 32
Sums = dict[Node, tuple[Node, Node]]  # a row's sum -> the product among its factors, and the one it is replaced by


# --- row sums ---


def row_sums(between: Between) -> Sums:
    """Sums over rows of backward that are sums over the columns of forward's result."""
    found: Sums = {}
    for node in dict.fromkeys(u for n in between.backward for u in n.users if u.target is aten.sum.dim_IntList):
        body, dims = node.args[:2]
        if not isinstance(body, Node) or list(dims) not in ([-1], [body.meta["val"].dim() - 1]):
            continue
        factors = _factors(body, between)
        for leaf in [f for f in factors if f in between.backward and f.target in PRODUCTS and factors[f] == 1]:
            x, turned = matrices(leaf)
            others = factors - Counter({leaf: 1})
            for result in _products_with(turned):
                same = result not in between.later and x.meta["val"].shape == result.meta["val"].shape
                if same and _factors(matrices(result)[0], between) == others and _path(body, leaf) is not None:
                    found[node] = leaf, result
    return found


def replace_row_sums(joint: GraphModule, sums: Sums) -> None:
    """The rule "row sums". Views between a product and its row's sum are followed with one column."""
    for total, (leaf, result) in sums.items():
        body, dtype = total.args[0], total.meta["val"].dtype
        path = _path(body, leaf)
        assert path is not None
        with joint.graph.inserting_before(total):
            wide = [
                n if n.meta["val"].dtype is dtype else call(joint.graph, aten._to_copy.default, n, dtype=dtype, like=total)
                for n in (matrices(leaf)[0], result)
            ]  # fmt: skip
            product = call(joint.graph, aten.mul.Tensor, *wide, like=total)
            rows = call(joint.graph, aten.sum.dim_IntList, product, [-1], True, like=total)
            for view in path:
                rest = ([*view.args[1][:-1], 1],) if view.target in _SHAPED else view.args[1:]
                rows = call(joint.graph, view.target, rows, *rest, like=total)
            if len(total.args) < 3 or not total.args[2]:
                rows = call(joint.graph, aten.squeeze.dim, rows, -1, like=total)
        total.replace_all_uses_with(rows)
        joint.graph.erase_node(total)


def _path(node: Any, leaf: Node) -> list[Node] | None:
    """The views from a product to a sum's terms, the product's first; None where a row is not kept together."""
    if node is leaf:
        return []
    if not isinstance(node, Node) or not node.args:
        return None
    factors = node.args[:2] if node.target is aten.mul.Tensor else node.args[:1]
    before = next((p for a in factors if (p := _path(a, leaf)) is not None), None)
    if before is None or node.target not in _VIEWS:
        return before if node.target in _THROUGH else None
    return [*before, node] if _keeps_rows(node) else None


_THROUGH = _CASTS + operators("mul.Tensor mul.Scalar div.Tensor masked_fill.Scalar")


def _keeps_rows(view: Node) -> bool:
    """Whether the last dimension is as it was."""
    before, after = view.args[0].meta["val"], view.meta["val"]
    return before.shape[-1] == after.shape[-1] and (
        view.target in _SHAPED or all(0 <= d % after.dim() < before.dim() - 1 for d in _dims(view))
    )


def _dims(view: Node) -> Iterable[int]:
    dims = view.args[1] if len(view.args) > 1 else ()
    return dims if isinstance(dims, list | tuple) else [dims]


def _factors(value: Any, between: Between) -> Counter[Any]:
    """The factors of a product of values, through casts and views of large ones; all numbers as one."""
    found: Counter[Any] = Counter()
    scale, stack = 1.0, [value]
    while stack and found.total() <= MOST_FACTORS:
        node = stack.pop()
        if not isinstance(node, Node):
            scale *= float(node)
            continue
        match node.target:
            case target if target in _CASTS or (target in _VIEWS and between.is_large(node) and _keeps_rows(node)):
                stack.append(node.args[0])
            case aten.mul.Tensor | aten.mul.Scalar:
                stack += node.args[:2]
            case aten.div.Tensor if isinstance(node.args[1], int | float):
                stack.append(node.args[0])
                scale /= node.args[1]
            case aten.masked_fill.Scalar if node.args[2] == 0:
                stack.append(node.args[0])
                found["kept", node.args[1]] = 1  # twice is once
            case _:
                found[node] += 1
    found["scale", f"{scale:.6g}"] += 1
    return found


def _products_with(turned: Node) -> Iterable[Node]:
    """Products whose second matrix is this one with rows and columns exchanged."""
    base, flipped = _oriented(turned)
    stack, seen = [base], {base}
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.target in PRODUCTS and matrices(user)[1] is node and _oriented(node)[1] != flipped:
                yield user
            elif user.target in _TURNS and user not in seen and _oriented(user)[0] is base:
                seen.add(user)
                stack.append(user)


def _oriented(matrix: Node) -> tuple[Node, bool]:
    """A matrix before its last two dimensions were exchanged, and whether they are."""
    flipped = False
    while matrix.target in _TURNS:
        rank = matrix.meta["val"].dim()
        order = list(range(rank))
        if matrix.target is aten.permute.default:
            order = [d % rank for d in matrix.args[1]]
        else:
            a, b = (d % rank for d in matrix.args[1:3] or (0, 1))
            order[a], order[b] = order[b], order[a]
        if order != [*range(rank - 2), rank - 1, rank - 2]:
            break
        matrix, flipped = matrix.args[0], not flipped
    return matrix, flipped


# --- normalised ---


def normalise(joint: GraphModule, between: Between) -> list[Node]:
    """The rule "normalised", for what backward reads; the new numbers of rows that are not to be saved."""
    made: dict[Node, Node] = {}
    rows: list[Node] = []
    for node in sorted(between.forward):
        if node.target is aten.div.Tensor and _is_normalised(node, between):
            made[node] = _over_sum(joint, node, between, rows)
        elif found := [made[n] for n in node.all_input_nodes if n in made]:
            with joint.graph.inserting_after(max(node, *found)):
                made[node] = joint.graph.node_copy(node, lambda n: made.get(n, n))
    for node, new in made.items():
        for user in [u for u in node.users if u in between.later]:
            user.replace_input_with(node, new)
    for new in reversed(made.values()):
        if new.users:
            between.forward[new] = None
        else:
            joint.graph.erase_node(new)
    return rows


def _is_normalised(quotient: Node, between: Between) -> bool:
    """Whether it is an exponential over a sum of exponentials that backward reads, and not the exponential itself."""
    exponential, total = quotient.args[:2]
    if not isinstance(exponential, Node) or not isinstance(total, Node) or exponential.target is not aten.exp.default:
        return False
    if any(u in between.later for u in exponential.users) or between.is_large(total) or not _is_positive(total):
        return False
    dtype = quotient.meta["val"].dtype
    return dtype is total.meta["val"].dtype is exponential.meta["val"].dtype and dtype in (torch.float32, torch.float64)


def _over_sum(joint: GraphModule, quotient: Node, between: Between, rows: list[Node]) -> Node:
    """exp(x - m) / l as exp(x - (m + log l))."""
    (exponent,), total = quotient.args[0].args, quotient.args[1]
    terms = exponent.args if exponent.target is aten.sub.Tensor and len(exponent.args) == 2 else ()
    x, top = terms if terms and isinstance(terms[1], Node) and not between.is_large(terms[1]) else (exponent, None)
    at = quotient

    def new(target: Any, *args: Any) -> Node:
        nonlocal at
        with joint.graph.inserting_after(at):
            at = call(joint.graph, target, *args, like=quotient)
        return at

    shift = new(aten.log.default, total)
    shift = shift if top is None else new(aten.add.Tensor, top, shift)
    shift.meta |= SAVE
    # Never -inf, so that a term at a position that a mask rules out is zero; or NaN, as all of its row is.
    rows.append(low := new(aten.eq.Scalar, shift, -math.inf))
    rows.append(safe := new(aten.masked_fill.Scalar, shift, low, math.nan))
    between.forward[less := new(aten.sub.Tensor, x, safe)] = None
    return new(aten.exp.default, less)


def _is_positive(node: Any) -> bool:
    """A sum of exponentials, or of several such sums."""
    if not isinstance(node, Node):
        return bool(node >= 0)
    match node.target:
        case target if target in _CASTS or target in _VIEWS or target is aten.sum.dim_IntList:
            return _is_positive(node.args[0])
        case aten.exp.default:
            return True
        case aten.add.Tensor:
            return all(_is_positive(a) for a in node.args[:2])
    return False
