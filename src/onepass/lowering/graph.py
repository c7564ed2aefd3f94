"""FX graph in, `Program` out: every node becomes a view, a definition or an extern.

The graph is AOTAutograd's: functional aten operations, then `copy_` into mutated inputs. A node
without a rule, or whose rule says `Unsupported`, is an `Extern` that carries the reason.

    program = lower_graph(graph_module)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..analysis.inline import read_by
from ..ir.callables import graph_constant
from ..ir.expr import Expr, literal
from ..ir.orders import KEEP, asked_of, orders_of
from ..ir.origins import origin_of
from ..ir.poly import Poly, Symbol
from ..ir.program import Buffer, Define, Extern, HostValue, Origin, Program, Statement, Update, View, held, leaves
from . import (
    activations,
    creation,
    indexing,
    movement,
    pointwise,
    pooling,
    random,
    recurrences,
    reductions,
    scans,
    views,
)
from .context import Context
from .contractions import CONTRACTIONS
from .float8 import MOVES
from .library_products import ON_WIDE_VECTORS, wide_product
from .overwrites import change_own, find_overwrites
from .reasons import is_ordered, why_library
from .reductions import share_welford
from .registry import RULES, Unsupported, supported
from .strides import eager_strides
from .torch_private import HigherOrderOperator, OpOverload, folded_value, storage_key
from .values import HostNumber, Ref, TensorMeta, axes_of, whole

aten = torch.ops.aten
# The modules that register rules, imported for that alone.
RULE_MODULES = (
    activations, creation, indexing, movement, pointwise, pooling, random, recurrences, reductions, scans, views,
)  # fmt: skip


def lower_graph(
    graph_module: GraphModule,
    *,
    precision: str = "fused",
    strict: bool = False,
    wide_statistics: bool = True,
    wide_products: bool = False,
    device: str = "",
) -> Program:
    """Lower an AOTAutograd graph. `strict` re-raises errors inside rules instead of falling back.

    `device` is the kind of device kernels run on (any where empty); `wide_statistics`: variances in float64;
    `wide_products`: of float32 matrices on the CPU by oneDNN.
    """
    return _Lowering(graph_module, Context(precision, wide_statistics), strict, wide_products, device).run()


def lower_with_values(graph_module: GraphModule, device: str = "") -> tuple[Program, dict[Node, Any]]:
    """The same, and what each node is worth: a `Ref`, a size, or something of the host."""
    lowering = _Lowering(graph_module, Context("fused", True), False, False, device)
    return lowering.run(), lowering.values


class _Lowering:
    """One walk over a graph."""

    def __init__(self, graph_module: GraphModule, ctx: Context, strict: bool, wide_products: bool, device: str) -> None:
        self.module, self.ctx, self.strict, self.device = graph_module, ctx, strict, device
        self.wide_products = wide_products
        self.values: dict[Node, Any] = {}
        self.given: dict[Node, Ref] = {}  # constants, and tensor inputs as they were before any update
        self.inputs: list[Buffer | HostValue | Symbol] = []
        self.updates: list[Update] = []
        self.kept: dict[Buffer, Origin] = {}
        self.overwritten: dict[Buffer, Buffer] = {}  # a state of an input that was changed in place -> the input
        self.overwrites = find_overwrites(graph_module.graph, self.ctx.meta)  # nodes that change an input in place
        self.relaid: dict[Node, TensorMeta] = {}  # outputs whose layout is eager's instead of the promised one
        self.sources: dict[Symbol, tuple[Buffer, int]] = {}

    def run(self) -> Program:
        rules = {
            "placeholder": self.placeholder,
            "get_attr": self.attribute,
            "call_function": self.call,
            "output": self.output,
        }
        for node in self.module.graph.nodes:
            if node.op not in rules:
                raise Unsupported(f"an FX node of kind {node.op}")
            self.ctx.origin, self.ctx.orders = origin_of(node), orders_of(node)
            value = self.values[node] = rules[node.op](node)
            if asked_of(node) == KEEP and isinstance(value, Ref):
                self.kept.setdefault(value.buffer, self.ctx.origin)
        outputs = self.values[self.module.graph.output_node()]
        shared = share_welford(self.ctx.statements, self.ctx.means)
        statements = change_own(_live([*shared, *self.updates], outputs), outputs)
        given = {i for i in self.inputs if isinstance(i, Symbol)}
        sources = {s: at for s, at in self.sources.items() if s not in given}
        made = {s.buffer for s in statements if isinstance(s, Define)}
        made |= {s.contraction.buffer for s in statements if isinstance(s, Extern) and s.contraction is not None}
        kept = {b: origin for b, origin in self.kept.items() if b in made}  # others are in memory anyway
        return Program(tuple(self.inputs), tuple(statements), outputs, sources, kept)

    # inputs and constants

    def placeholder(self, node: Node) -> Any:
        value = node.meta.get("val")
        name = f"a{len(self.inputs)}"
        if isinstance(value, torch.SymInt):
            return self.integer_input(value, name)
        if (meta := self.known_meta(value)) is None:
            return self.host_input(name)
        buffer = self.ctx.new_buffer(meta, name)
        self.inputs.append(buffer)
        for dim, size in enumerate(buffer.shape):
            if isinstance(symbol := size.single, Symbol):
                self.sources.setdefault(symbol, (buffer, dim))
        self.given[node] = whole(buffer)
        return self.given[node]

    def known_meta(self, value: Any) -> TensorMeta | None:
        """What FX says of a tensor that kernels handle; None for everything else."""
        return supported(self.ctx.meta, value) if isinstance(value, torch.Tensor) else None

    def integer_input(self, value: torch.SymInt, name: str) -> Any:
        if (poly := supported(self.ctx.sizes.poly, value)) is None:
            return self.host_input(name)
        if not isinstance(symbol := poly.single, Symbol):
            # A product of sizes, say, given as one number: a symbol of its own.
            symbol = self.ctx.sizes.inputs[value.node.expr] = Symbol(name, 0, value.node.hint)
        self.inputs.append(symbol)
        return symbol.poly()

    def host_input(self, name: str) -> HostValue:
        host = self.ctx.new_host_value(name)
        self.inputs.append(host)
        return host

    def attribute(self, node: Node) -> Any:
        """A constant of the graph: a tensor becomes the result of an extern, a module stays itself."""
        value = operator.attrgetter(str(node.target))(self.module)
        if not isinstance(value, torch.Tensor):
            return value
        number, meta = folded_value(value), self.known_meta(value)
        folded = None
        if meta is not None and not meta.dtype.is_packed and isinstance(number, float | int):
            folded = literal(number, meta.dtype)
            if self.is_here(meta.device):
                return self.ctx.define(folded, meta)
        constant = self.extern_call(node, graph_constant, (value,), {}, "a constant of the graph")
        if folded is not None:  # kernels know the number; calls on the other device have the tensor
            self.ctx.constants[constant.buffer] = folded
        if "val" in node.meta and isinstance(constant, Ref):
            self.given[node] = constant
        return constant

    def is_here(self, device: str) -> bool:
        """Whether this graph's kernels can write there."""
        return not self.device or torch.device(device).type == self.device

    # operations

    def call(self, node: Node) -> Any:
        target: Any = node.target
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        if target is operator.getitem and isinstance(args[0], tuple | list):
            return args[0][args[1]]
        if target is aten.copy_.default and isinstance(args[0], Ref):
            return self.update(node, args[0], args[1])
        if node in self.overwrites:
            return self.overwrite(node)
        if _is_size_arithmetic(target):
            return self.size(node)
        rule = RULES.get(target)
        if rule is None:
            return self.extern(node, node.meta.get("onepass_why") or why_library(target))
        try:
            return self.apply_rule(rule, node, args, kwargs)
        except Unsupported as reason:
            return self.extern(node, str(reason))
        except Exception as error:
            if self.strict:
                raise
            return self.extern(node, f"internal: {type(error).__name__}: {error}")

    def apply_rule(self, rule: Callable[..., Any], node: Node, args: Any, kwargs: Any) -> Any:
        value = node.meta["val"]
        results = value if isinstance(value, tuple | list) else (value,)
        self.ctx.outs = tuple(self.ctx.meta(v) for v in results)
        if isinstance(value, torch.Tensor) and all(user.op == "output" for user in node.users):
            # Nothing but the caller sees the layout: it is eager's, whatever was promised while tracing.
            operands = pytree.tree_map_only(Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
            if (strides := eager_strides(node.target, operands, value)) is not None:
                self.ctx.outs = (replace(self.ctx.out, strides=tuple(map(Poly.of, strides))),)
                self.relaid[node] = self.ctx.out
        operands = list(leaves((args, kwargs)))
        if any(isinstance(leaf, HostValue) for leaf in operands):
            raise Unsupported("reads a value that kernels do not handle")
        types = {leaf.dtype for leaf in operands if isinstance(leaf, Ref)} | {meta.dtype for meta in self.ctx.outs}
        if any(dtype.is_packed for dtype in types) and node.target not in MOVES:
            raise Unsupported("float8 is only moved and converted by kernels")
        devices = {leaf.device for leaf in operands if isinstance(leaf, Ref) and (leaf.ndim or leaf.device != "cpu")}
        devices |= {meta.device for meta in self.ctx.outs}
        if len(devices) > 1:
            raise Unsupported("several devices")
        if not all(map(self.is_here, devices)):
            raise Unsupported(f"not on the {self.device} device that this graph's kernels run on")
        positional, named = normalise(node.target, args, kwargs)
        found = rule(self.ctx, *positional, **named)
        if isinstance(found, tuple):
            return tuple(self.defined(f, meta) for f, meta in zip(found, self.ctx.outs, strict=True))
        return self.defined(found, self.ctx.out)

    def defined(self, found: Expr | Ref, meta: TensorMeta) -> Ref:
        """What a rule returns: the value of a new buffer, or a view of a known one."""
        return found if isinstance(found, Ref) else self.ctx.define(found, meta)

    def size(self, node: Node) -> Any:
        """Arithmetic on sizes needs no code: its value is its expression.

        A float made of sizes is a value for kernels, computed by the host where a call needs it.
        """
        value = node.meta.get("val")
        poly = supported(self.ctx.sizes.poly, value) if isinstance(value, torch.SymInt) else None
        if poly is not None or isinstance(value, int | float):
            return value if poly is None else poly
        host = self.extern(node, why_library(node.target))
        number = supported(self.ctx.sizes.number, value) if isinstance(value, torch.SymFloat) else None
        return host if number is None else HostNumber(number, host)

    # externs

    def extern(self, node: Node, why: str) -> Any:
        """Run the node as eager would; tensors it reads become views with FX's strides."""
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.argument)
        result = self.extern_call(node, node.target, tuple(args), dict(kwargs), why)
        source = self.values[node.args[0]] if node.target is aten.lift_fresh_copy.default else None
        if isinstance(source, Ref) and isinstance(result, Ref) and source.buffer in self.ctx.constants:
            self.ctx.constants[result.buffer] = self.ctx.constants[source.buffer]  # a copy has its number
        return result

    def extern_call(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        value = node.meta.get("val", args[0] if target is graph_constant else None)
        ordered = is_ordered(target) or node.is_impure()
        meta = self.known_meta(value)
        result = self.ctx.new_host_value() if meta is None else self.ctx.new_buffer(meta)
        contraction = self.contraction(node, result) if isinstance(result, Buffer) else None
        if self.wide_products and (found := wide_product(target, args, kwargs)) is not None:
            (target, args), why = found, ON_WIDE_VECTORS
        call = (target, args, kwargs, self.ctx.origin, why, ordered, contraction)
        self.ctx.statements.append(Extern(result, *call, orders=self.ctx.orders))
        if isinstance(result, HostValue):
            return result
        if isinstance(target, OpOverload) and not any(r.alias_info for r in target._schema.returns):
            self.ctx.fresh.add(result)
        return whole(result)

    def contraction(self, node: Node, buffer: Buffer) -> Define | None:
        """The same result as a sum of products, where the operation is one and kernels may compute it."""
        rule = CONTRACTIONS.get(node.target)
        if rule is None or self.ctx.precision == "eager":
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        operands = [a for a in leaves((args, kwargs)) if isinstance(a, Ref | HostValue)]
        if not all(isinstance(a, Ref) and a.device == buffer.device for a in operands):
            return None
        positional, named = normalise(node.target, args, kwargs)
        value = rule(self.ctx, buffer, *positional, **named)
        return None if value is None else Define(buffer, axes_of(buffer.shape), value, self.ctx.origin, self.ctx.orders)

    def argument(self, node: Node) -> Any:
        """What an extern or the caller is given for a node."""
        value = self.values[node]
        meta = node.meta.get("val")
        if isinstance(value, tuple | list):
            return tuple(self.view_of(v, m) for v, m in zip(value, meta, strict=True))
        return self.view_of(value, meta)

    def view_of(self, value: Any, meta: Any) -> Any:
        if isinstance(value, HostNumber):
            return value.host
        if not isinstance(value, Ref):
            return value
        known = self.ctx.meta(meta) if isinstance(meta, torch.Tensor) else None
        return self.ctx.as_view(value, known or value.meta)

    # mutation and outputs

    def overwrite(self, node: Node) -> Ref:
        """Change an input in place. What is written there and is itself a part of the input is copied before."""
        first, change = node.args[0], self.overwrites[node]
        assert isinstance(first, Node)
        state: Ref = self.values[first]
        if not change.changes:
            return state
        given = self.overwritten.get(state.buffer, state.buffer)
        place = self.ctx.as_view(self.values[change.place], self.ctx.meta(change.place.meta["val"]))

        def apart(other: Node) -> Any:
            value, meta = self.values[other], other.meta.get("val")
            if isinstance(value, Ref) and self.overwritten.get(value.buffer, value.buffer) is given:
                value = self.ctx.copy_of(value, self.ctx.meta(meta))
            return self.view_of(value, meta)

        args, kwargs = torch.fx.node.map_arg((change.args, change.kwargs), apart)
        buffer = self.ctx.new_buffer(self.ctx.meta(node.meta["val"]))
        why = "only what changes is written, into the input itself"
        call = (change.operation, (place, *args), kwargs)
        self.ctx.statements.append(Extern(buffer, *call, self.ctx.origin, why, ordered=True, overwrites=given))
        self.overwritten[buffer] = given
        return whole(buffer)

    def update(self, node: Node, target: Ref, source: Any) -> Any:
        """`copy_` into an input: at the end of the program it holds `source`."""
        buffer = target.buffer
        if node.args[1] in self.overwrites:
            self.values[node.args[0]] = source
            return source
        if not (buffer in self.inputs and target.is_whole) or isinstance(source, HostValue):
            return self.extern(node, "a mutation of something that is not an input")
        meta = target.meta
        if meta.dtype.is_packed and not isinstance(source, Ref):
            return self.extern(node, "float8 is only moved and converted by kernels")
        if not isinstance(source, Ref):
            source = self.ctx.define(self.ctx.stored(source, meta.dtype), meta)
        elif source.device != meta.device and source.ndim:
            return self.extern(node, "a copy between devices")
        elif not self.is_own(source, meta):
            # A copy even of an input: another update may overwrite that one first.
            value = self.ctx.convert(source.aligned(meta.shape), meta.dtype, exact=True)
            source = self.ctx.define_afresh(value, meta)
        self.updates.append(Update(buffer, source.buffer, self.ctx.origin))
        placeholder = node.args[0]
        assert isinstance(placeholder, Node)
        self.values[placeholder] = source  # what later readers see
        return source

    def is_own(self, source: Ref, meta: TensorMeta) -> bool:
        """Whether `source` is all of a buffer this program defines, ready to be stored as it is."""
        own = source.buffer in self.ctx.fresh and source.is_whole
        return own and source.shape == meta.shape and source.dtype is meta.dtype

    def output(self, node: Node) -> tuple[Any, ...]:
        (results,) = node.args
        owners: dict[Buffer, object] = {self.given[n].buffer: storage_key(n.meta["val"]) for n in self.given}
        apart: dict[Node, Buffer] = {}
        first: dict[View, Node] = {}
        listed = results if isinstance(results, tuple | list) else (results,)

        def result(node: Node) -> Any:
            """A node's output: nodes of equal values have tensors of their own, for only one may need gradients."""
            found = self.returned(node, owners, apart)
            if not isinstance(found, View) or not found.is_whole or first.setdefault(found, node) is node:
                return found
            tensor = self.extern_call(node, aten.detach.default, (found,), {}, "a tensor that shares another's storage")
            return self.view_of(tensor, node.meta["val"])

        return tuple(result(r) if isinstance(r, Node) else r for r in listed)

    def returned(self, node: Node, owners: dict[Buffer, object], apart: dict[Node, Buffer]) -> Any:
        """An output; in a buffer of its own where eager returns a storage of its own.

        Equal values share a buffer. It goes to the first storage that is returned (`owners`); any other
        is copied as the node that made it has it (`apart`), so that outputs that are views of it share it.
        """
        value = self.given.get(node, self.values[node])
        if not isinstance(value, Ref):
            return self.argument(node)
        fake = node.meta["val"]
        meta = self.relaid.get(node) or self.ctx.meta(fake)
        key = storage_key(fake)
        view = self.ctx.as_view(value, meta)
        if owners.setdefault(view.buffer, key) == key:
            return view
        base = _base(node)
        made = base.meta["val"]
        if base not in apart:
            apart[base] = self.ctx.copy_of(self.given.get(base, self.values[base]), self.ctx.meta(made)).buffer
        offset = self.ctx.sizes.poly(fake.storage_offset()) - self.ctx.sizes.poly(made.storage_offset())
        return View(apart[base], meta.shape, meta.strides, offset)


def _base(node: Node) -> Node:
    """The node that a node is a view of, directly or through other views; itself if of none."""
    key = storage_key(node.meta["val"])
    view: Node | None = node
    while view is not None:
        node = view
        call = node.all_input_nodes[0] if node.target is operator.getitem else node
        tensors = ((n, n.meta.get("val")) for n in call.all_input_nodes)
        view = next((n for n, v in tensors if isinstance(v, torch.Tensor) and storage_key(v) == key), None)
    return node


def _is_size_arithmetic(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return str(target).startswith("aten.sym_")
    return getattr(target, "__module__", "") in ("_operator", "math", "torch", "torch.fx.experimental.sym_node")


def normalise(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments as the schema has them: positional ones by position, keyword-only ones by name."""
    left = dict(kwargs)
    positional = list(args)
    named: dict[str, Any] = {}
    if isinstance(target, HigherOrderOperator):
        return positional, left
    for number, argument in enumerate(target._schema.arguments):
        if argument.kwarg_only:
            named[argument.name] = left.pop(argument.name, argument.default_value)
        elif number >= len(positional):
            positional.append(left.pop(argument.name, argument.default_value))
    return positional, named


def _live(statements: list[Statement], outputs: tuple[Any, ...]) -> list[Statement]:
    """Statements whose results reach an output, an update or an effect."""
    needed = set(held(outputs))
    kept: list[Statement] = []
    for statement in reversed(statements):
        match statement:
            case Define() if statement.buffer not in needed:
                continue
            case Extern() if statement.result not in needed and not statement.ordered:
                continue
        needed.update(read_by(statement))
        kept.append(statement)
    return kept[::-1]
