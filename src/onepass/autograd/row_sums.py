"""Rules by which backward needs nothing of a whole row but what forward has reduced it to.

Each is about values between two products (`between.py`), and true of real numbers:

    row sums    sum_k p[q, k] (x vᵀ)[q, k] = sum_d x[q, d] (p v)[q, d]: both are x p v summed over k and d. Other
                factors of the sum, a dropout's mask, must be factors of what multiplies v
    normalised  exp(x - m) / l = exp(x - (m + log l)) for l > 0: one number for each row is read, and nothing divided
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir.callables import operators
from .between import Between, call, matrices

aten = torch.ops.aten
_VIEWS = operators("view _unsafe_view reshape expand unsqueeze squeeze.default/dim/dims alias")
_CASTS = operators("_to_copy clone detach")
_PLAIN = operators("bmm mm")  # products without a sum beside
_TURNS = operators("transpose.int permute t")
MOST_TERMS = 4  # of a sum that is taken apart


# --- row sums ---


@dataclass(frozen=True, slots=True)
class _Term:
    """A number times powers of values: `large` ones, and others that have one number for each row."""

    scale: float
    large: frozenset[tuple[Any, int]]
    rows: frozenset[tuple[Node, int]] = frozenset()

    def __mul__(self, other: _Term) -> _Term:
        large, rows = (_powers((*a, *b)) for a, b in ((self.large, other.large), (self.rows, other.rows)))
        return _Term(self.scale * other.scale, large, rows)

    def inverse(self) -> _Term:
        """One over it."""
        large, rows = (frozenset((n, -k) for n, k in powers) for powers in (self.large, self.rows))
        return _Term(1 / self.scale, large, rows)


Terms = dict[Node, list[_Term]]
Sums = dict[Node, list[tuple[_Term, Node, Node | None]]]


def _powers(factors: Iterable[tuple[Any, int]]) -> frozenset[tuple[Any, int]]:
    total: Counter[Any] = Counter()
    for factor, power in factors:
        total[factor] += power
    once = (isinstance(f, tuple) for f in total)  # a mask twice is a mask once
    return frozenset((f, 1 if mask else k) for (f, k), mask in zip(total.items(), once, strict=True) if k)


def row_sums(between: Between) -> Sums:
    """Sums over rows of backward that are sums over the columns of a result, or made of sums that forward has.

    Each term is a row's factors, with a product in backward and the result it stands for, or a sum of forward.
    """
    found: Sums = {}
    terms: Terms = {}
    for node in sorted({*between.forward, *between.backward}):  # what a value is made of comes before it
        _terms(node, between, terms)
    users = (u for n in between.backward for u in n.users if u.target is aten.sum.dim_IntList)
    for total in sorted(set(users)):
        body, dims = total.args[:2]
        last = isinstance(body, Node) and list(dims) in ([-1], [body.meta["val"].dim() - 1])
        if last and _row_shape(total.graph, body) is not None:
            parts = [_summed(term, total, between, terms) for term in _terms(body, between, terms)]
            known = [part for part in parts if part is not None]
            if known and len(known) == len(parts):
                found[total] = known
    return found


def _summed(term: _Term, total: Node, between: Between, terms: Terms) -> tuple[_Term, Node, Node | None] | None:
    """The sum of one term over a row."""
    shape = [*total.args[0].meta["val"].shape[:-1], 1]

    def beside(weights: list[_Term], own: _Term) -> _Term | None:
        """What is left of a term without the weights, if that is a number for each row."""
        if len(weights) != 1 or own.large != weights[0].large or not weights[0].scale:
            return None
        rest = own * weights[0].inverse()
        places = [list(r.meta["val"].shape) for r, _ in rest.rows]
        alike = (len(p) == len(shape) and all(a in (1, b) for a, b in zip(p, shape, strict=True)) for p in places)
        return rest if all(alike) else None

    for leaf in [f for f, k in term.large if f in between.backward and f.target in _PLAIN and k == 1]:
        x, turned = matrices(leaf)
        others = term * _Term(1.0, frozenset(((leaf, -1),)))
        for result in _products_with(turned):
            rest = beside(_terms(matrices(result)[0], between, terms), others)
            if rest is not None and result not in between.later and x.meta["val"].shape == result.meta["val"].shape:
                return rest, leaf, result
    for known in (u for n in between.forward for u in n.users if u.target is aten.sum.dim_IntList):
        rest = beside(_terms(known.args[0], between, terms), term)
        if rest is not None and list(known.meta["val"].shape) == shape:
            return rest, known, None
    return None


def _terms(value: Any, between: Between, known: Terms) -> list[_Term]:
    """A value as a sum of products, through casts and views of large values; `known`: those of other values."""
    if not isinstance(value, Node):
        return [_Term(float(value), frozenset())]
    if value not in known:
        known[value] = _taken_apart(value, between, known) or [_leaf(value)]
    return known[value]


def _taken_apart(value: Node, between: Between, known: Terms) -> list[_Term] | None:
    first, second = (*value.args, None, None)[:2]
    large = between.is_large(value)
    if value.target in _CASTS:
        return _terms(first, between, known)
    if large and (base := _in_order(value)) is not value:
        return _terms(base, between, known)
    found: list[_Term] = []
    match value.target:
        case aten.expand.default if large and first.meta["val"].shape[-1:] == (1,):
            return _terms(first, between, known)
        case aten.neg.default:
            return [replace(t, scale=-t.scale) for t in _terms(first, between, known)]
        case aten.mul.Tensor | aten.mul.Scalar if large:
            found = [a * b for a in _terms(first, between, known) for b in _terms(second, between, known)]
        case aten.div.Tensor if large and not value.kwargs:
            divisors = _terms(second, between, known)
            if len(divisors) == 1 and divisors[0].scale and not divisors[0].large:
                return [t * divisors[0].inverse() for t in _terms(first, between, known)]
        case aten.add.Tensor | aten.sub.Tensor if value in between.later and large and not value.kwargs:
            sign = 1 if value.target is aten.add.Tensor else -1
            others = (replace(t, scale=sign * t.scale) for t in _terms(second, between, known))
            found = [*_terms(first, between, known), *others]
        case aten.masked_fill.Scalar if value.args[2] == 0 and large:
            kept = _Term(1.0, frozenset(((("kept", second), 1),)))
            return [t * kept for t in _terms(first, between, known)]
    return found if 0 < len(found) <= MOST_TERMS else None


def _leaf(value: Node) -> _Term:
    row = value.meta["val"].dim() > 0 and value.meta["val"].shape[-1] == 1
    return _Term(1.0, frozenset(), frozenset(((value, 1),))) if row else _Term(1.0, frozenset(((value, 1),)))


def replace_row_sums(joint: GraphModule, sums: Sums) -> None:
    """The rule "row sums". Views between a product and its row's sum are followed with one column."""
    made: dict[Node, Node] = {}
    for total, parts in sums.items():
        dtype, graph = total.meta["val"].dtype, joint.graph

        def new(target: Any, *args: Any, like: Node = total, **kwargs: Any) -> Node:
            return call(joint.graph, target, *args, like=like, **kwargs)

        with graph.inserting_before(total):
            found: Node | None = None
            shape = _row_shape(graph, total.args[0])
            assert shape is not None
            for term, start, result in parts:
                rows = start if result is None else _over_columns(new, total, shape, start, result)
                rows = rows if rows.meta["val"].dtype is dtype else new(aten._to_copy.default, rows, dtype=dtype)
                for row, power in sorted(term.rows, key=lambda item: item[0].name):
                    for _ in range(abs(power)):
                        rows = new(aten.mul.Tensor if power > 0 else aten.div.Tensor, rows, made.get(row, row))
                rows = rows if term.scale == 1.0 else new(aten.mul.Tensor, rows, term.scale)
                found = rows if found is None else new(aten.add.Tensor, found, rows)
            assert found is not None
            if len(total.args) < 3 or not total.args[2]:
                found = new(aten.squeeze.dim, found, -1)
        total.replace_all_uses_with(found)
        graph.erase_node(total)
        made[total] = found


