"""Scalar expressions over axes: what one element of a buffer is.

Nodes are interned (equal means identical) and know their dtype and free axes. A reduction binds its
axes, a scan the axis it runs along; `Part` takes one component of their state.

    softmax's denominator:  Part(Reduce("sum", (exp(Load(x, (i, k)) - m),), (k,)), 0)
    cumsum at (i, j):       Part(Scan("sum", (Load(x, (i, k)),), k, j), 0)
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .buffer import Buffer
from .dtypes import DType
from .interning import Interned, digest
from .monoids import MONOIDS, identity, part_dtypes
from .ops import OPS
from .poly import Atom, Axis, Poly, in_range, transform

_serial = itertools.count()
_NO_AXES: frozenset[Axis] = frozenset()
_WORD = (1 << 64) - 1
_LAST = 1 << 64
_NOWHERE = 1 << 62  # the place of a value that reads nothing


def _infix(op: str, reflected: bool = False) -> Callable[[Expr, Expr | float], Expr]:
    return lambda x, y: calculate(op, y, x) if reflected else calculate(op, x, y)


class Expr(metaclass=Interned):
    """A scalar value at a point of its free axes. Arithmetic and bits as operators: see `calculate`.

    Operands that commute are sorted by `kind`, which follows from what is computed, then by `order`, which follows from
    the layouts of buffers too: both are the same in every process and in every layer of a model. Where they are equal,
    `place` decides, the first buffer that is read.
    """

    __slots__ = ("__weakref__", "axes", "children", "dtype", "kind", "order", "place", "serial")
    dtype: DType
    axes: frozenset[Axis]
    children: tuple[Expr, ...]
    serial: int
    kind: int
    order: int
    place: int

    def _set(
        self, dtype: DType, axes: frozenset[Axis], children: tuple[Expr, ...], *own: int, place: int = _NOWHERE
    ) -> None:
        """`own`: what this node is beside its type and operands, as numbers."""
        self.dtype, self.axes, self.children, self.serial = dtype, axes, children, next(_serial)
        kind = digest(type(self).__name__), digest(dtype.value)
        what = bool(axes) if isinstance(self, Load | Index) else own[0]  # no sizes
        self.kind = hash((kind, what, *(c.kind for c in children))) & _WORD
        self.order = hash((kind, own, *(c.order for c in children))) & _WORD
        self.place = min((place, *(c.place for c in children)))

    def __repr__(self) -> str:
        lines, text = rendered(self)
        return f"let {'; '.join(lines)} in {text}" if lines else text

    __add__ = __radd__ = _infix("add")
    __sub__, __rsub__ = _infix("sub"), _infix("sub", reflected=True)
    __mul__ = __rmul__ = _infix("mul")
    __truediv__, __rtruediv__ = _infix("div"), _infix("div", reflected=True)
    __and__, __or__, __lshift__, __rshift__ = _infix("bitand"), _infix("bitor"), _infix("shl"), _infix("shr")

    def __neg__(self) -> Expr:
        return pointwise("neg", self)

    def __invert__(self) -> Expr:
        return pointwise("bitnot", self)


class Indirect(Atom):
    """An index that is data: the (already wrapped and checked) value of an integer expression."""

    __slots__ = ("value",)

    def __init__(self, value: Expr) -> None:
        self.value = value
        self.key, self.form = f"[v{value.order:x}.{value.place}.{value.serial}]", hash((4, value.order))

    @property
    def axes(self) -> frozenset[Axis]:
        return self.value.axes


def _indices(polys: Iterable[Poly]) -> tuple[Expr, ...]:
    """The values that are indices in polys, each once."""
    return tuple(dict.fromkeys(a.value for p in polys for a in p.indirects() if isinstance(a, Indirect)))


class Const(Expr):
    """A literal, keyed by type and bit pattern: 0.0, -0.0, NaN, 1 and True are all different."""

    __slots__ = ("payload",)

    def __init__(self, dtype: DType, payload: str) -> None:
        self.payload = payload
        self._set(dtype, _NO_AXES, (), digest(payload))
        self.kind |= _LAST  # x * 2.0 is easier to read than 2.0 * x

    @property
    def value(self) -> float | int | bool:
        if self.dtype.is_float:
            return float.fromhex(self.payload)
        return self.payload == "True" if self.dtype is DType.BOOL else int(self.payload)


class Load(Expr):
    """buffer[index]: one poly per dimension. Out-of-range points are never used (masked regions)."""

    __slots__ = ("buffer", "index")

    def __init__(self, buffer: Buffer, index: tuple[Poly, ...]) -> None:
        self.buffer, self.index = buffer, index
        own = buffer.form, *(p.form for p in index)
        self._set(buffer.dtype, _union(p.axes for p in index), _indices(index), *own, place=buffer.place)


class Index(Expr):
    """An index polynomial as an int64 value."""

    __slots__ = ("poly",)

    def __init__(self, poly: Poly) -> None:
        self.poly = poly
        self._set(DType.I64, poly.axes, _indices((poly,)), poly.form)


class Pointwise(Expr):
    """An operation of `ops.OPS` on scalars. Build with `pointwise`, which simplifies."""

    __slots__ = ("args", "op")

    def __init__(self, op: str, args: tuple[Expr, ...], dtype: DType) -> None:
        self.op, self.args = op, args
        self._set(dtype, _union(a.axes for a in args), args, digest(op))


class Reduce(Expr):
    """Combine `inputs` over `axes` (bound here). Not a value itself: take a `Part`."""

    __slots__ = ("inputs", "monoid", "over")

    def __init__(self, monoid: str, inputs: tuple[Expr, ...], over: tuple[Axis, ...]) -> None:
        assert len(inputs) == MONOIDS[monoid].inputs
        self.monoid, self.inputs, self.over = monoid, inputs, over
        axes = _union(i.axes for i in inputs) - frozenset(over)
        self._set(inputs[0].dtype, axes, inputs, digest(monoid), *(a.form for a in over))

    @property
    def part_dtypes(self) -> tuple[DType, ...]:
        return part_dtypes(self.monoid, tuple(i.dtype for i in self.inputs))


class Scan(Expr):
    """Combine `inputs` over the positions of `over` (bound here) up to `at`; from the last down to it if `reverse`.

    In a nest `over` is the class that `at` is a position of: inputs and state are those of one position of a sweep.
    """

    __slots__ = ("at", "inputs", "monoid", "over", "reverse")

    def __init__(self, monoid: str, inputs: tuple[Expr, ...], over: Axis, at: Poly, reverse: bool = False) -> None:
        assert len(inputs) == MONOIDS[monoid].inputs
        self.monoid, self.inputs, self.over, self.at, self.reverse = monoid, inputs, over, at, reverse
        axes = (_union(i.axes for i in inputs) - {over}) | at.axes
        self._set(inputs[0].dtype, axes, (*inputs, *_indices((at,))), digest(monoid), over.form, at.form, reverse)

    @property
    def part_dtypes(self) -> tuple[DType, ...]:
        return part_dtypes(self.monoid, tuple(i.dtype for i in self.inputs))

    @property
    def is_open(self) -> bool:
        """Whether it is read at the position that its inputs are of."""
        return self.at.axis is self.over


class Part(Expr):
    """One component of the state of a reduction or a scan."""

    __slots__ = ("index", "source")

    def __init__(self, source: Reduce | Scan, index: int) -> None:
        self.source, self.index = source, index
        self._set(source.part_dtypes[index], source.axes, (source,), index)


class Random(Expr):
    """A 32-bit word: lane i mod 4 of Philox4x32-10(counter = (i div 4, stream), key = seed)."""

    __slots__ = ("index", "seed", "stream")

    def __init__(self, seed: Expr, index: Poly, stream: int) -> None:
        self.seed, self.index, self.stream = seed, index, stream
        self._set(DType.U32, seed.axes | index.axes, (seed, *_indices((index,))), stream, index.form)


def _union(sets: Iterable[frozenset[Axis]]) -> frozenset[Axis]:
    total = _NO_AXES
    for s in sets:
        if not s <= total:
            total = s if total <= s else total | s
    return total


def const(value: float | int | bool, dtype: DType) -> Const:
    """A literal of the given type; out-of-range integers wrap, floats convert."""
    if dtype.is_float:
        return Const(dtype, float(value).hex() if not math.isnan(float(value)) else "nan")
    if dtype is DType.BOOL:
        return Const(dtype, str(bool(value)))
    number, bits = int(value), dtype.bytes * 8
    number &= (1 << bits) - 1
    if dtype not in (DType.U8, DType.U32) and number >> (bits - 1):
        number -= 1 << bits
    return Const(dtype, str(number))


def literal(value: float | int | bool, dtype: DType) -> Const:
    """The number as `dtype` holds it (rounded, wrapped)."""
    if dtype in (DType.F32, DType.BF16):
        value = ctypes.c_float(float(value)).value
    if dtype is DType.BF16 and math.isfinite(value):
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        (value,) = struct.unpack("<f", struct.pack("<I", bits))
    elif dtype is DType.F16:
        try:
            (value,) = struct.unpack("<e", struct.pack("<e", value))
        except OverflowError:
            value = math.copysign(math.inf, value)
    elif dtype.is_integer and isinstance(value, float):
        value = int(value)
    return const(value, dtype)


def calculate(op: str, *args: Expr | float) -> Expr:
    """An operation between values and numbers; a number is rounded to the type of the (last) value."""
    dtype = next(a.dtype for a in reversed(args) if isinstance(a, Expr))
    return pointwise(op, *(a if isinstance(a, Expr) else literal(a, dtype) for a in args))


def pointwise(op: str, *args: Expr, dtype: DType | None = None) -> Expr:
    """Build an operation; folds what is free (casts to the same type, widen of narrow, where of a literal)."""
    info = OPS[op]
    assert len(args) == info.arity, op
    if info.result == "bool":
        dtype = DType.BOOL
    elif dtype is None:
        dtype = args[1].dtype if op == "where" else args[0].dtype
    match op:
        case "cast" if args[0].dtype is dtype:
            return args[0]
        case "cast" if isinstance(args[0], Const):
            return _cast_const(args[0], dtype)
        case "widen" if isinstance(args[0], Pointwise) and args[0].op == "narrow":
            if args[0].args[0].dtype is dtype:
                return args[0].args[0]
        case "widen" if args[0].dtype is dtype:
            return args[0]
        case "widen" if _is_exact(args[0]):
            return args[0].children[0]
        case "widen" if isinstance(args[0], Const):
            return const(args[0].value, dtype)
        case "widen" if isinstance(args[0], Pointwise) and args[0].op == "where":  # reach a narrow inside
            condition, *values = args[0].args
            return pointwise("where", condition, *(pointwise("widen", v, dtype=dtype) for v in values))
        case "lt" | "ge" if (compared := _compare_words(op, *args)) is not None:
            return compared
        case "where" if isinstance(args[0], Const):
            return args[1] if args[0].value else args[2]
        case "where" if args[1] is args[2]:
            return args[1]
        case "where" if isinstance(args[0], Pointwise) and args[0].op == "bitnot":
            return pointwise("where", args[0].args[0], args[2], args[1], dtype=dtype)
        case "where" if dtype is DType.BOOL and all(isinstance(a, Const) for a in args[1:]):
            return args[0] if args[1].value else pointwise("bitnot", args[0])  # type: ignore[attr-defined]
        case "add" | "sub" | "mul" if dtype is DType.I64 and (position := _position(op, *args)) is not None:
            return position
        case "wrap_index" | "check_index" if _is_inside(*args):
            return args[0]
        case "eq" | "ne" | "maximum" | "minimum" if (known := _KNOWN[op](op, *args)) is not None:
            return known
    if info.commutative and _rank(args[1]) < _rank(args[0]):
        args = (args[1], args[0])
    return Pointwise(op, args, dtype)


def _rank(e: Expr) -> tuple[int, int, int]:
    return e.kind, e.order, e.place


def _extreme(op: str, left: Expr, right: Expr) -> Expr | None:
    """The other operand of what is never the larger one; max(max(a, c), max(b, c)) as max(max(a, b), c)."""
    unit = const(identity(op[:3], left.dtype), left.dtype)
    if left is unit or right is unit:
        return right if left is unit else left
    if not all(isinstance(e, Pointwise) and e.op == op for e in (left, right)):
        return None
    shared = next((e for e in left.children if e in right.children), None)
    if shared is None:
        return None
    a, b = (next((c for c in e.children if c is not shared), shared) for e in (left, right))
    return pointwise(op, pointwise(op, a, b), shared)


def _is_exact(e: Expr) -> bool:
    """Whether a 16-bit float is a byte's number, as float32 has it: no rounding is lost with the conversion."""
    if not isinstance(e, Pointwise) or e.op != "cast" or not isinstance(e.args[0], Pointwise):
        return False
    wide = e.args[0]
    return wide.op == "cast" and wide.dtype is DType.F32 and wide.args[0].dtype in (DType.I8, DType.U8)


