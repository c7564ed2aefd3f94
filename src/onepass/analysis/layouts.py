"""Strides of internal values, which are free: a value lies in memory in the order in which most positions read it.

bias = table[bucket]              # [query, key, head], as an embedding gives it
scores + bias.permute(2, 0, 1)    # read by [batch, head, query, key]: bias is stored as [head, query, key]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..ir.expr import Expr, Load, postorder, rewrite
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer, Define, Extern, Program, Update, contiguous_strides, held
from .access import estimate, numel
from .inline import loaded

SHARED = 4  # positions of a reader for each element, from where on the order of the reader's dimensions decides


def lay_out(program: Program) -> Program:
    """The program with values that only definitions see laid out for those that read them.

    A value that is copied into other strides has these itself. Readers first: a value of the size of its reader
    follows it where its own strides are not those of its dimensions (eager keeps the strides of a permuted operand);
    a smaller one follows where many positions share its elements.
    """
    program = _as_copied(program, _seen(program))
    seen = _seen(program)
    orders: dict[Buffer, set[tuple[int, ...]]] = {}
    moved: dict[Buffer, Buffer] = {}
    for d in reversed(program.defines()):
        order = orders.pop(d.buffer, set())
        if len(order) == 1 and () not in order and (new := _in_order(d.buffer, *order)).strides != d.buffer.strides:
            moved[d.buffer] = new
        strides = dict(zip(d.dimensions, map(estimate, moved.get(d.buffer, d.buffer).strides), strict=True))
        for e in postorder([d.value]):
            if isinstance(e, Load) and e.buffer not in seen and _follows(e.buffer, numel(d.axes)):
                orders.setdefault(e.buffer, set()).add(_order(e, strides))
    return _renamed(program, moved)


def _as_copied(program: Program, seen: set[object]) -> Program:
    """The program with values that only definitions see stored where they are first copied to, and without that copy.

    Calls of the library see the copy: y = relu(x); convolution(y.contiguous(memory_format=torch.channels_last)).
    A copy that a call changes in place is no longer the value.
    """
    own = {d.buffer for d in program.defines()} - seen
    shown = seen - {e.overwrites for e in program.externs()}
    copied: dict[Buffer, Buffer] = {}
    for d in program.defines():
        if isinstance(d.value, Load) and d.buffer in shown and (source := d.value.buffer) in own:
            index = tuple(a.poly() if a in d.axes else Poly.ZERO for a in d.dimensions)
            alike = (source.dtype, source.shape, index) == (d.buffer.dtype, d.buffer.shape, d.value.index)
            if alike and source.strides != d.buffer.strides:
                copied.setdefault(source, d.buffer)
    copies = set(copied.values())
    kept = (s for s in program.statements if not isinstance(s, Define) or s.buffer not in copies)
    return _renamed(replace(program, statements=tuple(kept)), copied)


def _renamed(program: Program, names: Mapping[Buffer, Buffer]) -> Program:
    """The program with other buffers in the place of some that only definitions see."""
    if not names:
        return program

    def on_load(e: Expr) -> Expr | None:
        return Load(names[e.buffer], e.index) if isinstance(e, Load) and e.buffer in names else None

    def changed(d: Define) -> Define:
        value = d.value if names.keys().isdisjoint(loaded(d.value)) else rewrite(d.value, on_load)
        return replace(d, buffer=names.get(d.buffer, d.buffer), value=value)

    return replace(program, statements=tuple(changed(s) if isinstance(s, Define) else s for s in program.statements))


def _seen(program: Program) -> set[object]:
    """Inputs, outputs, and what calls and updates see."""
    seen: set[object] = {*program.inputs, *held(program.outputs)}
    for s in program.statements:
        match s:
            case Extern():
                seen.update(held((s.result, s.args, s.kwargs)))
            case Update():
                seen.update((s.target, s.source))
    return seen


def _follows(buffer: Buffer, points: int) -> bool:
    in_order = buffer.strides == contiguous_strides(buffer.shape)
    return len(buffer.shape) > 1 and (SHARED if in_order else 1) * numel(buffer.shape) <= points


def _order(load: Load, strides: Mapping[Axis, int]) -> tuple[int, ...]:
    """Dimensions of the loaded value, slowest first, as the memory of its reader runs; () where it has no order."""
    if not all(p.is_plain and p.axes <= strides.keys() for p in load.index):
        return ()
    last = max(strides.values(), default=0) + 1
    steps = [min((strides[a] for a in p.axes), default=last) for p in load.index]
    return tuple(sorted(range(len(steps)), key=lambda k: -steps[k]))


def _in_order(buffer: Buffer, order: Iterable[int]) -> Buffer:
    strides, step = list(buffer.strides), Poly.ONE
    for k in reversed(tuple(order)):
        strides[k] = step
        step = step * buffer.shape[k]
    return replace(buffer, strides=tuple(strides))
