"""What lies between two products of forward is computed again in backward where that is faster than storing it.

    S = q kᵀ, P = softmax(S), O = P v    ->    backward reads q, k, v, O and one number for each row

S and all that is made of it, up to the product that reads it, is marked to be computed again; of its rows' reductions
the results are kept. Backward must be products and point-wise work on such values, once the rules of `row_sums.py` have
removed other sums, and none of them may be a result: kernels would store them anyway, and nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
from .exact import compared_with_extremes, viewed
from .references import drop_references
from .row_sums import normalise, replace_row_sums, row_sums

_MOVES = operators(
    "view _unsafe_view reshape expand unsqueeze squeeze.default/dim/dims permute transpose.int t alias _to_copy clone"
    " slice.Tensor constant_pad_nd select.int scatter.src scatter.value full"
)
_JOINED = operators("cat")  # a column beside the scores
_REPEATS = operators("view _unsafe_view reshape expand unsqueeze permute transpose.int clone _to_copy")
_ORDERS = operators("ge.Tensor gt.Tensor le.Tensor lt.Tensor")
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
            whole = _whole(between, {*sums})
            replace_row_sums(joint, sums)
            if whole is not None and _is_rounded(between):
                _mark_all(between)
            else:
                _mark(between, normalise(joint, between))
    return decisions


def _decide(between: Between, replaced: set[Node], target: Target) -> Decision:
    first, last = between.first, next(reversed(between.backward))

    def answer(reason: str, saved: int = 0) -> Decision:
        return Decision(first.name, last.name, "recompute", saved > 0, reason, 0.0, saved)

    if (step := next((n for n in between.forward if not _is_inside(n) and n.target not in _JOINED), None)) is not None:
        return answer(f"{step.name} is not point-wise")
    if (step := next((n for n in (*between.forward, *between.backward) if is_asked(n)), None)) is not None:
        return answer(f"{step.name} is asked to be as the program says")
    user = _wanted(between.forward, between, replaced) or next(_column_sums(between), None)
    if user is not None:
        return answer(f"{user.name} needs values of its size")
    user = _whole(between, replaced)
    again, stored = (us(between, target, user is not None) for us in (_again_us, _stored_us))
    reason = f"about {again:.1f} us computed again in backward, {stored:.1f} us stored"
    reason += f"; {user.name} needs values of its size there" if user is not None else ""
    if any(isinstance(matrices(n)[0].meta["val"].shape[-1], torch.SymInt) for n in between.products):
        return answer("the length of its sums is known at run time only")
    if max(map(depth, between.products)) > MOST_HELD:
        return answer(f"sums of more than {MOST_HELD} terms")
    return answer(reason, 2 * size_of(first) * first.meta["val"].element_size() if again < stored else 0)


# --- a rule of thumb: whether kernels pay. The planner prices what becomes of it ---

# Products of forward and backward that sum over the size of queries and of values.
_AGAIN, _FORWARD, _BACKWARD, _STORED = (5, 4), (1, 1), (3, 2), (3, 3)
PASSES = 11  # over memory, where values are stored
# Where something in backward needs values as a whole, many of them float32; the same where forward stores none.
PASSES_WHOLE, PASSES_BACKWARD = 20, 9
KERNELS = 3  # that compute all values between
OPERATIONS = 36.0  # of a lane for each value in each of them: an exponential, scaling, a mask, roundings
SKIPPED = 0.5  # of all steps, where a mask is made of positions


def _again_us(between: Between, target: Target, whole: bool = False) -> float:
    """The time of attention's kernels, forward and backward, by the rates of nested products and of lanes.

    `whole`: backward needs values as a whole, for the gradient of a bias: it stores them, and forward is a kernel.
    """
    rates = target.rates
    nested = rates.matrix * rates.nested * (1 + rates.computed) / 2
    lanes = size_of(between.first) * OPERATIONS / target.operations_per_us
    total = _multiply_us(between, _FORWARD if whole else _AGAIN, target) / nested + lanes * (1 if whole else KERNELS)
    total *= SKIPPED if _is_skipped(between) else 1.0
    return total + (_library_us(between, _BACKWARD, PASSES_BACKWARD, target) if whole else 0.0)


def _stored_us(between: Between, target: Target, whole: bool = False) -> float:
    return _library_us(between, _STORED, PASSES_WHOLE if whole else PASSES, target)


def _library_us(between: Between, counts: tuple[int, int], passes: int, target: Target) -> float:
    """The time of the library's products and of what travels between them."""
    moved = passes * size_of(between.first) * between.first.meta["val"].element_size()
    part = max(part for _, _, part in target.rates.library_tiles)
    return float(_multiply_us(between, counts, target) / part + moved / target.memory_bytes_per_us)


def _multiply_us(between: Between, counts: tuple[int, int], target: Target) -> float:
    """So many products that sum over queries' size and over values' size, at the rate of the chip."""
    values = max((depth(n) for n in between.backward if n.target in PRODUCTS), default=0)
    terms = counts[0] * depth(between.first) + counts[1] * values
    dtype = _DTYPES.get(_multiplied(between.first))
    if dtype is None:
        return math.inf
    return float(size_of(between.first) * terms / multiply_rate(dtype, target))


