"""What it costs to keep a value of a joint graph for backward, and what to compute it again there.

Keeping a value costs reading it, and writing it unless forward stores it anyway. Computing it again costs its
operations, inside the kernel that reads it; a call of the library takes as long as it takes alone.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..analysis.library_price import multiply_us
from ..ir.callables import operators
from ..ir.dtypes import DType
from ..ir.orders import orders_of
from ..ir.target import Target
from .between import COMPUTE_AGAIN, PRODUCTS, SAVE, bytes_of, hint, later_nodes, matrices, nodes_reached, size_of

_VIEWS = operators("_unsafe_view reshape")
_TABLES = operators("embedding index_select")
_LOOKED_UP = operators("index.Tensor gather") + _TABLES
_CONVOLUTIONS = operators("convolution")
_CALLS = (PRODUCTS, _CONVOLUTIONS)  # of the library
_MULTIPLIED = (torch.float16, torch.bfloat16, torch.float32)
_DEAR = ("exp", "log", "tanh", "sigmoid", "erf", "gelu", "silu", "pow", "sin", "cos", "sqrt", "div", "reciprocal")
# Operations whose operands are read by several positions of the result each.
_WINDOWS = ("max_pool2d", "max_pool3d", "avg_pool2d", "avg_pool3d", "max_pool_with_offsets")
DEAR, DRAWN, COMPARED = 8.0, 40.0, 30.0  # operations of a lane for an exponential, a random number, a window
SMALLER = 4  # times, the result of a reduction


class Costs:
    """The values of a joint graph that do not depend on tangents, in microseconds and bytes."""

    def __init__(self, joint: GraphModule, outputs: int, target: Target, lowered: Container[object]) -> None:
        """`outputs`: how many results are forward's. `lowered`: the operations that kernels compute."""
        self.target, self.lowered = target, lowered
        self.later = later_nodes(joint)
        results = joint.graph.output_node().args[0]
        assert isinstance(results, tuple | list)
        self.returned = {r for r in results[:outputs] if isinstance(r, Node)}
        self.asked = {r for r in results[outputs:] if isinstance(r, Node) and r not in self.later}
        self.first = nodes_reached(self.returned, down=False)  # what forward computes whatever is kept
        nodes = [n for n in joint.graph.nodes if n.op != "output" and n not in self.later]
        self.free = _free(nodes)
        self.level = self._levels(nodes)
        needed = nodes_reached((n for n in nodes if self.is_read(n)), down=False)
        self.nodes = [n for n in nodes if n in needed]  # that backward reads, and all that they are made of

    def _levels(self, nodes: Iterable[Node]) -> dict[Node, int]:
        """How many calls that fuse with nothing come before a value, one after another."""
        level: dict[Node, int] = {}
        for node in nodes:
            before = max((level[n] for n in node.all_input_nodes), default=0)
            level[node] = before + (not self.fuses(node))
        return level

    def is_read(self, node: Node) -> bool:
        """Whether backward reads a value itself."""
        return node in self.asked or any(u in self.later for u in node.users)

    def fuses(self, node: Node) -> bool:
        """Whether kernels compute an operation together with its neighbours."""
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return True  # inputs, sizes, one of the results of a call
        if orders_of(node).no_fuse and not is_view(node):
            return False
        if node.target.namespace == "onepass" or is_view(node):
            return True
        return node.target in self.lowered and not any(node.target in calls for calls in _CALLS)

    def is_far(self, node: Node, user: Node) -> bool:
        """Whether a value is used after a call that it does not wait for: backward would read it twice."""
        anywhere = node.op == "placeholder" or node in self.free or not self.fuses(node)
        return node in self.first and self.level[user] > self.level[node] and not anywhere

    def is_called_with(self, node: Node) -> bool:
        """Whether a call of backward reads a value: then a kernel must write it."""
        return any(u in self.later and not self.fuses(u) for u in _readers(node))

    # --- keeping ---

    def held(self, node: Node) -> int:
        """Bytes that keeping a value holds and nobody else does."""
        return 0 if node.op == "placeholder" or node in self.returned else bytes_of(node)

    def keeping_us(self, node: Node) -> float:
        """The time of keeping a value; endless where it cannot be kept or is a view of what can."""
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor):
            return 0.0  # a size, a process group
        if is_view(node) or not isinstance(node.meta.get("val"), torch.Tensor | torch.SymInt):
            return math.inf
        readers = [u for u in _readers(node) if u in self.later]
        read = any(map(self.fuses, readers)) or not readers  # a call reads it either way
        return bytes_of(node) * (read + (not self.is_stored(node))) / self.target.memory_bytes_per_us

    def is_stored(self, node: Node) -> bool:
        """Whether forward writes a value to memory even if backward does not read it."""
        if node.op == "placeholder" or node in self.returned:
            return True
        if node in self.free:
            return False
        readers = [u for u in _readers(node) if u in self.first]
        apart = any(not self.fuses(u) or self.level[u] > self.level[node] for u in readers)
        return node in self.first and (apart or not self.fuses(node))

    # --- computing again ---

    def again_us(self, node: Node) -> float:
        """The time of computing a value again; endless where that may not be."""
        if node.op != "call_function":
            return math.inf
        if is_view(node) or is_asked_again(node) or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            return 0.0
        if node.meta.get("recompute") is SAVE["recompute"]:
            return math.inf
        if self.fuses(node):
            return self._fused_us(node)
        return self._called_us(node) if node in self.first else 0.0

    def _fused_us(self, node: Node) -> float:
        read = sum(map(bytes_of, node.all_input_nodes))
        moved = bytes_of(node) if self.is_called_with(node) else 0
        if node.target in _LOOKED_UP:
            moved += bytes_of(node)
        elif _is_reduction(node):
            moved += read  # before the kernel that needs the result reads them
        elif _reads_windows(node):
            moved += read + bytes_of(node)  # in a kernel of its own
        moved += sum(bytes_of(n) for n in node.all_input_nodes if self.is_far(n, node))
        lanes = max(map(size_of, (node, *node.all_input_nodes)))
        return moved / self.target.memory_bytes_per_us + lanes * _operations(node) / self.target.operations_per_us

    def _called_us(self, node: Node) -> float:
        """The time of a call of the library, of those that give the same again."""
        value = node.meta["val"]
        if node.target in PRODUCTS:
            left, right = (m.meta["val"] for m in matrices(node))
            batches = hint(left.shape[0]) if left.dim() == 3 else 1
            return self._multiply_us(batches, hint(left.shape[-2]), hint(right.shape[-1]), hint(left.shape[-1]), node)
        if node.target in self.lowered and not any(node.target in calls for calls in _CALLS):
            return self._fused_us(node) + self.target.launch_us  # a kernel of its own
        if node.target in _CONVOLUTIONS and not _argument(node, "transposed"):
            kernel, groups = node.all_input_nodes[1].meta["val"], int(_argument(node, "groups"))
            channels, rows = hint(value.shape[1]), size_of(node) // hint(value.shape[1])
            return self._multiply_us(groups, rows, channels // groups, hint(kernel[0].numel()), node)
        return math.inf

    def _multiply_us(self, batches: int, rows: int, columns: int, depth: int, node: Node) -> float:
        target, moved, dtype = self.target, moved_bytes(node), node.all_input_nodes[-1].meta["val"].dtype
        call_us = target.launch_us + target.rates.call_us
        if not target.products_per_us or dtype not in _MULTIPLIED:
            return call_us + batches * rows * columns * depth / target.operations_per_us
        known = DType(str(dtype).removeprefix("torch."))
        return call_us + multiply_us(batches, rows, columns, depth, known, moved, target)

    # --- torch's rules, as far as they say what is never computed again ---

    def is_banned(self, node: Node) -> bool:
        """Whether a partition that counts bytes only would still not compute a value again."""
        if node.op != "call_function":
            return True
        if is_view(node) or is_asked_again(node):
            return False
        if node.meta.get("recompute") is SAVE["recompute"]:
            return True
        far = any(self.is_far(n, node) for n in node.all_input_nodes)
        summed = _is_reduction(node) or _reads_windows(node)
        called = not self.fuses(node) or node.target in _TABLES or self.is_called_with(node)
        return node in self.first and (summed or called or far)


def is_view(node: Node) -> bool:
    """Whether a value lies in the memory of what it is made of."""
    return getattr(node.target, "is_view", False) or node.target in _VIEWS


def is_asked_again(node: Node) -> bool:
    """Whether it is settled that a value is computed again."""
    return node.meta.get("recompute") is COMPUTE_AGAIN["recompute"]


def moved_bytes(node: Node) -> int:
    """Bytes of a value and of all that it is made of."""
    return bytes_of(node) + sum(map(bytes_of, node.all_input_nodes))


def _is_reduction(node: Node) -> bool:
    read = moved_bytes(node) - bytes_of(node)
    return node.target not in _LOOKED_UP and SMALLER * bytes_of(node) < read


def _reads_windows(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return "backward" not in name and any(pool in name for pool in _WINDOWS)


def _free(nodes: Iterable[Node]) -> set[Node]:
    """What is made of positions, constants and random numbers only: every kernel computes it for itself."""
    found: set[Node] = set()
    for node in nodes:
        if node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _readers(node: Node) -> list[Node]:
    """Operations that read a value, through views too."""
    found: list[Node] = []
    stack = [*node.users]
    while stack:
        user = stack.pop()
        if is_view(user):
            stack += user.users
        elif user.op != "output":
            found.append(user)
    return found


def _operations(node: Node) -> float:
    """Of a lane, for one value."""
    if getattr(node.target, "namespace", "") == "onepass":
        return DRAWN
    if _reads_windows(node):
        return COMPARED
    return DEAR if any(dear in getattr(node.target, "__name__", "") for dear in _DEAR) else 1.0


def _argument(node: Node, name: str) -> Any:
    """An argument of an operation by its name; None where it is left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return given.get(name)
