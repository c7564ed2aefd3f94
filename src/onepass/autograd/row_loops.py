"""Losses of a product without the product: regions of a joint graph that run in chunks of rows.

    loss = cross_entropy(x @ w.T, y); dlogits = ...; dx = dlogits @ w; dw = dlogits.T @ x
    ->  loss, dx, dw = over_rows(loop, x, w.T, y, w)  in forward;  dx * t, scaled(dw, t)  in backward

How many chunks there are is a matter of time and memory: products of few rows are slower and hold less.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..analysis.library_price import multiply_us
from ..analysis.reach import reached
from ..ir.callables import operators
from ..ir.dtypes import DType
from ..ir.orders import is_asked
from ..ir.plan import Decision
from ..ir.row_loop import over_rows
from ..ir.target import Target
from .between import bytes_of, hint, later_nodes, valued
from .row_bodies import Body, rows_returned
from .row_regions import PRODUCTS, Region, find_region
from .row_rules import NotByRows, expression, product_of, rebuilt, reduced_dims, shape_of
from .scaled import SCALED

aten = torch.ops.aten
DECISIONS, WHY = "onepass_row_loops", "onepass_why"
LEAST_SPARED = 32 << 20  # bytes: less than that nobody misses
LEAST_PART = 1 / 8  # of what is held anyway
# Chunks whose gradients add up in 16 bits: each rounds once more. At 8 the error is 1.4 to 1.75 times eager's.
MOST_ROUNDINGS, MOST_CHUNKS = 8, 64
MOST_SLOWER = 1.1  # times as long as whole products: memory is not worth any time
TILE_ROWS = 128

_MEANS = operators("mean.default mean.dim")


@dataclass(frozen=True, slots=True)
class _Chunks:
    """`rows` of each; bytes that are spared, and the products' time over that of whole ones."""

    number: int
    rows: int
    spared: int
    slowdown: float


def loop_over_rows(
    module: GraphModule, target: Target, strict: bool = False, names: Collection[str] | None = None
) -> bool:
    """Tall products of a graph, forward or joint, whose results nobody needs as a whole; of these names only.

    Says whether there were any. `strict`: errors are raised.
    """
    decisions: list[Decision] = []
    tangents = later_nodes(module)
    candidates = [n for n in module.graph.nodes if n.target in PRODUCTS and n not in tangents and _is_tall(n)]
    for product in candidates:
        if not product.users or (names is not None and product.name not in names):
            continue
        region = Region([product], tangents=tangents)
        try:
            find_region(region)
            if (asked := next((n for n in (*region.body(), *region.rows) if is_asked(n)), None)) is not None:
                raise NotByRows(f"{asked.name} is asked to be as the program says")
            chunks = _chunks(region, target)
            reason, spared = _Rewriting(module, region, chunks).run(), chunks.spared
        except Exception as problem:
            if strict and not isinstance(problem, NotByRows):
                raise
            if not region.is_loss():
                continue
            reason, spared = f"{problem}" if isinstance(problem, NotByRows) else f"internal: {problem!r}", 0
        consumer = next(iter(region.exits), next(iter(product.users), product))
        decision = Decision(
            product.name, consumer.name, "row loop", bool(spared), reason, 0.0, spared or bytes_of(product)
        )
        decisions.append(decision)
    module.meta[DECISIONS] = decisions
    found = any(d.accepted for d in decisions)
    if found:
        module.recompile()
    return found


def loop_results(graph: Graph) -> list[Node]:
    """What the loops of a graph give."""
    return [user for node in graph.find_nodes(op="call_function", target=over_rows) for user in node.users]


def _is_tall(product: Node) -> bool:
    """Whether the result is larger than what it is made of together."""
    return bytes_of(product) >= max(LEAST_SPARED, *map(bytes_of, product.all_input_nodes))


