"""A loop over chunks of rows between matrix products, as one operation of a graph.

In each chunk the library makes tall results of products in buffers that all chunks share, a body (point-wise work and
reductions along rows; a graph of its own) turns them into gradients in their place, and the library multiplies these:

    logits = x[rows] @ w.T;  losses[rows], logits[:] = body(logits, y[rows])
    dx[rows] = logits @ w;  dw += logits.T @ x[rows]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


@dataclass(frozen=True, slots=True)
class TallProduct:
    """buffer = left[rows] @ right (+ bias); numbers are positions of operands."""

    left: int
    right: int
    bias: int | None = None


@dataclass(frozen=True, slots=True)
class LoopResult:
    """A result of the loop. `value`: a buffer, or a result of the body counted on from the buffers.

    "rows": the value of all rows; "sum": added up over chunks; "times": value @ other, for all rows;
    "gathered": value.T @ other[rows], added up; "turned": other[rows].T @ value, added up.
    """

    kind: str
    value: int
    other: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class RowLoop:
    """What runs for a chunk of `rows` rows. The body takes the buffers, then `inputs`: (operand, whether by rows).

    It overwrites buffers and returns a tuple. `repeats`: how many chunks to expect; `call`: the compiled body, which
    takes a list.
    """

    body: GraphModule
    rows: int
    products: tuple[TallProduct, ...]
    inputs: tuple[tuple[int, bool], ...]
    results: tuple[LoopResult, ...]
    repeats: int = 1
    call: Callable[[list[Any]], Any] | None = None

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.run(operands)

    def run(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        total = operands[self.products[0].left].shape[0]
        most = min(self.rows, total)
        buffers = [operands[p.left].new_empty((most, operands[p.right].shape[1])) for p in self.products]
        made: list[Any] = [[] if r.kind == "rows" else None for r in self.results]
        for start in range(0, max(total, 1), self.rows):
            rows = slice(start, min(start + self.rows, total))
            values = [b[: rows.stop - start] for b in buffers]
            for product, value in zip(self.products, values, strict=True):
                _multiply(operands, product, rows, value)
            given = [operands[k][rows] if by_rows else operands[k] for k, by_rows in self.inputs]
            values += self.body(*values, *given) if self.call is None else self.call([*values, *given])
            for number, result in enumerate(self.results):
                value = values[result.value]
                made[number] = _gathered(result, made[number], value, operands, rows, total)
            del values, given, value
        return tuple(_joined(m) if isinstance(m, list) else m for m in made)


def over_rows(loop: RowLoop, *operands: Tensor) -> tuple[Tensor, ...]:
    """The operation that graphs hold."""
    results: tuple[Tensor, ...] = loop(*operands)
    return results


def _multiply(operands: tuple[Tensor, ...], product: TallProduct, rows: slice, out: Tensor) -> None:
    left, right = operands[product.left][rows], operands[product.right]
    if product.bias is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(operands[product.bias], left, right, out=out)


def _gathered(
    result: LoopResult, made: Any, value: Tensor, operands: tuple[Tensor, ...], rows: slice, total: int
) -> Any:
    """A result after another chunk."""
    match result.kind:
        case "rows":
            return [*made, value]
        case "sum":
            return value if made is None else made.add_(value)
        case "times":
            other = operands[result.other]
            made = value.new_empty((total, other.shape[1])) if made is None else made
            torch.mm(value, other, out=made[rows])
            return made
    other = operands[result.other][rows]
    left, right = (value.t(), other) if result.kind == "gathered" else (other.t(), value)
    return torch.mm(left, right) if made is None else made.addmm_(left, right)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