def _is_inside(place: Expr, size: Expr) -> bool:
    """Whether a position is one of a dimension, whatever the axes are."""
    return isinstance(place, Index) and isinstance(size, Index) and in_range(place.poly, size.poly)


def _position(op: str, left: Expr, right: Expr) -> Expr | None:
    """Arithmetic on positions is a position."""
    if not (isinstance(left, Index) or isinstance(right, Index)):
        return None
    if not all(isinstance(e, Index | Const) for e in (left, right)):
        return None
    a, b = (e.poly if isinstance(e, Index) else Poly.of(int(e.value)) for e in (left, right))  # type: ignore[attr-defined]
    if op == "mul" and a.constant is None and b.constant is None:
        return None
    return Index(a + b if op == "add" else a - b if op == "sub" else a * b)


def _compare_choice(op: str, left: Expr, right: Expr) -> Expr | None:
    """where(c, a, b) against a literal, with a and b literals: c, not c, or what is known."""
    if isinstance(left, Const):
        left, right = right, left
    if not (isinstance(left, Pointwise) and left.op == "where" and isinstance(right, Const)):
        return None
    condition, *choices = left.args
    if not all(isinstance(c, Const) for c in choices):
        return None
    first, second = ((c.value == right.value) == (op == "eq") for c in choices if isinstance(c, Const))
    if first == second:
        return const(first, DType.BOOL)
    return condition if first else pointwise("bitnot", condition)


