"""What is legal in a plan and in a kernel; run between stages on every compilation.

A violation is a bug in onepass and is reported with the statement, before any code runs.
"""

from __future__ import annotations

from ..errors import VerifyError
from .kernel import (
    Accumulate,
    Bind,
    Contract,
    FillRandom,
    Finish,
    Fold,
    Kernel,
    Let,
    LoadElement,
    LoadTile,
    Loop,
    Operand,
    RandomWord,
    ReadLocal,
    Rescale,
    Share,
    Start,
    Statement,
    StoreElement,
    StoreTile,
    Tile,
    Var,
    When,
    WriteLocal,
)
from .plan import FusionPlan, Group
from .poly import Poly, Quotient, Remainder
from .program import Buffer, Extern, Program, Update, View


def verify_plan(program: Program, plan: FusionPlan) -> None:
    """Every buffer that is read or returned is made exactly once, before it is used."""
    made = {b for b in program.inputs if isinstance(b, Buffer)}
    for step in plan.steps:
        if isinstance(step, Extern):
            _expect_made(_buffers((step.args, step.kwargs)), made, step.origin.node)
            if isinstance(step.result, Buffer):
                made.add(step.result)
            continue
        _verify_group(step, made)
        made |= {s.buffer for s in step.stores}
    _expect_made(_buffers(program.outputs), made, "the outputs")
    updated = {s.source for s in program.statements if isinstance(s, Update)}
    placed = set(plan.in_place) | {source for _, source in plan.copies}
    if updated != placed:
        raise VerifyError(f"updates of inputs are lost: {sorted(map(repr, updated - placed))}")


def _verify_group(group: Group, made: set[Buffer]) -> None:
    from .expr import Load, postorder

    for store in group.stores:
        if store.buffer in made:
            raise VerifyError(f"{store.buffer!r} is stored twice")
        used = [e.buffer for e in postorder([store.value]) if isinstance(e, Load)]
        _expect_made(used, made, repr(store.buffer))


def _expect_made(used: list[Buffer], made: set[Buffer], where: str) -> None:
    for buffer in used:
        if buffer not in made:
            raise VerifyError(f"{where} uses {buffer!r} before it is made")


def _buffers(tree: object) -> list[Buffer]:
    match tree:
        case View():
            return [tree.buffer]
        case Buffer():
            return [tree]
        case list() | tuple():
            return [b for item in tree for b in _buffers(item)]
        case dict():
            return [b for item in tree.values() for b in _buffers(item)]
    return []


class _Scope:
    def __init__(self, names: set[str], accumulators: set[str]) -> None:
        self.names, self.accumulators = names, accumulators


def verify_kernel(kernel: Kernel) -> None:
    """Every name is defined once and before use, in a scope that can see it; every buffer is a parameter."""
    names = {g.axis.name for g in kernel.grid} | {s.name for s in kernel.symbols}
    if len(names) != len(kernel.grid) + len(kernel.symbols):
        raise VerifyError(f"{kernel.name}: two grid axes or sizes share a name")
    _verify_block(kernel, kernel.body, _Scope(names, set()))


def _verify_block(kernel: Kernel, body: tuple[Statement, ...], outer: _Scope) -> None:
    scope = _Scope(set(outer.names), set(outer.accumulators))
    for s in body:
        if isinstance(s, Share):
            _verify_share(kernel, s, scope)
        else:
            _verify_statement(kernel, s, scope)


