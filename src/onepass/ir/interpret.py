"""The reference interpreter: programs and expressions evaluated with torch, one axis per dimension.

Slow and plain: the oracle for tests and for the float64 check of rewrites (`double=True` computes
every float in float64). Out-of-range loads are clamped; their values are never used.

    run_program(program, [x, y])  ->  list of outputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .dtypes import DType
from .expr import Const, Expr, Index, Indirect, Load, Part, Pointwise, Random, Reduce, Scan, postorder
from .monoids import identity
from .ops import CASTS
from .poly import Atom, Axis, Poly, Symbol
from .program import Buffer, Define, Extern, HostValue, Program, Update, View

Sizes: TypeAlias = Mapping[Atom, int]


def run_program(program: Program, args: Sequence[Any]) -> list[Any]:
    """Execute a program on real arguments (updating mutated ones) and return its outputs."""
    values: dict[Any, Any] = dict(zip(program.inputs, args, strict=True))
    sizes: dict[Atom, int] = {k: int(v) for k, v in values.items() if isinstance(k, Symbol)}
    for symbol, (buffer, dim) in program.symbol_sources.items():
        sizes[symbol] = values[buffer].shape[dim]
    updates: list[tuple[Tensor, Tensor]] = []
    for statement in program.statements:
        match statement:
            case Define():
                values[statement.buffer] = run_define(statement, values, sizes)
            case Extern():
                call_args = _resolve(statement.args, values, sizes)
                call_kwargs = _resolve(statement.kwargs, values, sizes)
                made = statement.target(*call_args, **call_kwargs)
                values[statement.result] = made if statement.overwrites is None else values[statement.overwrites]
            case Update():
                updates.append((values[statement.target], values[statement.source]))
    outputs = [_resolve(o, values, sizes) for o in program.outputs]
    for target, source in updates:
        target.copy_(source)
    return outputs


def run_define(statement: Define, values: Mapping[Any, Tensor], sizes: Sizes) -> Tensor:
    """The tensor of a definition, with its buffer's strides."""
    buffer = statement.buffer
    shape, strides = ([p.evaluate(sizes) for p in polys] for polys in (buffer.shape, buffer.strides))
    value = evaluate(statement.value, statement.axes, values, sizes)
    result = torch.empty_strided(shape, strides, dtype=_torch(buffer.dtype), device=buffer.device)
    inner = [1 if e is Poly.ONE else n for e, n in zip(buffer.shape, shape, strict=True)]
    return result.copy_(value.reshape(inner))


def _torch(dtype: DType) -> torch.dtype:
    if dtype is DType.U32:
        return torch.int64  # words are kept in int64: torch has little arithmetic on uint32
    found: Any = dtype.torch
    return found


def _resolve(tree: Any, values: Mapping[Any, Any], sizes: Sizes) -> Any:
    """An argument tree with tensors and numbers in it."""
    match tree:
        case View():
            tensor = values[tree.buffer]
            if tree.is_whole:
                return tensor
            shape, strides = ([p.evaluate(sizes) for p in polys] for polys in (tree.shape, tree.strides))
            return tensor.as_strided(shape, strides, tensor.storage_offset() + tree.offset.evaluate(sizes))
        case HostValue():
            return values[tree]
        case Poly():
            return tree.evaluate(sizes)
        case dict():
            return {k: _resolve(v, values, sizes) for k, v in tree.items()}
        case tuple() | list():
            items = [_resolve(v, values, sizes) for v in tree]
            return tuple(items) if isinstance(tree, tuple) else items
    return tree


def evaluate(
    root: Expr, axes: Sequence[Axis], buffers: Mapping[Buffer, Tensor], sizes: Sizes, *, double: bool = False
) -> Tensor:
    """The value at every point of `axes`; `double` computes every float in float64."""
    bound = [a for node in postorder([root]) if isinstance(node, Reduce) for a in node.over]
    bound += [node.over for node in postorder([root]) if isinstance(node, Scan)]
    every = tuple(dict.fromkeys((*axes, *bound)))
    evaluator = _Evaluator(every, buffers, sizes, double)
    for node in postorder([root]):
        evaluator.memo[node] = evaluator.value(node)
    result: Tensor = evaluator.memo[root]
    extents = evaluator.extents[: len(axes)]
    return result.expand([*extents, *[1] * (len(every) - len(axes))]).reshape(extents)