_KNOWN = {"eq": _compare_choice, "ne": _compare_choice, "maximum": _extreme, "minimum": _extreme}


def _compare_words(op: str, drawn: Expr, limit: Expr) -> Expr | None:
    """uniform(word) against a literal, as a comparison of the word: k / 2**24 < p where k < ceil(p * 2**24)."""
    if not (isinstance(drawn, Pointwise) and drawn.op == "uniform" and isinstance(limit, Const)):
        return None
    bits = 24 if drawn.dtype is DType.F32 else 32
    if not 0 < float(limit.value) < 1:
        return None
    first = math.ceil(float(limit.value) * (1 << bits)) << (32 - bits)
    return pointwise(op, drawn.args[0], const(first, DType.U32)) if first < 1 << 32 else None


def _cast_const(value: Const, dtype: DType) -> Expr:
    number = value.value
    if dtype.is_half or (isinstance(number, float) and not dtype.is_float and not math.isfinite(number)):
        return Pointwise("cast", (value,), dtype)
    if dtype is DType.F32 and value.dtype is DType.F64:
        return Pointwise("cast", (value,), dtype)
    return const(number, dtype)


def postorder(roots: Iterable[Expr], into_reductions: bool = True) -> Iterator[Expr]:
    """Every node once, children before parents; iterative, so depth is no limit."""
    seen: set[Expr] = set()
    stack: list[Expr | None] = [*reversed(list(roots))]
    while stack:
        node = stack.pop()
        if node is None:  # the children of the next one are done
            done = stack.pop()
            assert done is not None
            yield done
        elif node not in seen:
            seen.add(node)
            if node.children and (into_reductions or not isinstance(node, Reduce)):
                stack += node, None
                stack += [c for c in reversed(node.children) if c not in seen]
            else:
                yield node


