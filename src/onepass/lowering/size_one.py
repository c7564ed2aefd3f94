"""Whether a graph that was traced for any size is right where a size is 1, too.

    x.expand(4, 16)     traced for x of [n, 16], n taken for 4: reads four rows; of [1, 16] it repeats one

Traced like this, torch takes every size for another than 1, and adds no guard. So the graph runs once more for each
size, which is 1 now, on tensors without memory: results must have the shapes and strides that the trace promises.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from .torch_private import FakeTensorMode


def is_right_for_one(graph: GraphModule) -> bool:
    """For a graph of ATen's operations, with the sizes among its inputs."""
    inputs = [p.meta["val"] for p in graph.graph.find_nodes(op="placeholder")]
    sizes = [
        n for x in inputs for n in (x.shape if isinstance(x, torch.Tensor) else [x]) if isinstance(n, torch.SymInt)
    ]
    symbols = {s: n.node.shape_env for n in sizes for s in n.node.expr.free_symbols}
    hints = {n.node.expr: n.node.hint for n in sizes}
    log = logging.getLogger(FakeTensorMode.__module__)
    log.disabled, was_disabled = True, log.disabled  # it prints what it refuses
    try:
        for symbol, env in symbols.items():
            if env.bound_sympy(symbol).lower <= 1:
                _AtSizes(graph, {**hints, symbol: 1}).run_on(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return False  # a guard may exclude size 1; torch's own rule is right in any case
    finally:
        log.disabled = was_disabled
    return True


class _AtSizes(Interpreter):  # type: ignore[misc]
    """Runs a graph at some sizes and compares every result with what its trace promises."""

    def __init__(self, graph: GraphModule, sizes: dict[Any, int]) -> None:
        super().__init__(graph)
        self._sizes = sizes

    def run_on(self, inputs: list[Any]) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            self.run(*(self._at_sizes(x) for x in inputs))

    def _at_sizes(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return self._size(value)
        shape, strides = ([self._size(n) for n in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)

    def _size(self, value: Any) -> Any:
        return int(value.node.expr.xreplace(self._sizes)) if isinstance(value, torch.SymInt) else value

    def run_node(self, node: Node) -> Any:
        found = super().run_node(node)
        if node.target is torch.ops.aten.expand.default:
            x, wanted = node.args[0].meta["val"].shape, node.meta["val"].shape
            if any(
                isinstance(n, torch.SymInt) and str(n) != str(m) for n, m in zip(x[::-1], wanted[::-1], strict=False)
            ):
                raise ValueError(f"{node} repeats what a size of 1 has one of")
        if node.op == "call_function":
            for mine, promised in zip(*map(pytree.tree_leaves, (found, node.meta.get("val"))), strict=True):
                if isinstance(mine, torch.Tensor) and self._layout(mine) != self._layout(promised):
                    raise ValueError(f"{node} depends on a size being 1")
        return found

    def _layout(self, x: torch.Tensor) -> list[tuple[int, int]]:
        """Every dimension's size and stride, where the stride matters."""
        sides = ((self._size(n), self._size(stride)) for n, stride in zip(x.shape, x.stride(), strict=True))
        return [(n, stride if n > 1 else 0) for n, stride in sides]
