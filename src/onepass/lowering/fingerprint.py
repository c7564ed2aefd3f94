"""What a graph is, as a hash: equal for graphs that compile to the same thing.

Operations, arguments, literals and metadata count; names of nodes, parameters and sizes and the user's lines
do not. So a cached graph may have been another's: `reattach` puts today's names and lines on its explanation,
and constants that are not folded into kernels are passed in (`graph_constants`), not stored.
"""

from __future__ import annotations

import hashlib
import operator
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from ..ir.callables import PLUGGED, callable_name
from ..ir.orders import NO_ORDERS, asked_of, orders_of
from ..ir.origins import origin_of
from ..ir.record import CompileRecord
from ..ir.row_loop import RowLoop
from .torch_private import FakeTensor, OpOverload, folded_value, storage_key, symbol_hint

_SYMBOL = re.compile(r"\b[a-zA-Z_]+\d+\b")
_OWN_NAMESPACES = ("aten", "prims", "onepass")
_PLAIN = frozenset((type(None), bool, int, float, complex, str, type(...)))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _NoFingerprint(Exception):
    """The graph holds something that cannot be written down."""


def graph_fingerprint(graph_module: GraphModule, extra: str) -> str | None:
    """The key of a graph; `extra` says what else decides (options, target, toolchain). None: not cacheable."""
    try:
        text = _Text(graph_module).write()
    except _NoFingerprint:
        return None
    parts = (environment_key(), extra, text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@lru_cache(maxsize=1)
def environment_key() -> str:
    """This package's own sources, torch and Python: whatever else may change what is generated."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".h")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} torch {torch.__version__} python {platform.python_version()}"


def graph_constants(graph_module: GraphModule) -> list[torch.Tensor | RowLoop]:
    """The tensors and loops that are part of the graph, in its order."""
    values = (_attribute(graph_module, n) for n in graph_module.graph.nodes if n.op == "get_attr")
    return [v for v in values if isinstance(v, torch.Tensor | RowLoop)]


def node_names(graph_module: GraphModule) -> tuple[str, ...]:
    """The names of a graph's nodes in order: what `reattach` needs of the graph that was compiled."""
    return tuple(n.name for n in graph_module.graph.nodes)


def reattach(record: CompileRecord, names: Sequence[str], graph_module: GraphModule) -> CompileRecord:
    """The record of an equal graph (its nodes were called `names`) with this graph's names and lines."""
    now = {old: origin_of(node) for old, node in zip(names, graph_module.graph.nodes, strict=True)}

    def name(old: str) -> str:
        return now[old].node if old in now else old

    def operation(of: dict[str, str]) -> dict[str, str]:
        origin = now.get(of.get("node", ""))
        return of if origin is None else {**of, "node": origin.node, "line": origin.line}

    kernels = [replace(k, operations=[operation(o) for o in k.operations]) for k in record.kernels]
    externs = [replace(e, name=name(e.name), line=now[e.name].line) if e.name in now else e for e in record.externs]
    decisions = [replace(d, producer=name(d.producer), consumer=name(d.consumer)) for d in record.decisions]
    orders = [replace(o, node=name(o.node), line=now[o.node].line) if o.node in now else o for o in record.orders]
    return replace(record, kernels=kernels, externs=externs, decisions=decisions, orders=orders)


def _attribute(graph_module: GraphModule, node: Node) -> Any:
    return operator.attrgetter(str(node.target))(graph_module)


class _Text:
    """The canonical text of one graph: nodes and size symbols are numbered as they appear."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._module = graph_module
        self._nodes: dict[Node, str] = {}
        self._symbols: dict[str, str] = {}
        self._ranges: list[str] = []
        self._expressions: dict[Any, str] = {}
        self._storages: dict[object, int] = {}
        self._targets: dict[Any, str] = {}
        self._regions: dict[str, int] = {}

    def write(self) -> str:
        lines: list[str] = []
        for node in self._module.graph.nodes:
            self._nodes[node] = f"%{len(self._nodes)}"
            lines.append(self._node(node))
        return "\n".join((*lines, *self._ranges))

    def _node(self, node: Node) -> str:
        value = node.meta.get("val")
        match node.op:
            case "placeholder" if type(value).__name__ == "FakeScriptObject":
                return "in an object"  # a process group: the program hands it on
            case "placeholder":
                return f"in {self._value(value)} {self._input_facts(value)}"
            case "get_attr":
                constant = _attribute(self._module, node)
                if isinstance(constant, RowLoop):
                    plain = constant.rows, constant.products, constant.inputs, constant.results
                    return f"loop {plain} {_Text(constant.body).write()}"
                if not isinstance(constant, torch.Tensor):
                    raise _NoFingerprint
                facts = f"{self._input_facts(constant)} {folded_value(constant)!r}"
                return f"constant {self._value(constant)} {facts}"
            case "call_function":
                arguments = f"{self._tree(node.args)}{self._tree(node.kwargs)}"
                return f"{self._target(node.target)}{arguments} {self._value(value)}{self._orders(node)}"
            case "output":
                return f"out {self._tree(node.args)} {self._aliases(node.all_input_nodes)}"
        raise _NoFingerprint

    def _orders(self, node: Node) -> str:
        """What is asked of an operation, regions numbered as they appear."""
        orders, asked = orders_of(node), asked_of(node)
        region = self._regions.setdefault(orders.fuse, len(self._regions)) if orders.fuse else ""
        return f" asked {region} {orders.no_fuse} {asked}" if orders != NO_ORDERS or asked else ""

    def _target(self, target: Any) -> str:
        found = self._targets.get(target)
        if found is None:
            name = callable_name(target)
            if name is None or getattr(target, "namespace", "") == PLUGGED:
                raise _NoFingerprint  # what users plug in has no key that holds in another process
            # A custom operator may be registered anew with another schema under the same name.
            own = not isinstance(target, OpOverload) or target.namespace in _OWN_NAMESPACES
            found = self._targets[target] = name if own else f"{name}<{target._schema}>"
        return found

    def _tree(self, tree: Any) -> str:
        return repr(map_aggregate(tree, self._leaf))

    def _leaf(self, value: Any) -> str:
        """No leaf's text is another's: that of a string is in quotes."""
        if isinstance(value, Node):
            return self._nodes[value]
        if type(value) in _PLAIN:
            return repr(value)
        return str(value) if isinstance(value, _NAMED) else self._size(value)

    def _value(self, value: Any) -> str:
        """What FX knows of a result."""
        if isinstance(value, torch.Tensor):
            kind = "" if isinstance(value, FakeTensor) or type(value) is torch.Tensor else type(value).__qualname__
            layout = self._tree(value.stride()) if value.layout is torch.strided else value.layout
            return f"{kind}{value.dtype}@{value.device}{self._tree(value.shape)}{layout}"
        if isinstance(value, tuple | list):
            return f"({','.join(map(self._value, value))})"
        return self._tree(value)

    def _input_facts(self, value: Any) -> str:
        """What only matters of tensors that come from outside."""
        if not isinstance(value, torch.Tensor):
            return ""
        return f"{value.is_conj()}{value.is_neg()}{value.is_nested} {self._storage(value)}"

    def _storage(self, value: torch.Tensor) -> str:
        try:
            key = storage_key(value)
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return "-"
        return str(self._storages.setdefault(key, len(self._storages)))

    def _aliases(self, results: Iterable[Node]) -> str:
        """Which outputs share a storage with an input or one another."""
        values = (n.meta.get("val") for n in results)
        return ",".join(self._storage(v) for v in values if isinstance(v, torch.Tensor))

    def _size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise _NoFingerprint
        expression = size.node.expr
        found = self._expressions.get(expression)
        if found is None:
            for symbol in sorted(expression.free_symbols, key=lambda s: str(s.name)):
                self._meet(symbol, size.node.shape_env)
            found = _SYMBOL.sub(lambda m: self._symbols.get(m[0], m[0]), str(expression))
            self._expressions[expression] = found
        return found

    def _meet(self, symbol: Any, shape_env: Any) -> None:
        if symbol.name not in self._symbols:
            canonical = self._symbols[symbol.name] = f"${len(self._symbols)}"
            bounds = shape_env.var_to_range.get(symbol)
            limits = "" if bounds is None else f"{bounds.lower}..{bounds.upper}"
            # The program is right for every size in the limits; the hint decides how it is planned.
            hint = symbol_hint(symbol, shape_env)
            self._ranges.append(f"{canonical} in {limits} {symbol.name[0]} like {hint}")


def kernel_device(graph_module: GraphModule) -> str:
    """The kind of device most of a graph's work is on: any but the CPU, if one of its tensors is there."""
    kinds = {v.device.type for n in graph_module.graph.nodes for v in _tensors(n.meta.get("val"))}
    return next(iter(sorted(kinds - {"cpu"})), "cpu")


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, tuple | list) else []
