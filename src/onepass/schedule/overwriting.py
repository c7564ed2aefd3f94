"""Results that take the place of an input which their own kernel reads in several sweeps: a loss's gradient its logits.

A program that owns whole rows may overwrite them when it has read all it needs: each load of the input stands before
the sweep that stores, or is of the very element that is stored next. A barrier in front of that sweep holds back
threads that are ahead of others. Anything else keeps a buffer of its own and is copied last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ir import kernel as ir
from ..ir.expr import Load, postorder
from ..ir.plan import Decision, FusionPlan, Group
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer

Scheduled = dict[Group, ir.ScheduledGroup]


def overwrite_rows(plan: FusionPlan, scheduled: Scheduled) -> tuple[FusionPlan, Scheduled]:
    """The plan and its kernels where results are written over the inputs they are to be copied to, if they can be."""
    for target, source in plan.rereads:
        for group in (s for s in plan.steps if isinstance(s, Group) and any(x.buffer is source for x in s.stores)):
            kernels = scheduled[group].kernels
            at = next(k for k, kernel in enumerate(kernels) if source in kernel.writes)
            changed = _overwriting(kernels[at], target, source, _by_rows(group, target))
            if changed is None or any(target in k.reads or source in k.parameters for k in kernels[at + 1 :]):
                continue
            kernels = (*kernels[:at], changed, *kernels[at + 1 :])
            scheduled = scheduled | {group: replace(scheduled[group], kernels=kernels)}
            copies = tuple(c for c in plan.copies if c[1] is not source)
            notes = tuple(_accepted(d, target) for d in plan.decisions)
            plan = replace(plan, copies=copies, in_place={**plan.in_place, source: target}, decisions=notes)
    return plan, scheduled


def _accepted(d: Decision, target: Buffer) -> Decision:
    reason = "rows are overwritten after their last read"
    mine = d.kind == "in-place" and d.consumer == target.name
    return replace(d, accepted=True, reason=reason) if mine else d


def _by_rows(group: Group, target: Buffer) -> bool:
    """Whether a matrix is read row by row: which row an element is of, an axis says."""
    if len(target.shape) != 2 or target.strides[1] is not Poly.ONE:
        return False
    read = (e for e in postorder([s.value for s in group.stores]) if isinstance(e, Load) and e.buffer is target)
    return all(e.index[0].axis is not None for e in read)


def _overwriting(kernel: ir.Kernel, target: Buffer, source: Buffer, by_rows: bool) -> ir.Kernel | None:
    """The kernel as it may write there, with a barrier if it needs one; None where the order does not allow that."""
    statements = ir.walk(kernel.body)
    stores = [s for s in statements if isinstance(s, ir.StoreElement) and s.buffer is source]
    loads = [s for s in statements if isinstance(s, ir.LoadElement) and s.buffer is target]
    tiles = any(isinstance(s, ir.LoadTile) and s.buffer is target for s in statements)
    if len(stores) != 1 or tiles or any(s.staged is not None for s in stores):
        return None
    grid = [g.axis for g in kernel.grid if g.extent is not Poly.ONE]
    here, around = _block_of(kernel.body, stores[0])
    once = stores[0].offset.names() >= {a.name for a in (*grid, *around)}  # an element is not stored again and again
    if once and all(s in here and s.offset is stores[0].offset for s in loads):
        return kernel
    width = target.strides[0].constant if by_rows else None
    if width is None:
        return None
    rows = _row_terms(stores[0].offset, width)
    if any(_row_terms(s.offset, width) != rows for s in loads) or not _axes(rows).issuperset(grid):
        return None
    body = _ordered(kernel.body, stores[0], target, _axes(rows))
    return None if body is None else replace(kernel, body=body, like=None)


def _block_of(body: Sequence[ir.Statement], store: ir.Statement) -> tuple[Sequence[ir.Statement], list[Axis]]:
    """The block that a statement stands in, and the axes of the loops around it."""
    around: list[Axis] = []
    while store not in body:
        inner = next(s for s in body if isinstance(s, ir.Loop | ir.When | ir.Share) and store in ir.walk((s,)))
        around += [inner.axis] if isinstance(inner, ir.Loop) else []
        body = inner.statements if isinstance(inner, ir.Loop) else inner.body
    return body, around


def _row_terms(offset: Poly, width: int) -> frozenset[Any]:
    """The part of a position that says which row it is in."""
    return frozenset((monomial, c) for monomial, c in offset.terms if monomial and c % width == 0)


def _axes(terms: frozenset[Any]) -> set[Any]:
    return {atom for monomial, _ in terms for atom in monomial}


def _ordered(
    body: tuple[ir.Statement, ...], store: ir.StoreElement, target: Buffer, rows: set[Any]
) -> tuple[ir.Statement, ...] | None:
    """A block with a barrier before the statement that stores, if nothing after that reads what was there."""
    at = next(k for k, s in enumerate(body) if s is store or store in ir.walk((s,)))
    early = _needed([s for s in body[at + 1 :] if isinstance(s, ir.LoadElement) and s.buffer is target], body[at + 1 :])
    if early is None:
        return None
    body = (*body[:at], *early, *(s for s in body[at:] if s not in early))
    at += len(early)
    statement = body[at]
    if any(_reads(s, target) for s in body[at + 1 :]):
        return None
    if isinstance(statement, ir.Loop) and statement.axis in rows and not _reads_first(statement, target):
        inside = _ordered(statement.body, store, target, rows)
        return None if inside is None else (*body[:at], replace(statement, body=inside), *body[at + 1 :])
    if any(s.offset is not store.offset for s in _loads(statement, target)):
        return None
    return (*body[:at], ir.Barrier(), *body[at:])


def _needed(loads: Sequence[ir.Statement], later: Sequence[ir.Statement]) -> list[ir.Statement] | None:
    """Loads and what they need of these statements, in order; None where that is more than loads and values."""
    made = {s.var.name: s for s in later if isinstance(s, ir.Let | ir.LoadElement)}
    others = {n for s in later if not isinstance(s, ir.Let | ir.LoadElement) for n in _defined(s)}
    needed: set[ir.Statement] = set()
    stack = list(loads)
    while stack:
        statement = stack.pop()
        needed.add(statement)
        names = ir.names(ir.reads(statement))
        if not others.isdisjoint(names):
            return None
        stack += [made[n] for n in names if n in made and made[n] not in needed]
    return [s for s in later if s in needed]


def _defined(s: ir.Statement) -> set[str]:
    """Names that are known after a statement."""
    return {v.name for v in ir.defined(s)} | ({s.axis.name} if isinstance(s, ir.Tile | ir.Bind) else set())


def _reads_first(loop: ir.Loop, target: Buffer) -> bool:
    return any(_reads(s, target) for s in (*loop.prologue, *(x for f in loop.origins for x in f.body)))


def _loads(statement: ir.Statement, target: Buffer) -> list[ir.LoadElement]:
    first = [s for f in statement.origins for s in f.body] if isinstance(statement, ir.Loop) else []
    return [s for s in ir.walk((statement, *first)) if isinstance(s, ir.LoadElement) and s.buffer is target]


def _reads(statement: ir.Statement, target: Buffer) -> bool:
    return bool(_loads(statement, target))