def _over_columns(new: Callable[..., Node], total: Node, shape: list[Any], leaf: Node, result: Node) -> Node:
    """sum_d x * result, in the shape of a row's sum."""
    dtype, x = total.meta["val"].dtype, matrices(leaf)[0]
    wide = [n if n.meta["val"].dtype is dtype else new(aten._to_copy.default, n, dtype=dtype) for n in (x, result)]
    rows = new(aten.sum.dim_IntList, new(aten.mul.Tensor, *wide), [-1], True)
    return new(aten.view.default, rows, shape)


def _row_shape(graph: Graph, value: Node) -> list[Any] | None:
    """The shape of the sums of a value's rows, as an argument of a view; None where a size is not in the graph."""
    sizes = {str(n.meta["val"]): n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)}
    found = [n if isinstance(n, int) else sizes.get(str(n)) for n in value.meta["val"].shape[:-1]]
    return None if None in found else [*found, 1]


def _in_order(value: Node) -> Node:
    """The value that this one is a view of, with its elements and rows in the same order."""
    found = node = value
    while node.target in _VIEWS or node.target in _TURNS:
        node = node.args[0]
        before, after = node.meta["val"], value.meta["val"]
        alike = before.dim() and before.shape[-1] == after.shape[-1] and before.numel() == after.numel()
        if alike and before.is_contiguous() and after.is_contiguous():
            found = node
    return found


def _products_with(turned: Node) -> Iterable[Node]:
    """Products whose second matrix is this one with rows and columns exchanged."""
    base, flipped = _oriented(turned)
    stack, seen = [base], {base}
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.target in _PLAIN and matrices(user)[1] is node and _oriented(node)[1] != flipped:
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
    less = exponent.target is aten.sub.Tensor and not exponent.kwargs and isinstance(exponent.args[1], Node)
    x, top = exponent.args if less and exponent.args[1].meta["val"].shape[-1:] == (1,) else (exponent, None)
    at = quotient

    def new(target: Any, *args: Any) -> Node:
        nonlocal at
        with joint.graph.inserting_after(at):
            at = call(joint.graph, target, *args, like=quotient)
        return at

    shift = new(aten.log.default, total)
    shift = shift if top is None else new(aten.add.Tensor, top, shift)
    # Never -inf, so that a term at a position that a mask rules out is zero; or NaN, as all of its row is.
    rows.append(low := new(aten.eq.Scalar, shift, -math.inf))
    rows.append(safe := new(aten.masked_fill.Scalar, shift, low, math.nan))
    between.forward[less := new(aten.sub.Tensor, x, safe)] = None
    return new(aten.exp.default, less)


def _is_positive(node: Any) -> bool:
    """A sum of exponentials, or of several such sums; some may be replaced by a positive number."""
    if not isinstance(node, Node):
        return bool(node >= 0)
    match node.target:
        case aten.scalar_tensor.default:
            return _is_positive(node.args[0])
        case aten.where.self:
            return all(map(_is_positive, node.args[1:3]))
        case target if target in _CASTS or target in _VIEWS or target is aten.sum.dim_IntList:
            return _is_positive(node.args[0])
        case aten.exp.default:
            return True
        case aten.add.Tensor:
            return all(_is_positive(a) for a in node.args[:2])
    return False
