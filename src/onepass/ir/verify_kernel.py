"""What is legal in a plan and in a kernel; run between stages on every compilation.

A violation is a bug in onepass and is reported with the statement, before any code runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from ..errors import VerifyError
from . import kernel as k
from .expr import Load, postorder
from .kernel import Kernel, Operand, Statement, Var
from .plan import FusionPlan, Group
from .poly import Division, Poly
from .program import Buffer, Extern, Program, Update, View, leaves


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
    for store in group.stores:
        if store.buffer in made:
            raise VerifyError(f"{store.buffer!r} is stored twice")
        used = [e.buffer for e in postorder([store.value]) if isinstance(e, Load)]
        _expect_made(used, made, repr(store.buffer))


def _expect_made(used: Iterable[Buffer], made: set[Buffer], where: str) -> None:
    for buffer in used:
        if buffer not in made:
            raise VerifyError(f"{where} uses {buffer!r} before it is made")


def _buffers(tree: object) -> Iterator[Buffer]:
    return (leaf.buffer if isinstance(leaf, View) else leaf for leaf in leaves(tree) if isinstance(leaf, View | Buffer))


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
        for operand in _operands(s):
            if isinstance(operand, Poly):
                _use_poly(kernel, operand, scope, s)
            elif isinstance(operand, Var) and operand.name not in scope.names:
                raise VerifyError(f"{kernel.name}: {operand.name} is used before it is defined, in {s}")
        _verify_statement(kernel, s, scope)
        for variable in _defined(s):
            if variable.name in scope.names:
                raise VerifyError(f"{kernel.name}: {variable.name} is defined twice")
            scope.names.add(variable.name)


def _operands(s: Statement) -> Iterator[Operand]:
    """The values that a statement itself uses: every operand and poly in its fields, and the axes it sums over."""
    for name in (f.name for f in fields(s) if f.name not in ("var", "parts")):
        value = getattr(s, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Poly | Var):
                yield item
    if isinstance(s, k.Contract | k.Fold):
        yield from (axis.poly() for axis in (s.summed if isinstance(s, k.Contract) else s.over))


def _defined(s: Statement) -> tuple[Var, ...]:
    if isinstance(s, k.Finish | k.Fold):
        return s.parts
    variable: Var | None = getattr(s, "var", None)
    into_state = isinstance(s, k.Contract) and s.accumulator is not None
    return () if variable is None or into_state else (variable,)


def _verify_statement(kernel: Kernel, s: Statement, scope: _Scope) -> None:
    match s:
        case k.LoadElement():
            _parameter(kernel, s.buffer, kernel.reads)
        case k.LoadTile():
            _parameter(kernel, s.descriptor.buffer, kernel.reads)
        case k.StoreTile():
            _parameter(kernel, s.descriptor.buffer, kernel.writes)
        case k.StoreElement():
            _parameter(kernel, s.buffer, kernel.writes)
        case k.Start():
            scope.accumulators.add(s.accumulator.name)
        case k.Accumulate() | k.Finish() | k.Rescale() | k.Contract() if s.accumulator is not None:
            _started(kernel, s.accumulator.name, scope)
        case k.Tile() | k.Bind():
            scope.names.add(s.axis.name)
        case k.When():
            _verify_block(kernel, s.body, scope)
        case k.Loop():
            _verify_loop(kernel, s, scope)
        case k.Share():
            _verify_share(kernel, s, scope)


def _verify_loop(kernel: Kernel, s: k.Loop, scope: _Scope) -> None:
    axes = {s.axis.name} | ({s.lane.name} if s.lane is not None else set())
    if axes & scope.names:
        raise VerifyError(f"{kernel.name}: loop axis {s.axis.name} hides another")
    _verify_block(kernel, s.prologue, _Scope(scope.names | {f"{s.axis.name}_at"}, scope.accumulators))
    inside = _Scope(scope.names | axes, scope.accumulators)
    for first in s.origins:
        _started(kernel, first.accumulator.name, scope)
        _verify_block(kernel, first.body, inside)
    _verify_block(kernel, s.body, inside)


def _verify_share(kernel: Kernel, s: k.Share, scope: _Scope) -> None:
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
    for atom in poly.inner_atoms():
        if not isinstance(atom, Division) and getattr(atom, "name", None) not in scope.names:
            raise VerifyError(f"{kernel.name}: {atom!r} is not defined here, in {s}")
