"""Small changes of large inputs (a step of a key-value cache), made in place.

A graph has no mutation: `cache[:, :, i] = k` is a changed copy of all of the cache, and a `copy_` of all of it into the
input at the end. Where nothing reads the old values any more, the operation in place on the input is the same, and only
what changes moves. So it is for tensors that the graph itself makes (zeros to which rows are added).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from ..analysis.access import estimate, is_dense
from ..analysis.inline import read_by
from ..ir.poly import product
from ..ir.program import Buffer, Define, Extern, HostValue, Statement, View, held
from .registry import supported
from .torch_private import OpOverload, storage_key
from .values import TensorMeta

aten = torch.ops.aten
FEW = 8  # times as large as what changes an input is, for which a kernel would do
LARGE = 1 << 20  # bytes: below, a launch takes longer than writing all of it
_CHANGES = frozenset(
    ("index_put", "index_copy", "index_add", "index_fill", "index_reduce", "scatter", "scatter_add", "scatter_reduce")
)
_VIEWS = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
Metas = Callable[[torch.Tensor], TensorMeta]


@dataclass(frozen=True, slots=True)
class Overwrite:
    """operation(place, *args, **kwargs) on a part of the input; `changes` is false where that leaves it as it is."""

    place: Node
    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def changes(self) -> bool:
        return not (self.operation is aten.copy_.default and _key(self.args[0]) == _key(self.place))


def find_overwrites(graph: Graph, meta: Metas) -> dict[Node, Overwrite]:
    """Nodes that may change the input that they are a changed copy of, and how."""
    found: dict[Node, Overwrite] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.copy_.default:
            target, source = node.args[:2]
            if isinstance(target, Node) and target.op == "placeholder" and isinstance(source, Node):
                found |= supported(_chain, node, target, source, meta) or {}
    return found


def _chain(copy: Node, given: Node, last: Node, meta: Metas) -> dict[Node, Overwrite]:
    """The operations from an input to what is copied into it, in place; none unless all of them can be."""
    own = meta(given.meta["val"])
    chain: dict[Node, Overwrite] = {}
    state = last
    while state is not given:
        change = _change(state, meta, own)
        if change is None or meta(state.meta["val"]) != own:
            return {}
        chain[state] = change
        state = state.args[0]  # type: ignore[assignment]
    states = [given, *reversed(chain)]
    unread = all(_serves(a, b, copy) for a, b in pairwise(states))
    return chain if unread and is_dense(own.shape, own.strides) and not _is_returned(last) else {}


def _change(node: Node, meta: Metas, whole: TensorMeta) -> Overwrite | None:
    """How to change the first argument, or the part of `whole` that it is, as an operation changes a copy of it."""
    target: Any = node.target
    if node.op != "call_function" or len(node.args) < 2 or not isinstance(node.args[0], Node):
        return None
    if target in _VIEWS:
        return _part(node, meta, whole)
    if target in (aten.scatter.src, aten.scatter.value):  # a kernel does, too, if one element of every line changes
        index = node.args[2] if len(node.args) > 2 else None
        wanted = isinstance(index, Node) and _is_few(meta(index.meta["val"]), whole)
    else:
        wanted = not (target in (aten.index_put.default, aten._unsafe_index_put.default) and _is_masked(node))
    operation = _in_place(target) if wanted else None
    return None if operation is None else Overwrite(node.args[0], operation, node.args[1:], dict(node.kwargs))


def _in_place(target: Any) -> Callable[..., Any] | None:
    """The operation that does to its first argument what another does to a copy of it."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::").removeprefix("_unsafe_")
    packet = getattr(aten, f"{name}_", None) if name in _CHANGES else None
    found: Callable[..., Any] | None = getattr(packet, target._overloadname, None)
    return found


def _part(node: Node, meta: Metas, whole: TensorMeta) -> Overwrite | None:
    """A slice that is written, or one that is itself changed in part."""
    base, source = node.args[:2]
    assert isinstance(base, Node)
    view: Any = _VIEWS[node.target]
    where = (view, _key(base), *node.args[2:])
    if not isinstance(source, Node):
        return None
    inner = source.args[0] if source.op == "call_function" and source.args else None
    if isinstance(inner, Node) and _key(inner) == where and len(source.users) == 1:
        change = _change(source, meta, whole)
        if change is not None:
            return change
    views = node.graph.find_nodes(op="call_function", target=view)
    place = next((n for n in views if _key(n) == where and n < node), None)
    if place is None or not _is_few(meta(place.meta["val"]), whole):
        return None
    if source.target is aten.copy.default and isinstance(source.args[1], Node):
        source = source.args[1]
    return Overwrite(place, aten.copy_.default, (source,), {})


def _key(node: Node) -> object:
    """Equal for the same slices of the same tensor."""
    if node.target in _VIEWS.values() and isinstance(node.args[0], Node):
        return (node.target, _key(node.args[0]), *node.args[1:])
    return node


def _is_masked(node: Node) -> bool:
    """x[mask] = value is a choice at every position."""
    indices: Any = node.args[1]
    return any(isinstance(i, Node) and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)


def _is_few(part: TensorMeta, whole: TensorMeta) -> bool:
    changed, size = (estimate(product(m.shape)) for m in (part, whole))
    return FEW * changed <= size and size * whole.dtype.bytes >= LARGE


def _serves(state: Node, following: Node, copy: Node) -> bool:
    """Whether all that reads a state, but the `copy` at the end, serves to make the one that follows, before it."""
    waiting, seen = [state], {following, copy}
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            if user.op == "output" or user.is_impure() or not user.users or not user < following:
                return False
            seen.add(user)
            waiting.append(user)
    return True


def _is_returned(node: Node) -> bool:
    """Whether a tensor of the same storage leaves the graph."""
    (output,) = node.graph.find_nodes(op="output")
    key = storage_key(node.meta["val"])
    returned: Iterable[Any] = (n.meta.get("val") for n in output.all_input_nodes)
    return any(isinstance(v, torch.Tensor) and storage_key(v) == key for v in returned)


# --- tensors of the graph ---


def change_own(statements: Iterable[Statement], outputs: tuple[Any, ...]) -> list[Statement]:
    """Calls that change a copy of what kernels make for them alone change that instead."""
    statements = list(statements)
    made = {s.buffer for s in statements if isinstance(s, Define)}
    reads = Counter(value for s in statements for value in read_by(s))
    reads.update(held(outputs))
    return [_changing(s, made, reads) if isinstance(s, Extern) else s for s in statements]


def _changing(extern: Extern, made: set[Buffer], reads: Counter[Buffer | HostValue]) -> Extern:
    first, operation = extern.args[0] if extern.args else None, _in_place(extern.target)
    if operation is None or not isinstance(first, View) or not isinstance(extern.result, Buffer):
        return extern
    old, new = first.buffer, extern.result
    same = (old.shape, old.strides, old.dtype, old.device) == (new.shape, new.strides, new.dtype, new.device)
    if not same or old not in made or reads[old] != 1 or not first.is_whole or not is_dense(old.shape, old.strides):
        return extern
    return replace(extern, target=operation, overwrites=old)