def rebuild(node: Expr, get: Callable[[Expr], Expr], index: Callable[[Poly], Poly]) -> Expr:
    """The node with children passed through `get` and polys through `index`."""
    match node:
        case Const():
            return node
        case Load():
            polys = tuple([index(p) for p in node.index])
            return node if polys == node.index else Load(node.buffer, polys)
        case Index():
            return Index(index(node.poly))
        case Pointwise():
            args = tuple([get(a) for a in node.args])
            return node if args == node.args else pointwise(node.op, *args, dtype=node.dtype)
        case Reduce():
            inputs = tuple([get(i) for i in node.inputs])
            return node if inputs == node.inputs else Reduce(node.monoid, inputs, node.over)
        case Scan():
            inputs = tuple([get(i) for i in node.inputs])
            over = index(node.over.poly()).axis or node.over
            return Scan(node.monoid, inputs, over, index(node.at), node.reverse)
        case Part():
            source: Any = get(node.source)
            return Part(source, node.index)
        case Random():
            return Random(get(node.seed), index(node.index), node.stream)
    raise AssertionError(type(node))


def rewrite(
    root: Expr,
    replace: Callable[[Expr], Expr | None],
    axes: dict[Axis, Poly] | None = None,
    memo: dict[Expr, Expr] | None = None,
) -> Expr:
    """Replace nodes bottom-up. `replace` sees each rebuilt node; None keeps it.

    `axes` substitutes free axes in every poly. Bound axes must not be among them.
    """
    memo = {} if memo is None else memo
    mapping = axes or {}
    polys: dict[Poly, Poly] = {}

    def on_atom(atom: Any) -> Poly | None:
        if isinstance(atom, Axis):
            return mapping.get(atom)
        if isinstance(atom, Indirect):
            new = memo[atom.value]
            return None if new is atom.value else indirect(new)
        return None

    def on_poly(poly: Poly) -> Poly:
        if poly.is_plain and mapping.keys().isdisjoint(poly.axes):
            return poly
        if poly not in polys:
            polys[poly] = transform(poly, on_atom)
        return polys[poly]

    for node in postorder([root]):
        if node in memo:
            continue
        new = rebuild(node, memo.__getitem__, on_poly)
        changed = replace(new)
        memo[node] = new if changed is None else changed
    return memo[root]


