"""What is legal in a program, a plan and a kernel; run between stages on every compilation.

A violation is a bug in onepass and is reported as a `VerifyError` with the statement at fault, before any code runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import VerifyError
from . import kernel as k
from .dtypes import DType
from .expr import Expr, Index, Load, Part, Pointwise, Random, Reduce, Scan, postorder
from .kernel import Kernel, Var
from .ops import OPS
from .plan import FusionPlan, Group
from .poly import Axis, Division, Poly, Symbol
from .program import Buffer, Define, Extern, Program, Statement, Update, View, buffers_in, held, leaves, print_statement

# Operations whose arguments all have one type, which is also the result's (or bool).
_MIXED = frozenset(["where", "cast", "narrow", "widen", "bitcast", "uniform"])


def verify_program(program: Program) -> None:
    """Check a program; raise `VerifyError` at the first fault."""
    known: set[object] = set(program.inputs) | set(program.symbol_sources)
    for statement in program.statements:
        try:
            _verify_statement(statement, known, program)
        except AssertionError as fault:
            raise VerifyError(f"{fault} in: {print_statement(statement)}") from None
    for value in held(program.outputs):
        if value not in known:
            raise VerifyError(f"the output {value} is never defined")


def _verify_statement(statement: Statement, known: set[object], program: Program) -> None:
    match statement:
        case Define():
            _verify_define(statement, known)
            known.add(statement.buffer)
        case Extern():
            for value in held((statement.args, statement.kwargs)):
                assert value in known, f"{value} is read before it is defined"
            for leaf in leaves((statement.args, statement.kwargs)):
                if isinstance(leaf, View | Poly):
                    _verify_poly(leaf.offset if isinstance(leaf, View) else leaf, known)
            assert statement.result not in known, "defined twice"
            known.add(statement.result)
        case Update():
            assert statement.target in program.inputs, "only an input can be updated"
            assert statement.source in known, f"{statement.source} is read before it is defined"
            assert statement.source.dtype is statement.target.dtype, "an update of another type"
            assert statement.source.shape == statement.target.shape, "an update of another shape"


def _verify_define(statement: Define, known: set[object]) -> None:
    buffer, value = statement.buffer, statement.value
    assert buffer not in known, "defined twice"
    assert len(buffer.shape) == len(buffer.strides), "as many strides as sizes"
    assert statement.axes == tuple(Axis(f"d{k}", e) for k, e in enumerate(buffer.shape) if e is not Poly.ONE), (
        "axes are the canonical axes of the shape"
    )
    assert value.dtype is buffer.dtype, f"a value of type {value.dtype!r} in a buffer of type {buffer.dtype!r}"
    assert value.axes <= set(statement.axes), f"free axes {set(value.axes) - set(statement.axes)}"
    for poly in (*buffer.shape, *buffer.strides):
        _verify_poly(poly, known)
    root = value
    while isinstance(root, Pointwise) and root.op in ("cast", "narrow"):
        root = root.args[0]
    at_root = root.source if isinstance(root, Part) else None
    for node in postorder([value]):
        assert not isinstance(node, Reduce | Scan) or node is at_root, "a reduction or a scan below the root"
        _verify_node(node, known)


def _verify_node(node: Expr, known: set[object]) -> None:
    match node:
        case Load():
            assert node.buffer in known, f"{node.buffer} is read before it is defined"
            assert len(node.index) == len(node.buffer.shape), f"{node.buffer} has another number of dimensions"
            for poly in node.index:
                _verify_poly(poly, known)
        case Index():
            _verify_poly(node.poly, known)
        case Random():
            assert node.seed.dtype is DType.I64, "a seed is int64"
            _verify_poly(node.index, known)
        case Reduce():
            assert node.over, "a reduction over nothing"
            assert all(a.extent is not Poly.ONE for a in node.over), "an axis of extent 1"
        case Scan():
            assert node.over.extent is not Poly.ONE, "an axis of extent 1"
            assert not node.is_open, "a scan that is read along its own axis"
            _verify_poly(node.at, known)
        case Pointwise():
            _verify_pointwise(node)


def _verify_pointwise(node: Pointwise) -> None:
    types = [a.dtype for a in node.args]
    if node.op == "where":
        assert types[0] is DType.BOOL and types[1] is types[2] is node.dtype, f"where of {types}"
    elif node.op == "widen":
        assert types[0].is_half and node.dtype is DType.F32, f"widen of {types[0]!r}"
    elif node.op == "narrow":
        assert types[0] is DType.F32 and node.dtype.is_half, f"narrow of {types[0]!r}"
    elif node.op not in _MIXED:
        assert len(set(types)) == 1, f"{node.op} of {types}"
        assert node.dtype is types[0] or OPS[node.op].result == "bool", f"{node.op} gives {node.dtype!r}"
        assert not types[0].is_half, f"{node.op} computes in 16 bits"


def _verify_poly(poly: Poly, known: set[object]) -> None:
    for axis in poly.axes:
        assert axis.extent is not Poly.ONE, f"axis {axis} of extent 1"
    for symbol in poly.symbols():
        assert isinstance(symbol, Symbol) and symbol in known, f"the size {symbol} has no source"


# --- plans and kernels ---


def verify_plan(program: Program, plan: FusionPlan) -> None:
    """Every buffer that is read or returned is made exactly once, before it is used."""
    made = {b for b in program.inputs if isinstance(b, Buffer)}
    for step in plan.steps:
        if isinstance(step, Extern):
            _expect_made(buffers_in((step.args, step.kwargs)), made, step.origin.node)
            if isinstance(step.result, Buffer):
                made.add(step.result)
            continue
        _verify_group(step, made)
        made |= {s.buffer for s in step.stores}
    _expect_made(buffers_in(program.outputs), made, "the outputs")
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


class _Scope:
    def __init__(self, names: set[str], accumulators: set[str]) -> None:
        self.names, self.accumulators = names, accumulators


def verify_kernel(kernel: Kernel) -> None:
    """Every name is defined once and before use, in a scope that can see it; every buffer is a parameter."""
    names = {g.axis.name for g in kernel.grid} | {s.name for s in kernel.symbols}
    if len(names) != len(kernel.grid) + len(kernel.symbols):
        raise VerifyError(f"{kernel.name}: two grid axes or sizes share a name")
    _verify_block(kernel, kernel.body, _Scope(names, set()))


def _verify_block(kernel: Kernel, body: tuple[k.Statement, ...], outer: _Scope) -> None:
    scope = _Scope(set(outer.names), set(outer.accumulators))
    for s in body:
        folded = s.summed if isinstance(s, k.Contract) else s.over if isinstance(s, k.Fold) else ()
        folded = (s.along,) if isinstance(s, k.Advance) and s.along is not None else folded
        for operand in (*k.reads(s), *(axis.poly() for axis in folded)):
            if isinstance(operand, Poly):
                _use_poly(kernel, operand, scope, s)
            elif isinstance(operand, Var) and operand.name not in scope.names:
                raise VerifyError(f"{kernel.name}: {operand.name} is used before it is defined, in {s}")
        _verify_kernel_statement(kernel, s, scope)
        for variable in k.defined(s):
            if variable.name in scope.names:
                raise VerifyError(f"{kernel.name}: {variable.name} is defined twice")
            scope.names.add(variable.name)


def _verify_kernel_statement(kernel: Kernel, s: k.Statement, scope: _Scope) -> None:
    match s:
        case k.LoadElement() | k.LoadTile():
            _parameter(kernel, s.buffer, kernel.reads)
        case k.StoreElement() | k.StoreTile():
            _parameter(kernel, s.buffer, kernel.writes)
        case k.Start():
            scope.accumulators.add(s.accumulator.name)
        case k.Accumulate() | k.Finish() | k.Rescale() | k.Contract() | k.Advance() if s.accumulator is not None:
            _started(kernel, s.accumulator.name, scope)
        case k.Tile() | k.Bind():
            scope.names.add(s.axis.name)
        case k.When() | k.Stage():
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
    if s.parts is not None:
        _verify_parts(kernel, s.parts)
    inside = {g.axis.name for g in s.grid} | ({n.name for n, _ in s.parts.numbers} if s.parts is not None else set())
    numbers = len(s.parts.numbers) if s.parts is not None else 0
    if len(inside) != len(s.grid) + numbers or inside & scope.names:
        raise VerifyError(f"{kernel.name}: a grid axis hides another")
    _verify_block(kernel, s.body, _Scope(scope.names | inside, scope.accumulators))


def _verify_parts(kernel: Kernel, parts: k.Parts) -> None:
    columns = (parts.firsts, *parts.buffers, *(n for _, n in parts.numbers))
    if any(len(c) != parts.count for c in columns):
        raise VerifyError(f"{kernel.name}: a part lacks a buffer or a number")
    for buffers in parts.buffers:
        for buffer in buffers:
            _parameter(kernel, buffer, kernel.writes if buffers[0] in kernel.writes else kernel.reads)
        if len({(b.dtype, b.device) for b in buffers}) > 1:
            raise VerifyError(f"{kernel.name}: buffers of one place have several types")


def _started(kernel: Kernel, name: str, scope: _Scope) -> None:
    if name not in scope.accumulators:
        raise VerifyError(f"{kernel.name}: accumulator {name} is used before its start")


def _parameter(kernel: Kernel, buffer: Buffer, allowed: tuple[Buffer, ...]) -> None:
    if buffer not in allowed:
        raise VerifyError(f"{kernel.name}: {buffer!r} is not a parameter for that")


def _use_poly(kernel: Kernel, poly: Poly, scope: _Scope, s: k.Statement) -> None:
    for atom in poly.inner_atoms():
        if not isinstance(atom, Division) and getattr(atom, "name", None) not in scope.names:
            raise VerifyError(f"{kernel.name}: {atom!r} is not defined here, in {s}")