class _Evaluator:
    """Every value is a tensor with one dimension per axis (free, then bound), of size 1 where constant."""

    def __init__(self, axes: Sequence[Axis], buffers: Mapping[Buffer, Tensor], sizes: Sizes, double: bool) -> None:
        self.axes, self.buffers, self.double = axes, buffers, double
        self.extents = [a.extent.evaluate(sizes) for a in self.axes]
        self.device = next((t.device for t in buffers.values() if isinstance(t, Tensor)), torch.device("cpu"))
        self.memo: dict[Expr, Any] = {}
        self.atoms: dict[Atom, Any] = dict(sizes)
        for place, (axis, extent) in enumerate(zip(self.axes, self.extents, strict=True)):
            shape = [extent if k == place else 1 for k in range(len(self.axes))]
            self.atoms[axis] = torch.arange(extent, device=self.device).reshape(shape)

    def dtype(self, dtype: DType) -> torch.dtype:
        return torch.float64 if self.double and dtype.is_float else _torch(dtype)

    def value(self, node: Expr) -> Any:
        match node:
            case Const():
                scalar = torch.tensor(node.value, dtype=self.dtype(node.dtype), device=self.device)
                return scalar.reshape([1] * len(self.axes))
            case Load():
                return self.load(node)
            case Index():
                return self.poly(node.poly)
            case Pointwise():
                return self.pointwise(node, [self.memo[a] for a in node.args])
            case Random():
                return philox(self.memo[node.seed], self.poly(node.index), node.stream)
            case Reduce():
                return self.reduce(node)
            case Scan():
                return self.scan(node)
            case Part():
                return self.memo[node.source][node.index]
        raise AssertionError(type(node))

    def poly(self, poly: Poly) -> Tensor:
        """The poly as an int64 tensor."""
        self.atoms |= {a: self.memo[a.value] for a in poly.indirects() if isinstance(a, Indirect)}
        return torch.zeros([1] * len(self.axes), dtype=torch.int64, device=self.device) + poly.evaluate(self.atoms)

    def load(self, node: Load) -> Tensor:
        tensor = self.buffers[node.buffer]
        index = [self.poly(p) for p in node.index]
        if tensor.numel() == 0:
            shape = torch.broadcast_shapes(*(i.shape for i in index))
            return torch.zeros(shape, dtype=self.dtype(node.dtype), device=self.device)
        index = [i.clamp(0, size - 1).to(tensor.device) for i, size in zip(index, tensor.shape, strict=True)]
        value = tensor[tuple(index)] if index else tensor.reshape([1] * len(self.axes))
        return value.to(self.device, self.dtype(node.dtype))

    def pointwise(self, node: Pointwise, args: list[Tensor]) -> Tensor:
        if node.op == "bitcast":
            return args[0].view(self.dtype(node.dtype))
        if node.op == "uniform":
            args = [uniform_of_words(args[0], _torch(node.dtype))]
        elif node.op not in CASTS:
            args = [SCALAR[node.op](*args)]
        return args[0].to(self.dtype(node.dtype))

    # reductions

    def reduce(self, node: Reduce) -> tuple[Tensor, ...]:
        dims = [self.axes.index(a) for a in node.over]
        inputs = torch.broadcast_tensors(*(self.memo[i] for i in node.inputs))
        shape = [self.extents[k] if k in dims else n for k, n in enumerate(inputs[0].shape)]
        inputs = [value.expand(shape) for value in inputs]
        if any(self.extents[d] == 0 for d in dims):
            return self.empty(node, inputs[0], dims)
        return self.combine(node.monoid, inputs, dims, self.dtype(node.part_dtypes[0]))

    def empty(self, node: Reduce, value: Tensor, dims: list[int]) -> tuple[Tensor, ...]:
        shape = [1 if k in dims else n for k, n in enumerate(value.shape)]
        first = identity(node.monoid, node.part_dtypes[0])
        parts = [first, *[0] * (len(node.part_dtypes) - 1)]
        return tuple(
            torch.full(shape, part, dtype=self.dtype(dtype), device=self.device)
            for part, dtype in zip(parts, node.part_dtypes, strict=True)
        )

    def combine(self, monoid: str, inputs: list[Tensor], dims: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = inputs[0]
        match monoid:
            case "sum":
                return (x.sum(dims, keepdim=True, dtype=dtype),)
            case "max" | "min":
                return (getattr(x, f"a{monoid}")(dims, keepdim=True),)
            case "any" | "all" | "prod":
                for dim in dims:
                    x = getattr(x, monoid)(dim, keepdim=True)
                return (x.to(dtype),)
            case "argmax" | "argmin":
                return _extreme(monoid, x, inputs[1], dims)
            case "welford":
                mean = x.mean(dims, keepdim=True)
                squares = (x - mean).square().sum(dims, keepdim=True)
                count = math.prod(x.shape[d] for d in dims)
                return mean, squares, torch.full_like(mean, count)
        raise AssertionError(monoid)

    # scans

    def scan(self, node: Scan) -> tuple[Tensor, ...]:
        """Position by position; then each part is read where the scan is."""
        dim = self.axes.index(node.over)
        inputs = torch.broadcast_tensors(*(self.memo[i] for i in node.inputs))
        shape = [self.extents[dim] if k == dim else n for k, n in enumerate(inputs[0].shape)]
        order = range(shape[dim])[:: -1 if node.reverse else 1]
        state: tuple[Tensor, ...] | None = None
        found: dict[int, tuple[Tensor, ...]] = {}
        for k in order:
            element = tuple(x.expand(shape).narrow(dim, k, 1) for x in inputs)
            element = (*element, torch.ones_like(element[0])) if node.monoid == "logsumexp" else element
            state = found[k] = element if state is None else _JOINS[node.monoid](state, element)
        if not found:
            return self.empty(Reduce(node.monoid, node.inputs, (node.over,)), inputs[0].expand(shape), [])
        parts = [torch.cat([found[k][part] for k in sorted(found)], dim) for part in range(len(node.part_dtypes))]
        parts = [p.to(self.dtype(d)) for p, d in zip(parts, node.part_dtypes, strict=True)]
        return tuple(parts if node.is_open else [torch.take_along_dim(p, self.poly(node.at), dim) for p in parts])


def _logsumexp(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    top = torch.maximum(a[0], b[0])
    terms = [s * torch.where(m == top, 1.0, torch.exp(m - top)) for m, s in (a, b)]
    return top, terms[0] + terms[1]


def _joined_extreme(monoid: str, a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    values, index = (torch.stack(pair) for pair in zip(a, b, strict=True))
    value, position = _extreme(monoid, values, index, [0])
    return value[0], position[0]


_JOINS: dict[str, Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]]] = {
    "sum": lambda a, b: (a[0] + b[0],),
    "prod": lambda a, b: (a[0] * b[0],),
    "max": lambda a, b: (torch.maximum(a[0], b[0]),),
    "min": lambda a, b: (torch.minimum(a[0], b[0]),),
    "argmax": partial(_joined_extreme, "argmax"),
    "argmin": partial(_joined_extreme, "argmin"),
    "logsumexp": _logsumexp,
    "linear": lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]),
}


