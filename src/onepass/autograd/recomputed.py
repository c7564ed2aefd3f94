"""What lies between two products of forward is computed again in backward where that is faster than storing it.

    S = q kᵀ, P = softmax(S), O = P v    ->    backward reads q, k, v, O and one number for each row

S and all that is made of it, up to the product that reads it, is marked to be computed again; of its rows' reductions
the results are kept. Backward must be products and point-wise work on such values, once the rules of `row_sums.py` have
removed other sums, and none of them may be a result: kernels would store them anyway, and nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..analysis.contraction import MOST_HELD
from ..analysis.library_price import multiply_rate
from ..analysis.reach import reached
from ..ir.callables import operators
from ..ir.dtypes import DType
from ..ir.orders import is_asked
from ..ir.plan import Decision
from ..ir.target import Target
from .between import COMPUTE_AGAIN, PRODUCTS, SAVE, Between, depth, matrices, nodes_reached, products_between, size_of
from .exact import compared_with_extremes
from .references import drop_references
from .row_sums import normalise, replace_row_sums, row_sums

_MOVES = operators(
    "view _unsafe_view reshape expand unsqueeze squeeze.default/dim/dims permute transpose.int t alias _to_copy clone"
    " slice.Tensor constant_pad_nd select.int scatter.src scatter.value full"
)
_LOOKED_UP = operators("index.Tensor tril triu full")
_DTYPES = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}


def recompute_between_products(joint: GraphModule, target: Target) -> list[Decision]:
    """Mark what is computed again in backward; the decision on each pair of products."""
    decisions: list[Decision] = []
    if any(_again_us(between, target) < _stored_us(between, target) for between in products_between(joint)):
        drop_references(joint)
    for between in products_between(joint):
        if not between.backward or not any(n in between.backward for n in between.products):
            continue  # backward does not read the values, or multiplies nothing of their size
        sums = row_sums(between)
        decision = _decide(between, {*sums}, target)
        decisions.append(decision)
        if decision.accepted:
            replace_row_sums(joint, sums)
            _mark(between, normalise(joint, between))
    return decisions


def _decide(between: Between, replaced: set[Node], target: Target) -> Decision:
    first, last = between.first, next(reversed(between.backward))

    def answer(reason: str, saved: int = 0) -> Decision:
        return Decision(first.name, last.name, "recompute", saved > 0, reason, 0.0, saved)

    if (step := next((n for n in (*between.forward, *between.backward) if not _is_inside(n)), None)) is not None:
        return answer(f"{step.name} is not point-wise")
    if (step := next((n for n in (*between.forward, *between.backward) if is_asked(n)), None)) is not None:
        return answer(f"{step.name} is asked to be as the program says")
    if (user := _wanted(between, replaced)) is not None:
        return answer(f"{user.name} needs values of its size")
    again, stored = _again_us(between, target), _stored_us(between, target)
    reason = f"about {again:.1f} us computed again in backward, {stored:.1f} us stored"
    if any(isinstance(matrices(n)[0].meta["val"].shape[-1], torch.SymInt) for n in between.products):
        return answer("the length of its sums is known at run time only")
    if max(map(depth, between.products)) > MOST_HELD:
        return answer(f"sums of more than {MOST_HELD} terms")
    return answer(reason, 2 * size_of(first) * first.meta["val"].element_size() if again < stored else 0)


# --- a rule of thumb: whether kernels pay. The planner prices what becomes of it ---

# Products of forward and backward that sum over the size of queries and of values, and passes over memory.
_AGAIN, _STORED, PASSES = (5, 4), (3, 3), 11
KERNELS = 3  # that compute all values between
OPERATIONS = 36.0  # of a lane for each value in each of them: an exponential, scaling, a mask, roundings
SKIPPED = 0.5  # of all steps, where a mask is made of positions


def _again_us(between: Between, target: Target) -> float:
    """The time of attention's kernels, forward and backward, by the rates of nested products and of lanes."""
    rates = target.rates
    nested = rates.matrix * rates.nested * (1 + rates.computed) / 2
    lanes = size_of(between.first) * KERNELS * OPERATIONS / target.operations_per_us
    total = _multiply_us(between, _AGAIN, target) / nested + lanes
    return total * (SKIPPED if _is_skipped(between) else 1.0)


def _stored_us(between: Between, target: Target) -> float:
    """The time of the library's products and of what travels between them."""
    moved = PASSES * size_of(between.first) * between.first.meta["val"].element_size()
    part = max(part for _, _, part in target.rates.library_tiles)
    return float(_multiply_us(between, _STORED, target) / part + moved / target.memory_bytes_per_us)


def _multiply_us(between: Between, counts: tuple[int, int], target: Target) -> float:
    """So many products that sum over queries' size and over values' size, at the rate of the chip."""
    values = max((depth(n) for n in between.backward if n.target in PRODUCTS), default=0)
    terms = counts[0] * depth(between.first) + counts[1] * values
    dtype = _DTYPES.get(between.first.meta["val"].dtype)
    if dtype is None:
        return math.inf
    return float(size_of(between.first) * terms / multiply_rate(dtype, target))


def _is_skipped(between: Between) -> bool:
    """Whether values at positions that no data decides are -inf."""
    masks = [
        n
        for n in _made_of(between)
        if n.meta["val"].dim() > 1 and not any(a.op == "placeholder" for a in nodes_reached([n], down=False))
    ]
    inside = (*between.forward, *masks, *(n for m in (*between.forward, *masks) for n in m.all_input_nodes))
    return bool(masks) and any(-math.inf in n.args for n in inside)


# --- which values ---


def _is_inside(node: Node) -> bool:
    """Whether a kernel with products computes an operation element by element."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in PRODUCTS or node.target in _MOVES or _is_drawn(node)


def _is_drawn(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "onepass"


def _wanted(between: Between, replaced: set[Node]) -> Node | None:
    """What reads values of this size and is neither point-wise work nor a product: a result, the sum of a bias."""
    compared = {comparison for _, comparison in compared_with_extremes(between.first.graph)}
    for node in (*between.forward, *between.backward):
        for user in node.users:
            if user.op == "output" or user in compared:
                return node if user.op == "output" else user
            passes = user in between.forward or user in between.backward or user.target in PRODUCTS
            if not passes and user in between.later and user not in replaced:
                return user
    return None


def _mark(between: Between, rows: list[Node]) -> None:
    """Values of this size, and `rows`, are computed again; what forward reduces rows to is kept."""
    kept = {u for n in between.forward for u in n.users if u not in between.forward and u not in between.later}
    marks: dict[Node, Any] = {n: SAVE for n in kept if n.target not in PRODUCTS and n.op == "call_function"}
    marks |= dict.fromkeys((*between.forward, *_made_of(between), *rows), COMPUTE_AGAIN)
    for node, mark in marks.items():
        if "recompute" not in node.meta:
            node.meta |= mark


def _made_of(between: Between) -> Iterable[Node]:
    """Other values with these rows and columns that they are made of: biases from tables, masks."""
    rows, columns = between.first.meta["val"].shape[-2:]

    def alike(node: Node) -> bool:
        if node.target in PRODUCTS or not (_is_inside(node) or node.target in _LOOKED_UP):
            return False
        shape = list(node.meta["val"].shape)
        return all(shape.count(n) >= (rows, columns).count(n) for n in (rows, columns))

    found = reached(between.forward, lambda n: filter(alike, n.all_input_nodes))
    return [n for n in found if n not in between.forward and not _is_drawn(n)]
