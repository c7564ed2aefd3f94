"""Two dependent sweeps in one pass over memory, by the transport rule.

A sum whose terms depend on a maximum over the same axis (softmax, logsumexp) is kept up to date block
by block: the maximum grows, the stale sum is carried to it, then the block's terms are added. Used
where a row does not stay in cache between two sweeps; the numbers are those of the two sweeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..analysis.access import estimate
from ..analysis.factor import LN2, drops_nothing
from ..analysis.inline import scans
from ..analysis.scores import LARGEST
from ..analysis.transport import transport
from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, Part, Pointwise, Reduce, const, pointwise, postorder, rebuild
from ..ir.kernel import Let, Operand, Rescale, Var, WriteLocal
from ..ir.poly import Axis, Poly, product
from ..ir.program import Buffer
from .builder import Builder, Finished, looped
from .leaf import Item, Leaf, Point, cuts


@dataclass(frozen=True, slots=True)
class Online:
    """A maximum, the sums that follow it, each sum's h, and what else the second level has, for afterwards."""

    leader: Item
    followers: tuple[tuple[Item, Expr], ...]
    others: tuple[Item, ...]


def find_online(leaf: Leaf, first: list[Item], second: list[Item], axes: frozenset[Axis]) -> Online | None:
    """Whether two levels of one scope can share a pass over memory, and gain by it."""
    sweeping = [i for i in first if i.domain - axes]
    if len(sweeping) != 1 or any(i.reduce is not None for i in first if i is not sweeping[0]):
        return None
    leader = sweeping[0]
    if leader.reduce is None or leader.reduce.monoid != "max" or leader.accumulator is not None:
        return None
    inner = leader.domain - axes
    size = product(a.extent for a in inner)
    row_bytes = max((e.buffer.dtype.bytes for e in postorder(leader.values) if isinstance(e, Load)), default=0)
    if len(inner) != 1 or leaf.nest.split in inner or estimate(size) * row_bytes <= leaf.found_again_bytes:
        return None
    if scans([*leader.values, *(v for i in second for v in i.values)]):
        return None  # whose states would go through a block twice
    if len(cuts(next(iter(inner)), [leader, *second])) > 1:
        return None
    followers: list[tuple[Item, Expr]] = []
    others = [i for i in first if i is not leader]
    for item in second:
        if item.domain - axes != inner:
            others.append(item)
            continue
        if item.reduce is None or item.reduce.monoid != "sum" or item.accumulator is not None:
            return None  # it sweeps the row again in any case
        h = transport(item.values[0], leader.reduce, leader.values[0], next(iter(inner)))
        if h is None:
            return None
        followers.append((item, h))
    return Online(leader, tuple(followers), tuple(others)) if followers else None


def sweep_online(leaf: Leaf, online: Online, start: Callable[[Item], Item], axis: Axis, point: Point) -> None:
    """Emit the merged pass; afterwards both reductions are finished in the current scope. `start` sets up a state."""
    builder = leaf.builder
    leader = start(online.leader)
    followers = [(start(item), h) for item, h in online.followers]
    assert leader.reduce is not None and leader.accumulator is not None
    reference = builder.reference(leader.accumulator)
    block = leaf.online_block
    for first, blocks, whole in leaf.spans(axis, block):
        count = Axis(builder.name("block"), blocks)
        with builder.block(looped(count)):
            at = first + count * block
            leaf.online_step([leader], axis, at, whole, point)
            builder.here.parts[leader.reduce] = Finished(leader.accumulator)
            new = builder.emit(Part(leader.reduce, 0))
            for item, h in followers:
                assert item.accumulator is not None
                factor_value = carry(builder, leader.reduce, h, new, builder.read(reference, "old"))
                builder.add(Rescale(item.accumulator, factor_value))
            builder.add(WriteLocal(reference, Poly.ZERO, new))
            leaf.online_step([item for item, _ in followers], axis, at, whole, point)
    for item in (leader, *(item for item, _ in followers)):
        assert item.reduce is not None and item.accumulator is not None
        builder.here.parts[item.reduce] = Finished(item.accumulator)
    leaf.merge_online(leader, followers)


def carry(builder: Builder, reduce: Reduce, h: Expr, new: Operand, old: Var) -> Var:
    """exp(h(new) - h(old)); 1 where the reference did not move, so that -inf meets no -inf."""
    result = Part(reduce, 0)
    places = [Load(Buffer(builder.name("at"), result.dtype, (), ()), ()) for _ in range(2)]
    builder.here.values.update(zip(places, (new, old), strict=True))
    moved = carried(result, h, *places)
    factor_value = builder.emit(moved)
    same = Var(builder.name("same"), DType.BOOL)
    builder.add(Let(same, "eq", (new, old)))
    chosen = Var(builder.name("carry"), moved.dtype)
    builder.add(Let(chosen, "where", (same, const(1.0, moved.dtype), factor_value)))
    return chosen


def carried(result: Expr, h: Expr, new: Expr, old: Expr) -> Expr:
    """exp(h(new) - h(old)), where h is given in terms of `result`.

    Where h is a multiple of log(2) the power is one of two: the difference is then formed before it is scaled. Unless
    an infinite h drops the sum of nothing before the first term, the power is kept finite for it.
    """
    power, drops = "exp", drops_nothing(h, result)
    if isinstance(h, Pointwise) and h.op == "mul" and const(LN2, h.dtype) in h.args:
        power, h = "exp2", next(a for a in h.args if a is not const(LN2, h.dtype))
    factor_value = pointwise(power, pointwise("sub", _with(h, result, new), _with(h, result, old)))
    return factor_value if drops else pointwise("minimum", factor_value, const(LARGEST, factor_value.dtype))


def _with(h: Expr, result: Expr, stand_in: Expr) -> Expr:
    """h of another reference."""
    memo: dict[Expr, Expr] = {}
    for node in postorder([h], into_reductions=False):
        if node is result:
            memo[node] = stand_in
        elif not isinstance(node, Reduce):
            memo[node] = rebuild(node, memo.__getitem__, lambda p: p)
    return memo[h]