def _multiplied(product: Node) -> torch.dtype:
    """The type of a product's matrices, before both were converted from the same 16-bit type."""
    found: set[torch.dtype] = set()
    for matrix in matrices(product):
        while matrix.target in _REPEATS:
            matrix = matrix.all_input_nodes[0]
        found.add(matrix.meta["val"].dtype)
    own: torch.dtype = product.meta["val"].dtype
    return own if len(found) > 1 or not found <= {torch.float16, torch.bfloat16} else found.pop()


def _is_skipped(between: Between) -> bool:
    """Whether values are -inf at positions that no data decides, or of which data is expected to hide half."""
    masks = [
        n
        for n in _made_of(between)
        if n.meta["val"].dim() > 1 and not any(a.op == "placeholder" for a in nodes_reached([n], down=False))
    ]
    inside = (*between.forward, *masks, *(n for m in (*between.forward, *masks) for n in m.all_input_nodes))
    made = list(_made_of(between))
    hides = bool(masks) or any(_hides_half(m, between) for n in made for m in (n, *n.all_input_nodes))
    return hides and any(-math.inf in n.args for n in inside)


def _hides_half(node: Node, between: Between) -> bool:
    """Whether it is a stored mask, or an order between numbers of rows and of columns (`analysis/visits.expected`)."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.shape[-2:] != between.first.meta["val"].shape[-2:]:
        return False
    sides = [n.meta["val"] for n in node.all_input_nodes] if node.target in _ORDERS else []
    stretched = len(sides) == 2 and all(not s.is_floating_point() and 1 in s.shape[-2:] for s in sides)
    return stretched or (node.op == "placeholder" and value.dtype is torch.bool)


# --- which values ---


def _is_inside(node: Node) -> bool:
    """Whether a kernel with products computes an operation element by element."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in PRODUCTS or node.target in _MOVES or _is_drawn(node)


def _is_drawn(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "onepass"


def _wanted(values: Iterable[Node], between: Between, replaced: set[Node]) -> Node | None:
    """What reads some of the values and is neither point-wise work nor a product: a result, the sum of a bias."""
    compared = {comparison for _, comparison in compared_with_extremes(between.first.graph)}
    for node in values:
        for user in node.users:
            if user.op == "output" or user in compared:
                return node if user.op == "output" else user
            passes = user in between.forward or user in between.backward or user.target in PRODUCTS
            if not passes and user in between.later and user not in replaced:
                return user
    return None


def _column_sums(between: Between) -> Iterator[Node]:
    """Sums over rows that products of backward wait for: those of a softmax over the other dimension."""
    ends = {u for n in between.backward for u in n.users if u.target in PRODUCTS}
    for user in sorted({u for n in between.backward for u in n.users if u.target is torch.ops.aten.sum.dim_IntList}):
        rank = user.args[0].meta["val"].dim()
        if not {-1, rank - 1} & {*user.args[1]} and not nodes_reached(user.users).isdisjoint(ends):
            yield user


def _whole(between: Between, replaced: set[Node]) -> Node | None:
    """What needs values of this size as a whole in backward, so that they are stored there."""
    others = (n for n in (*between.forward, *between.backward) if not _is_inside(n))
    return next(others, None) or _wanted(between.backward, between, replaced)


def _mark(between: Between, rows: list[Node]) -> None:
    """Values of this size, and `rows`, are computed again; what forward reduces rows to is kept."""
    kept = {u for n in between.forward for u in n.users if u not in between.forward and u not in between.later}
    marks: dict[Node, Any] = {n: SAVE for n in kept if n.target not in PRODUCTS and n.op == "call_function"}
    again = (*between.forward, *_made_of(between), *_repetitions(between), *rows)
    marks |= dict.fromkeys(again, COMPUTE_AGAIN)
    for node, mark in marks.items():
        if "recompute" not in node.meta:
            node.meta |= mark


def _is_rounded(between: Between) -> bool:
    """Whether scores that are stored differ from those that a kernel computes and reads at once."""
    return bool(between.first.meta["val"].dtype.itemsize < torch.float32.itemsize)


def _mark_all(between: Between) -> None:
    """Values of this size are computed again from stored scores, and so is what their rows are reduced to.

    The reductions of scores that were never rounded do not belong to rounded ones: the weights' sum would not be one.
    """
    above = nodes_reached(between.forward, down=False)
    rows = (nodes_reached(between.forward) & above) - {*between.later, *between.forward}
    for node in (*between.forward, *_made_of(between), *_repetitions(between), *rows):
        if node.op == "call_function" and "recompute" not in node.meta:
            node.meta |= COMPUTE_AGAIN


def _repetitions(between: Between) -> Iterable[Node]:
    """Copies of a smaller matrix several times over (heads of keys for a group of queries), which a kernel reads."""
    users = {u for n in between.forward for u in n.users if u.target in PRODUCTS}
    for matrix in {m for product in (*between.products, *users) for m in matrices(product)}:
        path = [matrix]
        while path[-1].target in _REPEATS:
            path.append(path[-1].all_input_nodes[0])
            if size_of(path[-1]) < size_of(matrix):
                yield from path[:-1]
                _keep(path[-1], between)
                break


def _keep(repeated: Node, between: Between) -> None:
    """What is repeated stays as it is: kernels read it, and would compute it for every tile otherwise."""
    repeated = viewed(repeated)
    if repeated.op == "call_function" and repeated not in between.later and "recompute" not in repeated.meta:
        repeated.meta |= SAVE


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
