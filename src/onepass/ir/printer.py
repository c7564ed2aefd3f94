"""Text of expressions and programs: one line per statement, with its origin.

    b0: f32[d0:8, d1:4] = exp(a0[d0, d1])    # exp  model.py:3: y = x.exp()

Values used more than once inside a statement are named first (v0, v1, ...), so that text stays as
small as the graph.
"""

from __future__ import annotations

from collections import Counter

from .expr import Const, Expr, Index, Load, Part, Pointwise, Random, Reduce, Scan, postorder
from .poly import Poly
from .program import Buffer, Define, Extern, HostValue, Program, Statement, Update, View

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "bitand": "&", "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def print_expr(root: Expr) -> str:
    """The expression as text; shared parts are named in a `let` in front."""
    lines, text = _render(root)
    return f"let {'; '.join(lines)} in {text}" if lines else text


def _render(root: Expr) -> tuple[list[str], str]:
    """Definitions of shared parts, and the text of the root."""
    uses = Counter(child for node in postorder([root]) for child in node.children)
    texts: dict[Expr, str] = {}
    lines: list[str] = []
    for node in postorder([root]):
        text = _text(node, texts)
        if uses[node] > 1 and not isinstance(node, Const | Index | Load | Reduce):
            name = f"v{len(lines)}"
            lines.append(f"{name} = {text}")
            text = name
        texts[node] = text
    return lines, texts[root]


def _text(node: Expr, texts: dict[Expr, str]) -> str:
    match node:
        case Const():
            value = node.value
            return f"{value!r}" if node.dtype.is_float or node.dtype.value == "bool" else f"{value}"
        case Load():
            return f"{node.buffer.name}[{', '.join(_poly(p, texts) for p in node.index)}]"
        case Index():
            return f"index({_poly(node.poly, texts)})"
        case Pointwise(op=op, args=args):
            inner = [texts[a] for a in args]
            if op in _INFIX:
                return f"({inner[0]} {_INFIX[op]} {inner[1]})"
            if op in ("cast", "widen", "narrow", "bitcast", "uniform"):
                return f"{op}<{node.dtype!r}>({inner[0]})"
            return f"{op}({', '.join(inner)})"
        case Reduce():
            over = ", ".join(f"{a.name}:{a.extent}" for a in node.over)
            return f"{node.monoid}[{over}]({', '.join(texts[i] for i in node.inputs)})"
        case Scan():
            inputs = ", ".join(texts[i] for i in node.inputs)
            return f"scan_{node.monoid}[{node.over.name}:{node.over.extent} at {node.at}]({inputs})"
        case Part():
            single = isinstance(node.source, Reduce) and len(node.source.part_dtypes) == 1
            return texts[node.source] if single else f"{texts[node.source]}.{node.index}"
        case Random():
            return f"random({texts[node.seed]}, {_poly(node.index, texts)}, {node.stream})"
    raise AssertionError(type(node))


def _poly(poly: Poly, texts: dict[Expr, str]) -> str:
    """The poly; data-dependent indices are spelled out."""
    text = repr(poly)
    for atom in poly.indirects():
        text = text.replace(atom.key, f"[{texts[atom.value]}]")
    return text


def print_statement(statement: Statement) -> str:
    """One statement, on one line."""
    origin = statement.origin
    note = "  ".join(t for t in (origin.op, origin.line) if t)
    match statement:
        case Define():
            axes = ", ".join(f"{a.name}:{a.extent}" for a in statement.axes)
            lines, value = _render(statement.value)
            shared = "".join(f"{line}; " for line in lines)
            text = f"{statement.buffer.name}: {statement.buffer.dtype!r}[{axes}] = {shared}{value}"
        case Extern():
            args = [_argument(a) for a in statement.args]
            args += [f"{k}={_argument(a)}" for k, a in statement.kwargs.items()]
            text = f"{statement.result} = extern {origin.op}({', '.join(args)})"
            note = f"{note}  why: {statement.why}"
        case Update():
            text = f"update {statement.target} <- {statement.source}"
    return f"{text}    # {note}" if note else text


def _argument(value: object) -> str:
    match value:
        case View():
            if value.is_whole:
                return value.buffer.name
            shape = ", ".join(map(repr, value.shape))
            strides = ", ".join(map(repr, value.strides))
            return f"{value.buffer.name}.view(({shape}), ({strides}), {value.offset})"
        case tuple() | list():
            return f"[{', '.join(_argument(v) for v in value)}]"
        case HostValue() | Poly() | int() | float() | str() | None:
            return f"{value!r}"
    return type(value).__name__ if not type(value).__module__.startswith("torch") else str(value).split("\n")[0]


def print_program(program: Program) -> str:
    """The whole program."""
    inputs = ", ".join(_input(i) for i in program.inputs)
    lines = [f"program({inputs}):"]
    lines += [f"  {s} = size {dim} of {buffer}" for s, (buffer, dim) in program.symbol_sources.items()]
    lines += [f"  {print_statement(s)}" for s in program.statements]
    lines.append(f"  return {', '.join(_argument(o) for o in program.outputs)}")
    return "\n".join(lines)


def _input(value: object) -> str:
    if isinstance(value, Buffer):
        return f"{value.name}: {value.dtype!r}[{', '.join(map(repr, value.shape))}]"
    return repr(value)
