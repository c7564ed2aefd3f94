"""What the Triton emitter asks of a kernel's body before it starts."""

from __future__ import annotations

from ..ir.kernel import (
    Bind,
    Contract,
    Kernel,
    Let,
    LoadElement,
    LoadTile,
    Loop,
    Share,
    Statement,
    StoreElement,
    StoreTile,
    Tile,
    Var,
    When,
    walk,
)
from ..ir.poly import Axis, Poly, Symbol
from ..ir.program import Buffer
from ..ir.source import MULTIPLE


def tile_rank(body: tuple[Statement, ...]) -> int:
    """How many tile axes are open at once, at most; where they name their dimensions, how many of these."""
    named = [s.dim for s in walk(body) if isinstance(s, Tile) and s.dim is not None]
    if named:
        return 1 + max(named)

    def deepest(block: tuple[Statement, ...], names: frozenset[str]) -> int:
        most = len(names)
        for s in block:
            if isinstance(s, Tile):
                names = names | {s.axis.name}
            elif isinstance(s, Loop | When | Share):
                most = max(most, deepest(s.body, names))
            most = max(most, len(names))
        return most

    return deepest(body, frozenset())


def is_innermost(loop: Loop) -> bool:
    """Whether no loop is inside."""
    return not any(isinstance(s, Loop) for s in walk(loop.body))


def deciding_sizes(kernel: Kernel) -> set[Symbol]:
    """Sizes that decide whether neighbours in memory are loaded together: rows end there, or are that far apart.

    How many rows there are decides nothing, nor do multiples of such a size.
    """
    statements = walk(kernel.body)
    offsets = [s.offset for s in statements if isinstance(s, LoadElement | StoreElement | LoadTile | StoreTile)]
    bound = [s.value for s in statements if isinstance(s, Bind)]
    found = [*offsets, *bound, *(a for s in statements if isinstance(s, Let) for a in s.args if isinstance(a, Poly))]

    def lies_across(axis: Axis) -> bool:
        steps = [p.coefficient(axis) for p in offsets if axis in p.axes]
        return not any(step is None or step is Poly.ONE for step in steps) and not any(axis in p.axes for p in bound)

    found += [p for s in statements if isinstance(s, Tile) and not lies_across(s.axis) for p in s.limits]
    terms = [
        (m, c) for p in found for m, c in p.terms if c % MULTIPLE or not all(isinstance(a, Axis | Symbol) for a in m)
    ]
    return {size for term in terms for size in Poly((term,)).symbols()}


def only_streams(kernel: Kernel) -> bool:
    """Whether hardware copies matrices, and each of them is read once."""
    copied = [s for s in walk(kernel.body) if isinstance(s, LoadTile)]
    return bool(copied) and all(s.reuse == "never" for s in copied)


def packed_matrices(kernel: Kernel) -> dict[Buffer, frozenset[str]]:
    """Buffers of packed types that go to the matrix unit and nowhere else, and what is loaded of each."""
    statements = walk(kernel.body)
    loads: dict[Buffer, set[str]] = {}
    for s in statements:
        if isinstance(s, LoadElement | LoadTile):
            buffer = s.buffer if isinstance(s, LoadElement) else s.descriptor.buffer
            if buffer.dtype.is_packed:
                loads.setdefault(buffer, set()).add(s.var.name)
    if not loads:
        return {}
    operands = [o for s in statements if isinstance(s, Contract) for o in (s.left, s.right)]
    multiplied = {o.name for o in operands if isinstance(o, Var)}
    elsewhere = {v.name for s in statements if not isinstance(s, Contract) for v in _used(s)}
    return {b: frozenset(names) for b, names in loads.items() if names <= multiplied - elsewhere}


def _used(s: Statement) -> list[Var]:
    """The variables among a statement's operands; what it defines is not among them."""
    found: list[object] = []
    for name in ("args", "inputs", "value", "guard", "factor", "condition"):
        field = getattr(s, name, ())
        found += field if isinstance(field, tuple) else [field]
    return [v for v in found if isinstance(v, Var)]
