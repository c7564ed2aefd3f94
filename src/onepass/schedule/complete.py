"""The last step of a schedule: what an emitter prints and a launch assumes, decided from the finished statements."""

from __future__ import annotations

from dataclasses import replace

from ..ir import kernel as ir
from ..ir.expr import Const
from ..ir.ops import CHECKED, NEED_DENORMALS
from ..ir.poly import Axis, Poly, Symbol, product
from ..ir.program import Buffer
from ..ir.source import MULTIPLE
from .moments import shift_moments
from .sides import separate_sides

TEAM_WORK = 1 << 15  # elements below which a team of threads costs more than it saves
WATCHED_WORDS = 64  # sizes and numbers of a launch, as many as the launcher looks at
NAME_LENGTH = 48
_ARITHMETIC = frozenset(("add", "sub", "mul", "neg", "abs", "maximum", "minimum", "fma"))
_UNNAMED = frozenset(
    ("cast", "narrow", "widen", "reopen", "bitcast", "where", "eq", "ne", "lt", "le", "gt", "ge", "bitand", "bitor",
     "bitnot", "wrap_index", "check_index", "uniform", "single")
)  # fmt: skip


def completed(kernel: ir.Kernel) -> ir.Kernel:
    """The kernel with every decision that is left to its own statements."""
    statements = ir.walk(kernel.body)
    kernel = replace(kernel, entry=entry_name(statements))
    return _tile_program(kernel, statements) if kernel.warps else _thread_program(kernel)


def _thread_program(kernel: ir.Kernel) -> ir.Kernel:
    body = ir.rewritten(shift_moments(kernel.body), _take_turns)
    return replace(kernel, body=body, team_work=TEAM_WORK)


def _take_turns(s: ir.Statement) -> ir.Statement:
    """Lanes that enter one state do so one after another."""
    if not isinstance(s, ir.Loop) or s.kind == "sweep":
        return s
    return replace(s, ordered=any(isinstance(x, ir.Accumulate) and not x.lane.axes for x in s.statements))


def _tile_program(kernel: ir.Kernel, statements: list[ir.Statement]) -> ir.Kernel:
    lets = [s for s in statements if isinstance(s, ir.Let)]
    tensors = [b for b in kernel.parameters if b not in kernel.numbers and product(b.shape) is not Poly.ONE]
    halves = all(b.dtype.bytes == 2 for b in tensors)

    def change(s: ir.Statement) -> ir.Statement:
        match s:
            case ir.Loop() if kernel.stages and not kernel.resident and s.extent is not Poly.ONE:
                innermost = not any(isinstance(x, ir.Loop) for x in ir.walk(s.body))
                return replace(s, stages=s.ahead(kernel.stages)) if innermost else s
            case ir.RandomWord() if s.along is not None and halves and (s.along.extent.constant or 0) >= 8:
                return replace(s, calls=2)  # a thread has eight neighbours then, not four
        return s

    return replace(
        kernel,
        body=separate_sides(ir.rewritten(kernel.body, change)),
        multiples=_multiples(kernel, statements),
        matrices=_packed_matrices(statements),
        denormals=any(s.op in NEED_DENORMALS and _is_float(s.args[0]) for s in lets),
        asserts=any(s.op in CHECKED for s in lets),
    )


def _is_float(value: ir.Operand) -> bool:
    return isinstance(value, ir.Var | Const) and value.dtype.is_float


# --- the name ---


def entry_name(statements: list[ir.Statement]) -> str:
    """The function's name: its reductions and functions in order, or its arithmetic where there is nothing else."""
    words = list(dict.fromkeys(word for s in statements if (word := _word(s))))
    text = "_".join([w for w in words if w not in _ARITHMETIC] or words)
    if len(text) > NAME_LENGTH:
        text = text[: text.rindex("_", 0, NAME_LENGTH + 1)]
    return f"onepass_{text or 'copy'}"


def _word(s: ir.Statement) -> str:
    match s:
        case ir.Let() if s.op not in _UNNAMED and _is_float(s.args[0]):
            return s.op
        case ir.Accumulate():
            return s.accumulator.monoid.removesuffix("_merge")
        case ir.Fold():
            return s.monoid.removesuffix("_merge")
        case ir.Advance():
            return f"scan_{s.monoid}"
        case ir.Contract():
            return "dot"
        case ir.RandomWord() | ir.FillRandom():
            return "random"
    return ""


# --- what a launch assumes ---


def _multiples(kernel: ir.Kernel, statements: list[ir.Statement]) -> tuple[Symbol, ...]:
    """Sizes that decide whether neighbours in memory are loaded together, and that were multiples when traced."""
    deciding = _deciding_sizes(statements)
    watched = kernel.symbols[: max(0, WATCHED_WORDS - len(kernel.numbers))]
    return tuple(s for s in watched if s in deciding and s.hint is not None and s.hint > 0 and s.hint % MULTIPLE == 0)


def _deciding_sizes(statements: list[ir.Statement]) -> set[Symbol]:
    """Sizes where rows end, or that rows are apart.

    How many rows there are decides nothing, nor do multiples of such a size.
    """
    offsets = [
        s.offset for s in statements if isinstance(s, ir.LoadElement | ir.StoreElement | ir.LoadTile | ir.StoreTile)
    ]
    bound = [s.value for s in statements if isinstance(s, ir.Bind)]
    found = [*offsets, *bound, *(a for s in statements if isinstance(s, ir.Let) for a in s.args if isinstance(a, Poly))]

    def lies_across(axis: Axis) -> bool:
        steps = [p.coefficient(axis) for p in offsets if axis in p.axes]
        return not any(step is None or step is Poly.ONE for step in steps) and not any(axis in p.axes for p in bound)

    found += [p for s in statements if isinstance(s, ir.Tile) and not lies_across(s.axis) for p in s.limits]
    terms = [
        (m, c) for p in found for m, c in p.terms if c % MULTIPLE or not all(isinstance(a, Axis | Symbol) for a in m)
    ]
    return {size for term in terms for size in Poly((term,)).symbols()}


def _packed_matrices(statements: list[ir.Statement]) -> tuple[Buffer, ...]:
    """Buffers of packed types that go to the matrix unit and nowhere else."""
    loads: dict[Buffer, set[str]] = {}
    for s in statements:
        if isinstance(s, ir.LoadElement | ir.LoadTile) and s.buffer.dtype.is_packed:
            loads.setdefault(s.buffer, set()).add(s.var.name)
    if not loads:
        return ()
    operands = [o for s in statements if isinstance(s, ir.Contract) for o in (s.left, s.right)]
    multiplied = {o.name for o in operands if isinstance(o, ir.Var)}
    others = (v for s in statements if not isinstance(s, ir.Contract) for v in ir.reads(s))
    elsewhere = {v.name for v in others if isinstance(v, ir.Var)}
    return tuple(b for b, names in loads.items() if names <= multiplied - elsewhere)
