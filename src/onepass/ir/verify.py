"""What a well-formed Program is. `verify_program` raises `VerifyError` with the statement at fault."""

from __future__ import annotations

from ..errors import VerifyError
from .dtypes import DType
from .expr import Expr, Index, Load, Part, Pointwise, Random, Reduce, postorder
from .ops import OPS
from .poly import Axis, Poly, Symbol
from .program import Define, Extern, HostValue, Program, Statement, Update, View, leaves, print_statement

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
    for leaf in leaves(program.outputs):
        value = leaf.buffer if isinstance(leaf, View) else leaf
        if isinstance(leaf, View | HostValue) and value not in known:
            raise VerifyError(f"the output {value} is never defined")


def _verify_statement(statement: Statement, known: set[object], program: Program) -> None:
    match statement:
        case Define():
            _verify_define(statement, known)
            known.add(statement.buffer)
        case Extern():
            for leaf in leaves((statement.args, statement.kwargs)):
                value = leaf.buffer if isinstance(leaf, View) else leaf
                assert not isinstance(leaf, View | HostValue) or value in known, f"{value} is read before it is defined"
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
        assert not isinstance(node, Reduce) or node is at_root, "a reduction below the root"
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