def indirect(value: Expr) -> Poly:
    """A value used as an index; an `Index` gives back its poly, a literal its number."""
    if isinstance(value, Index):
        return value.poly
    if isinstance(value, Const):
        return Poly.of(int(value.value))
    return Indirect(value).poly()


def substitute_axes(root: Expr, axes: dict[Axis, Poly]) -> Expr:
    """The expression with free axes replaced by polys."""
    axes = {a: p for a, p in axes.items() if p.axis is not a}
    if not axes or not (root.axes & axes.keys()):
        return root
    return rewrite(root, lambda e: None, axes)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "bitand": "&", "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def rendered(root: Expr) -> tuple[list[str], str]:
    """Definitions of shared parts, and the text of the root."""
    uses = Counter(child for node in postorder([root]) for child in node.children)
    texts: dict[Expr, str] = {}
    lines: list[str] = []
    for node in postorder([root]):
        text = _text(node, texts)
        if uses[node] > 1 and not isinstance(node, Const | Index | Load | Reduce | Scan):
            name = f"v{len(lines)}"
            lines.append(f"{name} = {text}")
            text = name
        texts[node] = text
    return lines, texts[root]


def _text(node: Expr, texts: dict[Expr, str]) -> str:
    match node:
        case Const():
            return repr(node.value)
        case Load():
            return f"{node.buffer.name}[{', '.join(_poly_text(p, texts) for p in node.index)}]"
        case Index():
            return f"index({_poly_text(node.poly, texts)})"
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
            between = f"{node.over.name}:{node.over.extent}, {'from' if node.reverse else 'to'} "
            between += _poly_text(node.at, texts)
            return f"{node.monoid}[{between}]({', '.join(texts[i] for i in node.inputs)})"
        case Part():
            single = len(node.source.part_dtypes) == 1
            return texts[node.source] if single else f"{texts[node.source]}.{node.index}"
        case Random():
            return f"random({texts[node.seed]}, {_poly_text(node.index, texts)}, {node.stream})"
    raise AssertionError(type(node))


def _poly_text(poly: Poly, texts: dict[Expr, str]) -> str:
    """The poly; data-dependent indices are spelled out."""
    text = repr(poly)
    for value in _indices((poly,)):
        text = text.replace(Indirect(value).key, f"[{texts[value]}]")
    return text


def reduction_of(e: Expr, *monoids: str) -> Reduce | None:
    """The reduction that an expression is a part of, if its monoid is one of these."""
    source = e.source if isinstance(e, Part) else None
    return source if isinstance(source, Reduce) and source.monoid in monoids else None


def substitute(root: Expr, known: Mapping[Expr, Expr]) -> Expr:
    """The expression with some of its nodes replaced by others."""
    return rewrite(root, lambda e: None, None, dict(known))


def rebind(
    root: Expr, axes: dict[Axis, Poly], over: Mapping[Axis, tuple[Axis, ...]], memo: dict[Expr, Expr] | None = None
) -> Expr:
    """The expression with axes replaced by polys, and reductions that run over other axes.

    `over`: the axes in place of an axis that a reduction runs over.
    """

    def change(e: Expr) -> Expr | None:
        if not isinstance(e, Reduce) or over.keys().isdisjoint(e.over):
            return None
        return Reduce(e.monoid, e.inputs, tuple(new for a in e.over for new in over.get(a, (a,))))

    return rewrite(root, change, axes, memo)
