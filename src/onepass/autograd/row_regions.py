"""Which part of a joint graph can run in chunks of rows: what a tall product's result goes through until products or
sums over all rows take it up.

Backward of a loss is linear in the loss's tangent. Where a region hangs on tangents by one number r, r is 1 inside, and
what comes out is multiplied by r: so gradients are made while forward has the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ir.callables import operators
from .between import nodes_reached, size_of
from .row_rules import NotByRows, Rows, constant_of, kind_of, place_of, reduced_dims, rows_after, shape_of
from .undefined import is_linear_in

aten = torch.ops.aten
PRODUCTS = operators("mm addmm")
_TURNS = operators("t permute transpose.int")
_SUMS = operators("sum.default sum.dim_IntList mean.default mean.dim")


@dataclass(slots=True)
class Region:
    """`products`: tall products. `rows`: nodes computed for each row. `exits`: results and what kind they are."""

    products: list[Node]
    rows: dict[Node, Rows] = field(default_factory=dict)
    wide: set[Node] = field(default_factory=set)
    inner: set[Node] = field(default_factory=set)
    exits: dict[Node, tuple[str, Node, Any]] = field(default_factory=dict)  # node -> (kind, value, other operand)
    sizes: set[Node] = field(default_factory=set)  # sizes of rows, asked of values that will not be there
    tangents: set[Node] = field(default_factory=set)  # all nodes of the graph that depend on tangents
    root: Node | None = None  # the number r

    def inputs(self) -> list[Node]:
        """What inner nodes and products read from outside."""
        read = (a for n in (*self.products, *self.inner) for a in n.all_input_nodes)
        others = (o for _, _, o in self.exits.values() if isinstance(o, Node))
        body = self.body()
        return list(dict.fromkeys(a for a in (*read, *others) if a not in body and not _is_size(a)))

    def is_loss(self) -> bool:
        """Whether rows become numbers: other products are nobody's question."""
        sums = any(kind == "sum" for kind, _, _ in self.exits.values())
        return sums or any(kind_of(n) in ("reduction", "line") for n in self.rows)

    def body(self) -> set[Node]:
        return self.inner | set(self.products)


def find_region(region: Region) -> None:
    """Fills the region around a tall product. Raises `NotByRows`."""
    (product,) = region.products
    _Growth(region, shape_of(product)).run()
    position = {n: k for k, n in enumerate(product.graph.nodes)}
    below = nodes_reached(region.products)
    narrow = set(region.rows) - region.wide
    first = {n for n in narrow if any(a in region.wide and a in below for a in n.all_input_nodes)}
    for stop in (False, True):  # without a root first: it decides what is between
        ends = [region.root] if stop and region.root is not None else []
        above = nodes_reached(region.wide, ends, down=False)
        region.inner = (region.wide | first | (narrow & above)) - set(region.products)
        region.root = _root(region, position)
    _check(region)


class _Growth:
    """Follows rows from a product down, and wide operands up."""

    def __init__(self, region: Region, shape: tuple[Any, ...]) -> None:
        self.region, self.count = region, shape[0]
        self.least = size_of(region.products[0]) // 2
        self.made = set(region.products)  # of products, as far as it was followed
        self._below: set[Node] | None = None

    def run(self) -> None:
        (product,) = self.region.products
        self.enter(product, Rows(1, self.count))
        queue = [product]
        while queue:
            node = queue.pop()
            queue += self.follow(node)
            if self.is_wide(node) and node not in self.region.products:
                queue += self.pull(node)

    def below(self) -> set[Node]:
        """All that is made of the products."""
        if self._below is None:
            self._below = nodes_reached(self.region.products)
        return self._below

    def enter(self, node: Node, rows: Rows) -> None:
        self.region.rows[node] = rows
        if self.is_wide(node):
            self.region.wide.add(node)

    def is_wide(self, node: Node) -> bool:
        return size_of(node) >= self.least

    def follow(self, node: Node) -> list[Node]:
        """Users that keep the rows; of what is not made of products, those that are not wide."""
        found = []
        made = node in self.made
        for user in node.users:
            if user in self.region.rows or user in self.region.exits or (not made and self.is_wide(user)):
                continue
            rows = rows_after(user, self.region.rows)
            if rows is not None:
                self.enter(user, rows)
                self.made |= {user} if made else set()
                found.append(user)
            elif made and node in self.region.wide and not self.leaves(node, user):
                name = "the program returns it" if user.op == "output" else f"{user.target} needs all rows of it"
                raise NotByRows(f"{node.name} has to exist as a whole: {name}")
        return found

    def leaves(self, node: Node, user: Node) -> bool:
        """Whether the user takes a wide value up, without it being there as a whole."""
        rows, exits = self.region.rows[node], self.region.exits
        if user.target is aten.sym_size.int:
            self.region.sizes.add(user)
            return True
        if user.target in _SUMS:  # over all rows
            exits[user] = ("sum", node, None)
            return all(d in reduced_dims(user) for d in range(rows.lead))
        if rows.lead != 1 or rows.cuts or len(shape_of(node)) != 2 or node not in self.region.tangents:
            return False
        if user.target is aten.mm.default:
            left, right = user.args[:2]
            exits[user] = ("times", node, right) if left is node else ("turned", node, left)
            return left is not right
        if user.target not in _TURNS or shape_of(user) != shape_of(node)[::-1]:
            return False
        for product in user.users:
            if product.target is not aten.mm.default or product.args[0] is not user:
                return False
            exits[product] = ("gathered", node, product.args[1])
        return True

    def pull(self, node: Node) -> list[Node]:
        """Wide operands that can be computed for some rows as well."""
        rows, found = self.region.rows[node], []
        for operand in node.all_input_nodes:
            if operand in self.region.rows or not self.is_wide(operand) or operand in self.below():
                continue
            if kind_of(node) in ("view", "slice", "slice_scatter") or place_of(operand, shape_of(node), rows) != "rows":
                continue
            if operand.target in PRODUCTS:
                self.region.products.append(operand)
                self._below = None
                found += [n for n in self.region.rows if n in self.below()]  # their wide users, too
                self.made |= {operand, *found}
            elif operand.op != "call_function" or kind_of(operand) not in ("point", "expand", "full", "line"):
                continue
            self.enter(operand, rows)
            found.append(operand)
        return found


