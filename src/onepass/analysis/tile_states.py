"""Matrix products whose results are reduced, tile by tile: row and column statistics, a tensor's largest value.

The products' kernel is the one they have without reductions. Beside what it stores, every tile leaves the states of
the reductions over its rows, its columns or both; another kernel merges them and goes on. A sum that waits for a
maximum takes that of its tile, and is carried to the common one when states are merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, Part, Reduce, substitute, substitute_axes
from ..ir.plan import Store
from ..ir.poly import Axis
from ..ir.program import Buffer
from .contraction import Carried, Contraction, contract_nest
from .inline import reductions
from .nest import Nest, NestStore, Refusal, direct_reductions
from .normalise import normalise
from .operands import operands
from .passes import carrier
from .unify import unify


def contract_tiles(stores: Iterable[Store]) -> Contraction | Refusal:
    """The roles of a group's classes where tiles leave states, or why it is no such group."""
    nest = normalise(unify(list(stores)), rows=True)
    found = nest.reductions
    products = [r for r in found if operands(r) is not None]
    reduced = [r for r in found if r not in products]
    if not products or not reduced or nest.scans:
        return Refusal("nothing of a matrix product is reduced")
    domain = nest.free(products[0])
    leaving = tuple(s for s in nest.stores if not set(reduced).intersection(reductions([s.value])))
    waiting = tuple(s for s in nest.stores if s not in leaving)
    carried = {r: follows for r in reduced if (follows := _carried(r, reduced)) is not None}
    reason = _shape_obstacle(leaving, waiting, domain) or next(
        (o for r in reduced if (o := _reduction_obstacle(nest, r, reduced, carried, domain)) is not None), None
    )
    if reason is not None:
        return Refusal(reason)
    entering = {r: _entering(nest, r, carried.get(r)) for r in reduced}
    nowhere = [NestStore(_stand_in(DType.BOOL), (), v, domain) for values in entering.values() for v in values]
    roles = contract_nest(replace(nest, stores=(*leaving, *nowhere)))
    if isinstance(roles, Refusal):
        return roles
    if roles.inner:
        return Refusal("a product is made of another")
    c = replace(roles, leaving=leaving, waiting=waiting, entering=entering, carried=carried)
    if any(not c.sweeps(r) & {c.rows, c.columns} for r in reduced):
        return Refusal("a reduction runs over neither rows nor columns of a tile")
    return c


def _carried(reduce: Reduce, reduced: list[Reduce]) -> Carried | None:
    """How a sum follows the only other reduction that it waits for."""
    before = [r for r in reductions(reduce.inputs) if r in reduced]
    if len(before) != 1 or before[0].monoid != "max" or len(reduce.over) != 1 or len(before[0].over) != 1:
        return None
    h = carrier(reduce, before[0], before)
    return None if h is None else Carried(before[0], h, Load(_stand_in(before[0].part_dtypes[0]), ()))


def _stand_in(dtype: DType) -> Buffer:
    return Buffer("none", dtype, (), ())


def _entering(nest: Nest, reduce: Reduce, carried: Carried | None) -> tuple[Expr, ...]:
    here = {a: nest.bound[a].poly() for a in reduce.over}
    known: dict[Expr, Expr] = {}
    if carried is not None and carried.stand_in is not None:
        known[Part(carried.top, 0)] = carried.stand_in
    return tuple(substitute_axes(substitute(v, known), here) for v in reduce.inputs)


def _shape_obstacle(
    leaving: tuple[NestStore, ...], waiting: tuple[NestStore, ...], domain: frozenset[Axis]
) -> str | None:
    if any(s.region for s in (*leaving, *waiting)) or any(s.domain != domain for s in leaving):
        return "its results have different shapes"
    if any(not s.domain < domain for s in waiting):
        return "a result has more than the reductions leave"
    if any(operands(r) is not None for s in waiting for r in direct_reductions([s.value])):
        return "a product waits for its own reductions"
    return None


def _reduction_obstacle(
    nest: Nest, r: Reduce, reduced: list[Reduce], carried: dict[Reduce, Carried], domain: frozenset[Axis]
) -> str | None:
    if frozenset(nest.bound.get(a, a) for a in (*r.axes, *r.over)) != domain:
        return "a reduction does not run over the product's own axes"
    if r.monoid == "welford_merge":
        return "a merge of states beside a product"
    inside = reductions(r.inputs)
    if not any(operands(x) is not None for x in inside):
        return "a reduction of something else"
    waits = [x for x in inside if x in reduced]
    if waits and (r not in carried or nest.bound[r.over[0]] is not nest.bound[waits[0].over[0]]):
        return "a reduction waits for another one"
    return None
