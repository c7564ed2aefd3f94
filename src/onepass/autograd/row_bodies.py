"""A region of rows as a loop: the body, as a graph of one chunk, and what the loop is given.

Rows are the first dimension of everything in the body and nothing else of a chunk is known, so one body serves chunks
of every size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..ir.row_loop import LoopResult, RowLoop, TallProduct
from .between import hint, valued, with_place
from .row_regions import Region
from .row_rules import NotByRows, Rows, constant_of, expression, kind_of, place_of, rebuilt, reduced_dims, shape_of
from .torch_private import Sizes, shape_config

aten = torch.ops.aten
Call = Callable[..., Node]  # an operation added to the outer graph


class Body:
    """Built once per region. `call` adds an operation to the outer graph, in front of the loop."""

    def __init__(self, region: Region, chunk: int, call: Call) -> None:
        self.region, self.call, self.chunk = region, call, chunk
        self.graph = Graph()
        self.sizes = Sizes()
        self.mode, self.size = self.sizes.mode, self.sizes.add("rows", chunk)
        self.symbols: dict[Any, torch.SymInt] = {}  # sizes of the outer graph, and what they are in the body
        self.examples = _examples(region.products[0].graph)
        self.values: dict[Node, Node] = {}
        self.operands: list[Node] = []
        self.inputs: list[tuple[int, bool]] = []
        self.given: dict[tuple[int, bool], Node] = {}
        self.masks: dict[Rows, Node] = {}
        self.known: dict[Any, Node] = {}  # sizes as values
        self.results: list[LoopResult] = []
        self.outputs: list[Node] = []

    def loop(self) -> RowLoop:
        """The loop; `operands` are its operands then, and `results` those of the region's `returned()` in order."""
        with shape_config.patch(backed_size_oblivious=True):
            products = tuple(map(self.product, self.region.products))
            order = self.region.products[0].graph.nodes
            for node in (n for n in order if n in self.region.inner):
                self.values[node] = self.emit(node)
            self.finish()
        body = GraphModule({}, self.graph)
        total = hint(self.region.products[0].meta["val"].shape[0])
        repeats = -(-total // self.chunk)
        return RowLoop(body, self.chunk, products, tuple(self.inputs), tuple(self.results), repeats)

    # what the body is given

    def product(self, node: Node) -> TallProduct:
        bias, left, right = (None, *node.args[:2]) if node.target is aten.mm.default else node.args[:3]
        if node.kwargs or not all(isinstance(a, Node) for a in (left, right)):
            raise NotByRows(f"{node.name} is not a plain product")
        columns = shape_of(node)[1]
        self.values[node] = self.placeholder((columns,), (columns, 1), node.meta["val"])
        numbers = [None if a is None else self.operand(a) for a in (left, right, bias)]  # type: ignore[arg-type]
        assert numbers[0] is not None and numbers[1] is not None
        return TallProduct(numbers[0], numbers[1], numbers[2])

    def operand(self, node: Node) -> int:
        """Its position among the loop's operands."""
        if node not in self.operands:
            self.operands.append(node)
        return self.operands.index(node)

    def placeholder(self, rest: Sequence[Any], strides: Sequence[Any], like: torch.Tensor) -> Node:
        """An input with a row for each row of the chunk."""
        return self.add_input((self.size, *map(self.own, rest)), strides, like)

    def own(self, size: Any) -> Any:
        """A size of the outer graph as the body knows it."""
        return rebuilt(size, self.symbol, operator.add, operator.mul)

    def symbol(self, symbol: Any) -> torch.SymInt:
        if symbol not in self.symbols:
            self.symbols[symbol] = self.sizes.add(f"size{len(self.symbols)}", self.examples[symbol])
        return self.symbols[symbol]

    def add_input(self, shape: Sequence[Any], strides: Sequence[Any], like: torch.Tensor) -> Node:
        with self.mode:
            value = torch.empty_strided(shape, [*map(self.own, strides)], dtype=like.dtype, device=like.device)
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        place = self.graph.inserting_after(last) if last is not None else self.graph.inserting_before()
        with place:
            node = self.graph.placeholder(f"given_{sum(1 for n in self.graph.nodes if n.op == 'placeholder')}")
        node.meta["val"] = value
        return node

    def by_rows(self, node: Node, rows: Rows) -> Node:
        """An outer tensor, of which a chunk is given its rows."""
        shape = shape_of(node)
        rest = shape[rows.lead :]
        if (rows.lead != 1 or rows.cuts) and not node.meta["val"].is_contiguous():
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        for cut in reversed(rows.cuts):  # rows that are not there: zeros
            after = cut.before[cut.dim] - cut.start - cut.length
            pads = [0, 0] * (len(rest) + len(cut.before) - 1 - cut.dim) + [cut.start, after]
            node = self.call(aten.view.default, node, [*cut.shape, *rest])
            node = self.call(aten.constant_pad_nd.default, node, pads)
        if len(shape_of(node)) != 1 + len(rest):
            node = self.call(aten.view.default, node, [-1, *rest])
        value = node.meta["val"]
        strides = [*map(expression, value.stride())]
        return self.input(node, True, lambda: self.placeholder(rest, strides, value))

    def whole(self, node: Node, rank: int) -> Node:
        """An outer tensor that is the same for all rows, without dimensions of size 1 in the place of these."""
        shape = shape_of(node)
        if len(shape) > rank:
            node = self.call(aten.view.default, node, list(shape[len(shape) - rank :]))
        value = node.meta["val"]
        sizes, strides = shape_of(node), [*map(expression, value.stride())]
        return self.input(node, False, lambda: self.add_input([*map(self.own, sizes)], strides, value))

    def input(self, node: Node, by_rows: bool, make: Callable[[], Node]) -> Node:
        key = self.operand(node), by_rows
        if key not in self.given:
            self.given[key] = make()
            self.inputs.append(key)
        return self.given[key]

    # operations

    def add(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """An operation of the body."""
        return valued(self.graph.call_function(target, args, kwargs), self.mode)

    def read(self, operand: Any, node: Node, rows: Rows) -> Any:
        """An operand of point-wise work."""
        if not isinstance(operand, Node):
            return operand
        shape = shape_of(node)
        if operand in self.values:
            if self.region.rows[operand] != rows:
                raise NotByRows(f"{node.name} mixes rows of different order")
            return self.values[operand]
        if not isinstance(value := operand.meta.get("val"), torch.Tensor):
            if not isinstance(value, torch.SymInt):
                raise NotByRows(f"{operand.name} is no tensor")
            return self.extent(value)
        place = place_of(operand, shape, rows)
        if place == "free":
            return self.whole(operand, len(shape) - rows.lead)
        if place == "part":
            own = operand.meta["val"].shape
            rest = own[max(0, len(own) - len(shape) + rows.lead) :]
            operand = self.call(aten.expand.default, operand, [*node.meta["val"].shape[: rows.lead], *rest])
        return self.by_rows(operand, rows)

    def emit(self, node: Node) -> Node:
        """The operation on the rows of a chunk."""
        rows, shape = self.region.rows[node], shape_of(node)
        return with_place(self.emitted(node, rows, shape), node)

    def emitted(self, node: Node, rows: Rows, shape: tuple[Any, ...]) -> Node:
        kind, less = kind_of(node), rows.lead - 1
        rest = [*map(self.extent, shape[rows.lead :])]
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: self.read(a, node, rows)) if kind in (
            "point", "line", "expand") else (node.args, dict(node.kwargs))  # fmt: skip
        match kind:
            case "point":
                kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
                return self.add(node.target, *args, **kwargs)
            case "line":
                dim = int(args[1]) % len(shape) - less
                return self.add(node.target, args[0], dim, *args[2:], **kwargs)
            case "expand":
                return self.add(node.target, args[0], [self.row_count(), *rest])
            case "full":
                return self.add(node.target, [self.row_count(), *rest], *args[1:], **kwargs)
            case "reduction":
                first: Any = node.args[0]
                single = isinstance(node.args[1], int)
                dims = [d - self.rows_of(first).lead + 1 for d in reduced_dims(node)]
                return self.add(node.target, self.inner(first), dims[0] if single else dims, *args[2:], **kwargs)
            case "item":
                return self.add(operator.getitem, self.inner(node.args[0]), args[1])
        return self.moved(node, rows, rest)

    def moved(self, node: Node, rows: Rows, rest: list[Any]) -> Node:
        """What only moves elements, if it does."""
        first: Any = node.args[0]
        kind = kind_of(node)
        if kind == "slice_scatter":
            return self.scattered(node, rows)
        source, before = self.inner(first), self.rows_of(first)
        if kind == "slice" and shape_of(first) != shape_of(node) and rows.cuts == before.cuts:
            dim = int(node.args[1]) % len(shape_of(node)) - rows.lead + 1  # type: ignore[call-overload]
            return self.add(node.target, source, dim, *map(self.extent, node.args[2:]))
        if shape_of(first)[before.lead :] == shape_of(node)[rows.lead :]:
            return source
        return self.add(aten.view.default, source, [self.row_count(), *rest])

    def scattered(self, node: Node, rows: Rows) -> Node:
        """A slice put into a constant: of rows, a choice by row; of other dimensions, the same."""
        base, source, *dims = node.args
        assert isinstance(source, Node)
        value, number = self.inner(source), constant_of(base)
        if shape_of(source) == shape_of(node):
            return value
        before = self.rows_of(source)
        if before.cuts == rows.cuts:
            rest = [*map(self.extent, shape_of(node)[rows.lead :])]
            like = node.meta["val"]
            full = self.add(aten.full.default, [self.row_count(), *rest], number, dtype=like.dtype, device=like.device)
            dim = int(dims[0]) % len(shape_of(node)) - rows.lead + 1  # type: ignore[call-overload]
            return self.add(node.target, full, value, dim, *map(self.extent, dims[1:]))
        return self.chosen(value, before, len(shape_of(node)) - rows.lead, number)

    def chosen(self, value: Node, rows: Rows, rank: int, number: Any) -> Node:
        """The value in rows of a space, a number in others."""
        like = value.meta["val"]
        other = self.add(aten.full.default, [], number, dtype=like.dtype, device=like.device)
        mask = self.mask(rows, like.device)
        if rank:
            mask = self.add(aten.view.default, mask, [self.row_count(), *[1] * rank])
        return self.add(aten.where.self, mask, value, other)

    def mask(self, rows: Rows, device: torch.device) -> Node:
        """Which rows are in a space."""
        key = rows.with_lead(0)
        if key not in self.masks:
            shape = rows.cuts[-1].shape
            ones = self.call(aten.full.default, [*shape], True, dtype=torch.bool, device=device)
            self.masks[key] = self.by_rows(ones, rows.with_lead(len(shape)))
        return self.masks[key]

    def inner(self, node: Any) -> Node:
        if node in self.values:
            return self.values[node]
        return self.by_rows(node, self.rows_of(node))

    def rows_of(self, node: Node) -> Rows:
        if node not in self.region.rows:
            raise NotByRows(f"rows of {node.name} are not known")
        return self.region.rows[node]

    def extent(self, size: Any) -> Any:
        """A size of the outer graph as a value of the body."""
        size = size.meta["val"] if isinstance(size, Node) else size
        if size is None or isinstance(size, int):
            return size
        return rebuilt(
            expression(size), self.symbol_value, functools.partial(self.add, operator.add),
            functools.partial(self.add, operator.mul),
        )  # fmt: skip

    def symbol_value(self, symbol: Any) -> Node:
        return self.size_value(self.own(symbol))

    def row_count(self) -> Node:
        """The number of rows as a value of the body."""
        return self.size_value(self.size)

    def size_value(self, size: torch.SymInt) -> Node:
        """The size of an input as a value."""
        wanted = expression(size)
        if wanted not in self.known:
            for node in self.graph.find_nodes(op="placeholder"):
                if wanted in (shape := shape_of(node)):
                    self.known[wanted] = self.add(aten.sym_size.int, node, shape.index(wanted))
                    return self.known[wanted]
            raise NotByRows("a size known at run time only")
        return self.known[wanted]

    # what comes out

    def finish(self) -> None:
        """Results, in the order of `returned`; the first wide ones of a buffer's type take its place."""
        places: dict[Node, int] = {}
        buffers = [self.values[p] for p in self.region.products]
        free = [*range(len(buffers))]
        updates: list[tuple[Node, Node]] = []
        for node, (kind, value, other) in self.region.exits.items():
            made = self.total(node, value) if kind == "sum" else self.values[value]
            if kind == "sum":
                self.results.append(LoopResult("sum", self.output(made)))
                continue
            if made not in places:
                place = next((n for n in free if _same(buffers[n].meta["val"], made.meta["val"])), None)
                if place is not None:
                    free.remove(place)
                    updates.append((buffers[place], made))
                places[made] = self.output(made) if place is None else place
            if kind == "turned":
                other = self.call(aten.permute.default, other, [1, 0])
            self.results.append(LoopResult(kind, places[made], self.operand(other)))
        for node in rows_returned(self.region):
            self.results.append(LoopResult("rows", self.output(self.values[node])))
        for target, source in updates:
            self.add(aten.copy_.default, target, source)
        self.graph.output(tuple(self.outputs))

    def total(self, node: Node, value: Node) -> Node:
        """A sum over all rows, of those of a chunk; sums of floats are added up in float32."""
        rows, made = self.region.rows[value], self.values[value]
        if rows.cuts:
            made = self.chosen(made, rows, len(shape_of(value)) - rows.lead, 0)
        dims = [0, *(d - rows.lead + 1 for d in reduced_dims(node) if d >= rows.lead)]
        like = node.meta["val"].dtype
        dtype = torch.float32 if like in (torch.bfloat16, torch.float16) else like
        return self.add(aten.sum.dim_IntList, made, dims, False, dtype=dtype)

    def dtype(self, result: LoopResult) -> torch.dtype:
        """The type of what a result is made of."""
        products = self.region.products
        value = products[result.value] if result.value < len(products) else self.outputs[result.value - len(products)]
        found: torch.dtype = value.meta["val"].dtype
        return found

    def output(self, node: Node) -> int:
        if node.op == "placeholder":
            node = self.add(aten.clone.default, node)
        self.outputs.append(node)
        return len(self.region.products) + len(self.outputs) - 1


def _examples(graph: Graph) -> dict[Any, int]:
    """What symbols of a graph were when it was traced."""
    values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else [v])]
    return {expression(s): hint(s) for s in sizes if isinstance(s, torch.SymInt)}


def rows_returned(region: Region) -> list[Node]:
    """Inner values with users outside."""
    order = [n for n in region.products[0].graph.nodes if n in region.inner and n not in region.wide]
    inside = region.body() | set(region.exits)
    return [n for n in order if not inside.issuperset(n.users)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype is b.dtype and a.device == b.device and list(map(expression, a.shape)) == list(map(expression, b.shape))
    )