def _root(region: Region, position: dict[Node, int]) -> Node | None:
    """The last number by which the region hangs on tangents, everything in between being linear in it."""
    dependent = region.inner & region.tangents
    for node in dependent:
        _require_linear(node, region.tangents)
    open_ = {a for n in dependent for a in n.all_input_nodes if a in region.tangents and a not in dependent}
    while open_:
        last = max(open_, key=position.__getitem__)
        above = {a for a in last.all_input_nodes if a in region.tangents}
        found = len(open_) == 1 and shape_of(last) == ()
        if found and not (len(above) == 1 and _is_free(last, region) and all(shape_of(a) == () for a in above)):
            return last
        if last.op == "placeholder":
            raise NotByRows("backward is given more than one number")
        _require_linear(last, region.tangents)
        open_ = (open_ - {last}) | above
    return None


def _is_free(node: Node, region: Region) -> bool:
    """Whether the other operands of a number are known before the region runs."""
    others = [a for a in node.all_input_nodes if a not in region.tangents]
    return nodes_reached(region.products).isdisjoint(others)


def _require_linear(node: Node, tangents: set[Node]) -> None:
    """A gradient is linear in the tangent; a product, a sum and a choice are, if their other operands are right."""
    first, *rest = node.args
    if node.target in (aten.where.self,):
        linear = first not in tangents and all(x in tangents or constant_of(x) == 0 for x in rest)
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        linear = rest[0] not in tangents and constant_of(rest[1]) == 0
    elif node.target in (aten.slice_scatter.default, aten.select_scatter.default):
        linear = rest[0] in tangents and constant_of(first) == 0
    elif node.target in (aten.scatter.value, aten.scatter.src, aten.scatter_add.default):
        linear = rest[1] not in tangents and all(x in tangents or constant_of(x) == 0 for x in (first, rest[2]))
    else:
        linear = is_linear_in(node, tangents)
    if not linear:
        raise NotByRows(f"{node.name} is not linear in the loss's tangent")


def _check(region: Region) -> None:
    """What the region reads must not depend on what it makes."""
    body = region.body() & nodes_reached(region.products)
    ends = {n for n in region.products[0].graph.nodes if n is region.root or _is_size(n)}
    inputs = [a for a in region.inputs() if a is not region.root]
    if not body.isdisjoint(nodes_reached(inputs, ends, down=False)):
        raise NotByRows("what rows need depends on all rows")
    if region.root is not None and region.root.meta["val"].dtype is torch.float16:
        raise NotByRows("a gradient in float16 needs its tangent's scale")
    for node, (kind, value, other) in region.exits.items():
        if other in region.tangents:
            raise NotByRows(f"{node.name} is not linear in the loss's tangent")
        if kind != "sum" and value.meta["val"].dtype is torch.float16:
            raise NotByRows("a gradient in float16 needs its tangent's scale")
        if node in region.tangents and region.root is None:
            raise NotByRows("there is no tangent")


def _is_size(node: Node) -> bool:
    """Sizes are known without what they are sizes of."""
    return isinstance(node.meta.get("val"), torch.SymInt)