def _verify_statement(kernel: Kernel, s: Statement, scope: _Scope) -> None:  # noqa: C901
    def use(*operands: Operand | None) -> None:
        for o in operands:
            if isinstance(o, Poly):
                _use_poly(kernel, o, scope, s)
            elif isinstance(o, Var) and o.name not in scope.names:
                raise VerifyError(f"{kernel.name}: {o.name} is used before it is defined, in {s}")

    def define(*variables: Var) -> None:
        for v in variables:
            if v.name in scope.names:
                raise VerifyError(f"{kernel.name}: {v.name} is defined twice")
            scope.names.add(v.name)

    match s:
        case Let():
            use(*s.args)
            define(s.var)
        case LoadElement():
            use(s.offset, s.guard)
            _parameter(kernel, s.buffer, kernel.reads)
            define(s.var)
        case LoadTile():
            use(s.row, s.column, s.offset)
            _parameter(kernel, s.descriptor.buffer, kernel.reads)
            define(s.var)
        case StoreTile():
            use(s.row, s.column, s.offset, s.value)
            _parameter(kernel, s.descriptor.buffer, kernel.writes)
        case StoreElement():
            use(s.offset, s.value, s.guard)
            _parameter(kernel, s.buffer, kernel.writes)
        case RandomWord():
            use(s.seed, s.index)
            define(s.var)
        case FillRandom():
            use(s.seed, s.first)
        case ReadLocal():
            use(s.index)
            define(s.var)
        case WriteLocal():
            use(s.index, s.value)
        case Start():
            scope.accumulators.add(s.accumulator.name)
        case Accumulate():
            use(s.lane, s.rounds, *s.inputs)
            _started(kernel, s.accumulator.name, scope)
        case Finish():
            use(s.lane)
            _started(kernel, s.accumulator.name, scope)
            define(*s.parts)
        case Rescale():
            use(s.factor)
            _started(kernel, s.accumulator.name, scope)
        case Contract():
            use(s.left, s.right, *(a.poly() for a in s.summed))
            if s.accumulator is not None:
                _started(kernel, s.accumulator.name, scope)
            else:
                define(s.var)
        case Fold():
            use(*s.inputs, *(a.poly() for a in s.over))
            define(*s.parts)
        case Tile():
            use(*s.limits)
            scope.names.add(s.axis.name)
        case Bind():
            use(s.value)
            scope.names.add(s.axis.name)
        case When():
            use(s.condition)
            _verify_block(kernel, s.body, scope)
        case Loop():
            use(s.extent, s.limit, *s.after, *s.before)
            _verify_loop(kernel, s, scope)


def _verify_loop(kernel: Kernel, s: Loop, scope: _Scope) -> None:
    axes = {s.axis.name} | ({s.lane.name} if s.lane is not None else set())
    if axes & scope.names:
        raise VerifyError(f"{kernel.name}: loop axis {s.axis.name} hides another")
    _verify_block(kernel, s.prologue, _Scope(scope.names | {f"{s.axis.name}_at"}, scope.accumulators))
    inside = _Scope(scope.names | axes, scope.accumulators)
    for first in s.origins:
        _started(kernel, first.accumulator.name, scope)
        _verify_block(kernel, first.body, inside)
    _verify_block(kernel, s.body, inside)


def _verify_share(kernel: Kernel, s: Share, scope: _Scope) -> None:
    _use_poly(kernel, s.end, scope, s)
    inside = {g.axis.name for g in s.grid}
    if len(inside) != len(s.grid) or inside & scope.names:
        raise VerifyError(f"{kernel.name}: a grid axis hides another")
    _verify_block(kernel, s.body, _Scope(scope.names | inside, scope.accumulators))


def _started(kernel: Kernel, name: str, scope: _Scope) -> None:
    if name not in scope.accumulators:
        raise VerifyError(f"{kernel.name}: accumulator {name} is used before its start")


def _parameter(kernel: Kernel, buffer: Buffer, allowed: tuple[Buffer, ...]) -> None:
    if buffer not in allowed:
        raise VerifyError(f"{kernel.name}: {buffer!r} is not a parameter for that")


def _use_poly(kernel: Kernel, poly: Poly, scope: _Scope, s: Statement) -> None:
    for atom in poly.atoms():
        if isinstance(atom, Quotient | Remainder):
            _use_poly(kernel, atom.numerator, scope, s)
            _use_poly(kernel, atom.denominator, scope, s)
        elif getattr(atom, "name", None) not in scope.names:
            raise VerifyError(f"{kernel.name}: {atom!r} is not defined here, in {s}")
