"""Rows through operations: which dimensions of a result are rows of a tall product, and the operation on a few of them.

`Rows(lead, space)`: the first `lead` dimensions together number the rows of a space: those of the product, or of a part
of it (labels shifted by one: logits[:, :-1]). In a body rows are one dimension, so `lead` becomes 1.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.callables import operators

aten = torch.ops.aten
_REDUCTIONS = operators(
    "sum.dim_IntList amax amin mean.dim any.dim/dims all.dim/dims argmax argmin prod.dim_int max.dim min.dim"
)
_LINES = operators("gather scatter.value/src scatter_add")  # along a dimension that is no row
_VIEWS = operators("view _unsafe_view reshape")
_UNTAGGED = operators("_to_copy full_like zeros_like ones_like alias prims.convert_element_type.default")


@dataclass(frozen=True, slots=True)
class Cut:
    """Positions from `start` on of dimension `dim`, of rows' dimensions; sizes are numbers or expressions."""

    before: tuple[Any, ...]
    dim: int
    start: int
    length: Any

    @property
    def shape(self) -> tuple[Any, ...]:
        return (*self.before[: self.dim], self.length, *self.before[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Rows:
    """`cuts`: from the rows of the product to those of this space. `count`: how many these are, as an expression."""

    lead: int
    count: Any
    cuts: tuple[Cut, ...] = ()

    def with_lead(self, lead: int) -> Rows:
        return Rows(lead, self.count, self.cuts)


class NotByRows(Exception):
    """Why a region cannot run in chunks of rows."""


def expression(size: Any) -> Any:
    """A size that can be compared without a guard: a number, or sympy's expression."""
    if not isinstance(size, torch.SymInt):
        return size
    found = size.node.expr.expand()
    return int(found) if found.is_Integer else found


def rebuilt(size: Any, leaf: Callable[[Any], Any], add: Callable[..., Any], multiply: Callable[..., Any]) -> Any:
    """A size computed from symbols that `leaf` has."""
    if isinstance(size, int):
        return size
    if size.is_Integer:
        return int(size)
    if size.is_Symbol:
        return leaf(size)
    if not (size.is_Add or size.is_Mul):
        raise NotByRows(f"a size {size} known at run time only")
    return functools.reduce(add if size.is_Add else multiply, (rebuilt(s, leaf, add, multiply) for s in size.args))


def shape_of(node: Any) -> tuple[Any, ...]:
    """The shape as expressions; none of what is no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(map(expression, value.shape)) if isinstance(value, torch.Tensor) else ()


def lead_of(shape: Sequence[Any], count: Any) -> int | None:
    """How many leading dimensions number the rows."""
    return next((k for k in range(1, len(shape) + 1) if product_of(shape[:k]) == count), None)


def product_of(shape: Sequence[Any]) -> Any:
    found = functools.reduce(operator.mul, shape, 1)
    return found if isinstance(found, int) else found.expand()


def kind_of(node: Node) -> str:
    """Which rule an operation follows; empty where none is known."""
    target: Any = node.target
    if target is operator.getitem:
        return "item"
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    kinds = ((_REDUCTIONS, "reduction"), (_LINES, "line"), (_VIEWS, "view"), (_UNTAGGED, "point"))
    for targets, kind in kinds:
        if target in targets:
            return kind
    if torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags:
        return "point"
    named = ("unsqueeze", "squeeze", "expand", "slice", "slice_scatter", "full")
    return target._opname if target.namespace == "aten" and target._opname in named else ""


def rows_after(node: Node, known: dict[Node, Rows]) -> Rows | None:
    """The rows of a result, if it has one for each row of its operands."""
    operands = [a for a in node.all_input_nodes if a in known]
    first, shape = known[operands[0]], shape_of(node)
    match kind_of(node):
        case "point" | "line" | "expand":
            alike = all(known[a] == first and len(shape_of(a)) == len(shape) for a in operands)
            if kind_of(node) == "line" and _dim(node, node.args[1]) < first.lead:
                return None
            return first if alike and all(place_of(a, shape, first) for a in node.all_input_nodes) else None
        case "reduction":
            return first if len(node.args) > 1 and all(d >= first.lead for d in reduced_dims(node)) else None
        case "item":
            return first
        case "view":
            lead = lead_of(shape, first.count)
            return None if lead is None else first.with_lead(lead)
        case "unsqueeze" | "squeeze":
            kept = shape[: first.lead] == shape_of(operands[0])[: first.lead]
            return first if kept and all(d >= first.lead for d in squeezed_dims(node, shape)) else None
        case "slice":
            return _sliced(node, first)
        case "slice_scatter":
            return _scattered(node, known)
    return None


def place_of(operand: Any, shape: Sequence[Any], rows: Rows) -> str:
    """Whether an operand has a value for each row ("rows"), one for all ("free"), or for some dimensions ("part")."""
    own = shape_of(operand)
    missing = len(shape) - len(own)
    lead = [own[d - missing] if d >= missing else 1 for d in range(rows.lead)]
    if lead == list(shape[: rows.lead]) and not missing:
        return "rows"
    return "free" if all(size == 1 for size in lead) else "part"


def reduced_dims(node: Node) -> list[int]:
    """The dimensions that a reduction sums over."""
    rank = len(shape_of(node.args[0]))
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    return [d % max(rank, 1) for d in dims] if dims else list(range(rank))


def squeezed_dims(node: Node, shape: Sequence[Any]) -> list[int]:
    """The dimensions that come or go."""
    if len(node.args) < 2:
        return [-1]
    dims: Any = node.args[1]
    rank = len(shape) if node.target is aten.unsqueeze.default else len(shape_of(node.args[0]))
    return [d % max(rank, 1) for d in (dims if isinstance(dims, tuple | list) else [dims])]


def cut_of(node: Node, whole: Sequence[Any], part: Sequence[Any], dims: Sequence[Any]) -> tuple[int, int, Any] | None:
    """(dimension, start, length) of a slice with step 1 that starts at a known position."""
    given: tuple[Any, ...] = (*dims, *(0, None, None, 1)[len(dims) :])
    dim, start, _, step = given
    dim, start = dim % len(whole), start or 0
    if isinstance(start, int) and start < 0 and isinstance(whole[dim], int):
        start = max(0, start + whole[dim])
    return (dim, start, part[dim]) if isinstance(start, int) and start >= 0 and step == 1 else None


def _dim(node: Node, dim: Any) -> int:
    return int(dim) % max(1, len(shape_of(node)))


def _sliced(node: Node, rows: Rows) -> Rows | None:
    whole, shape = shape_of(node.args[0]), shape_of(node)
    dim = _dim(node, node.args[1] if len(node.args) > 1 else 0)
    if whole == shape or dim >= rows.lead:
        return rows
    cut = cut_of(node, whole, shape, node.args[1:])
    if cut is None:
        return None
    cuts = (*rows.cuts, Cut(whole[: rows.lead], *cut))
    return Rows(rows.lead, product_of(shape[: rows.lead]), cuts)


def _scattered(node: Node, known: dict[Node, Rows]) -> Rows | None:
    """Back from a part of the rows, or of other dimensions, into a constant."""
    base, source = node.args[:2]
    whole, rows = shape_of(node), known.get(source)  # type: ignore[arg-type]
    cut = cut_of(node, whole, shape_of(source), node.args[2:])
    if rows is None or cut is None or constant_of(base) is None:
        return None
    if shape_of(source) == whole or cut[0] >= rows.lead:
        return rows
    if not rows.cuts or rows.cuts[-1] != Cut(whole[: rows.lead], *cut):
        return None
    return Rows(rows.lead, product_of(whole[: rows.lead]), rows.cuts[:-1])


def constant_of(node: Any) -> float | int | bool | None:
    """The number that all elements are, if the graph says so."""
    while isinstance(node, Node) and node.target in (aten.expand.default, *_VIEWS, aten.unsqueeze.default):
        node = node.args[0]
    if isinstance(node, int | float | bool):
        return node
    if not isinstance(node, Node):
        return None
    position = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}.get(node.target)
    if node.target in (aten.zeros.default, aten.zeros_like.default):
        return 0
    number = node.args[position] if position is not None else None
    return number if isinstance(number, int | float | bool) else None