def _extreme(monoid: str, x: Tensor, index: Tensor, dims: list[int]) -> tuple[Tensor, ...]:
    """(value, index): NaN first, then the extreme; ties to the lower index."""
    order = [d for d in range(x.ndim) if d not in dims] + dims
    kept = [x.shape[d] for d in order[: x.ndim - len(dims)]]
    flat, flat_index = (t.permute(order).reshape([*kept, -1]) for t in (x, index))
    best = flat.amax(-1, keepdim=True) if monoid == "argmax" else flat.amin(-1, keepdim=True)
    hits = (flat == best) | (flat.isnan() if flat.is_floating_point() else torch.zeros_like(flat, dtype=torch.bool))
    position = torch.where(hits, flat_index, torch.iinfo(torch.int64).max).amin(-1)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return best.reshape(shape), position.reshape(shape)


_MASK = 0xFFFFFFFF


def philox(seed: Tensor, index: Tensor, stream: int) -> Tensor:
    """32-bit words as int64: lane index mod 4 of Philox4x32-10(counter = (index div 4, stream), key = seed)."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    counter = index // 4
    words = [counter & _MASK, counter >> 32, torch.full_like(counter, stream), torch.zeros_like(counter)]
    for _ in range(10):
        high0, low0 = _wide_product(words[0], 0xD2511F53)
        high1, low1 = _wide_product(words[2], 0xCD9E8D57)
        words = [high1 ^ words[1] ^ key0, low1, high0 ^ words[3] ^ key1, low0]
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    lane = index % 4
    low = torch.where(lane == 0, words[0], words[1])
    high = torch.where(lane == 2, words[2], words[3])
    return torch.where(lane < 2, low, high)


def uniform_of_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    """[0, 1) from 32-bit words: the top 24 bits, all 32 for float64."""
    if dtype is torch.float64:
        return words.to(torch.float64) * 2.0**-32
    return (words >> 8).to(torch.float32) * 2.0**-24


def _wide_product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32 bit product, without overflowing int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def _checked(index: Tensor, size: Tensor) -> Tensor:
    if bool(((index < 0) | (index >= size)).any()):
        raise IndexError("index out of range")
    return index


# Torch's function for each scalar operation.
_SAME_NAME = (
    "add sub mul div neg abs sign maximum minimum fmax fmin sqrt rsqrt remainder fmod eq ne lt le gt ge "
    "isnan isinf signbit exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 "
    "sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma hypot copysign nextafter "
    "floor ceil trunc round where"
)
SCALAR: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME_NAME.split()},
    "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor,
    "bitnot": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "floordiv": partial(torch.div, rounding_mode="floor"),
    "truncdiv": partial(torch.div, rounding_mode="trunc"),
    "pow": lambda a, b: torch.pow(*torch.broadcast_tensors(a, b)),
    "normal_16": torch.special.ndtr,
    "tanh_16": torch.tanh,
    "fma": lambda a, b, c: (a.double() * b.double() + c.double()).to(a.dtype),
    "wrap_index": lambda index, size: _checked(torch.where(index < 0, index + size, index), size),
    "check_index": _checked,
}