def _chunks(region: Region, target: Target) -> _Chunks:
    """As many chunks as make time squared times memory least, as long as that costs little time."""
    tall = sum(map(bytes_of, region.products))
    held = sum(map(bytes_of, {*region.inputs(), *(n for n, (kind, _, _) in region.exits.items() if kind != "sum")}))
    total = hint(region.products[0].meta["val"].shape[0])
    element = region.products[0].meta["val"].element_size()
    gathered = any(kind in ("gathered", "turned") for kind, _, _ in region.exits.values())
    most = MOST_ROUNDINGS if gathered and element < 4 else MOST_CHUNKS
    found: list[tuple[float, int, int, float]] = []
    for number in range(1, most + 1):
        rows = -(-total // number)
        rows = min(total, -(-rows // TILE_ROWS) * TILE_ROWS) if number > 1 else rows
        time = _time_us(region, total, rows, target)
        if not found or time <= MOST_SLOWER * found[0][-1]:
            found.append((time**2 * (held + tall * rows / total), -(-total // rows), rows, time))
    _, number, rows, time = min(found)
    copies = 1 + any(value in region.tangents for _, value, _ in region.exits.values())
    spared = int(copies * tall - tall * rows / total)
    if spared < max(LEAST_SPARED, LEAST_PART * held):
        raise NotByRows("it is not large beside what it is made of")
    return _Chunks(number, rows, spared, time / found[0][-1])


def _time_us(region: Region, total: int, rows: int, target: Target) -> float:
    """The time of all products of the loop and of the passes over their results."""
    calls = [(n, 0) for n in region.products]
    calls += [(n, kind != "times") for n, (kind, _, _) in region.exits.items() if kind != "sum"]
    whole, rest = divmod(total, rows)
    time = 0.0
    for part, times in ((rows, whole), (rest, 1)):
        for node, adds in calls if part else ():
            left, right = (a.meta["val"] for a in node.args[-2:])  # type: ignore[union-attr]
            sizes = [hint(left.shape[0]), hint(right.shape[1]), hint(left.shape[1])]
            sizes[2 if adds else 0] = part
            m, n, k = sizes
            moved = (m * k + k * n + m * n * (2 if adds else 1)) * left.element_size()
            time += times * (target.launch_us + target.rates.call_us + _multiply_us(m, n, k, left, moved, target))
    return time


def _multiply_us(m: int, n: int, k: int, like: Tensor, moved: int, target: Target) -> float:
    if target.products_per_us:
        return multiply_us(1, m, n, k, DType(str(like.dtype).removeprefix("torch.")), moved, target)
    return m * n * k / target.operations_per_us + moved / target.memory_bytes_per_us


class _Rewriting:
    """One region replaced by a loop."""

    def __init__(self, module: GraphModule, region: Region, chunks: _Chunks) -> None:
        self.module, self.graph, self.region, self.chunks = module, module.graph, region, chunks
        self.added: list[Node] = []
        self.mode = region.products[0].meta["val"].fake_mode
        # Inputs change at the end of a graph: nothing new comes after that.
        changes = (n for n in self.graph.nodes if n.target is aten.copy_.default)
        self.end = next(changes, self.graph.output_node())

    def run(self) -> str:
        """What was done, in words. Where that cannot be done the graph stays as it was."""
        region = self.region
        body = Body(region, self.chunks.rows, self.call)
        try:
            copies = self.copies_with_one()
            loop = body.loop()
            sizes = {n: self.size(n.meta["val"]) for n in region.sizes}
        except Exception:
            self.undo()
            raise
        name = next(n for k in range(1 << 20) if not hasattr(self.module, n := f"rows_{k}"))
        setattr(self.module, name, loop)
        why = self.why()
        operands = [copies.get(n, n) for n in body.operands]
        for node in self.added:
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
        with self.graph.inserting_before(self.end):
            held = self.graph.create_node("get_attr", name)
            done = self.graph.call_function(over_rows, (held, *operands))
        replaced = [*region.exits, *rows_returned(region)]
        with self.mode:
            types = [body.dtype(r) for r in loop.results]
            done.meta["val"] = tuple(_unwritten(region, n, t) for n, t in zip(replaced, types, strict=True))
        done.meta |= {WHY: why, "stack_trace": region.products[0].meta.get("stack_trace")}
        self.added += [held, done]
        for number, node in enumerate(replaced):
            self.replace(node, self.call(operator.getitem, done, number))
        for node, size in sizes.items():
            node.replace_all_uses_with(size)
        self.clean()
        return why

    def why(self) -> str:
        chunks, names = self.chunks, ", ".join(p.name for p in self.region.products)
        return (
            f"a loop over rows of {names}: {chunks.number} chunks of {chunks.rows} spare {chunks.spared / 1e6:.0f} MB; "
            f"products by the library, predicted to take {chunks.slowdown:.2f} times as long as whole ones"
        )

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """An operation added to the graph; sizes are given as they are in tensors."""
        known = (Node, int, float, bool, str, torch.dtype, torch.device, torch.memory_format, type(None))
        args, kwargs = pytree.tree_map(lambda x: x if isinstance(x, known) else self.size(x), (args, kwargs))
        with self.graph.inserting_before(self.end):
            node = valued(self.graph.call_function(target, args, kwargs), self.mode)
        self.added.append(node)
        return node

    def size(self, size: Any) -> Any:
        """A size of the graph's tensors as a value."""
        add, multiply = (functools.partial(self.call, f) for f in (operator.add, operator.mul))
        return rebuilt(expression(size), self.symbol, add, multiply)

    def symbol(self, symbol: Any) -> Node:
        """A value that has this size."""
        inputs = [(n, n.meta.get("val")) for n in self.graph.find_nodes(op="placeholder")]
        for node, value in inputs:
            if isinstance(value, torch.SymInt) and expression(value) == symbol:
                return node
        for node, _ in inputs:
            if symbol in (shape := shape_of(node)):
                return self.call(aten.sym_size.int, node, shape.index(symbol))
        raise NotByRows(f"a size {symbol} known at run time only")

    def copies_with_one(self) -> dict[Node, Node]:
        """What the region reads of tangents, where its root is 1."""
        root, region = self.region.root, self.region
        if root is None:
            return {}
        value = root.meta["val"]
        copies = {root: self.call(aten.full.default, [], 1, dtype=value.dtype, device=value.device)}
        between = region.tangents - {root}
        needed = reached(between.intersection(region.inputs()), lambda n: between.intersection(n.all_input_nodes))
        order = [n for n in self.graph.nodes if n in region.tangents and n not in region.inner]
        for node in order:
            if node in needed:
                with self.graph.inserting_before(self.end):
                    copies[node] = self.graph.node_copy(node, lambda n: copies.get(n, n))
                self.added.append(copies[node])
        return copies

    def replace(self, node: Node, made: Node) -> None:
        """Users of a node of the region read a result of the loop, times the root where that was 1."""
        region, value = self.region, node.meta["val"]
        kind = region.exits[node][0] if node in region.exits else "rows"
        if kind == "rows":
            rows = region.rows[node]
            rest = list(value.shape[rows.lead :])
            for cut in rows.cuts:
                made = self.call(aten.view.default, made, [*cut.before, *rest])
                made = self.call(aten.slice.Tensor, made, cut.dim, cut.start, cut.start + cut.length)
        if kind == "sum" and node.target in _MEANS:
            summed = [shape_of(node.args[0])[d] for d in reduced_dims(node)]
            made = self.call(aten.div.Tensor, made, product_of(summed))
        if shape_of(made) != shape_of(node):
            if not made.meta["val"].is_contiguous():
                made = self.call(aten.clone.default, made, memory_format=torch.contiguous_format)
            made = self.call(aten.view.default, made, list(value.shape))
        if made.meta["val"].dtype is not value.dtype:
            made = self.call(aten._to_copy.default, made, dtype=value.dtype)
        if node in region.tangents and region.root is not None:
            scale = SCALED if kind in ("gathered", "turned") else aten.mul.Tensor
            made = self.call(scale, made, region.root)
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    def undo(self) -> None:
        for node in reversed(self.added):
            self.graph.erase_node(node)

    def clean(self) -> None:
        """Without what nobody reads now, in an order in which all is defined before it is read."""
        body = self.region.body() | set(self.region.exits) | self.region.sizes
        for node in reversed(self.graph.nodes):
            mine = node in body or node in self.added or node in self.region.tangents
            if mine and not node.users and node.op == "call_function" and not node.is_impure():
                self.graph.erase_node(node)
        _sort(self.graph)


def _unwritten(region: Region, node: Node, dtype: torch.dtype) -> Tensor:
    """A tensor without memory as the loop gives it in the place of a node."""
    like = node.meta["val"]
    if node in region.rows:
        shape = [region.products[0].meta["val"].shape[0], *like.shape[region.rows[node].lead :]]
    elif region.exits[node][0] == "sum":
        summed, (_, value, _) = reduced_dims(node), region.exits[node]
        shape = [size for d, size in enumerate(value.meta["val"].shape) if d not in summed]
    else:
        shape = list(like.shape)
    return torch.empty(shape, dtype=dtype, device=like.device)


def _sort(graph: Graph) -> None:
    """Each node before its first user, otherwise as they are."""
    done: set[Node] = set()
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            wanted = [a for a in stack[-1].all_input_nodes if a not in done]
            if wanted:
                stack += wanted
                continue
            ready = stack.pop()
            if ready not in done:
                done.add(ready)
                if ready is not node:
                    node.prepend(ready)
