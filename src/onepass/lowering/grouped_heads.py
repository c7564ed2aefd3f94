"""Heads of keys and values that are repeated for groups of queries are given to attention as they are.

    attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))  ->  attention(q, k, v, enable_gqa=True)

The library takes groups of heads and sums their gradients. The pass changes dynamo's graph, before AOTAutograd chooses
a kernel of the library. It asks for shapes alone, so that every spelling of the repetition is found that expands a
dimension of one and merges it with the heads before it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from .known_masks import ARGUMENTS, ATTENTION, operation, writes

_MERGES, _EXPANDS = frozenset(["reshape", "view", "flatten"]), frozenset(["expand", "broadcast_to"])
_COPIES = frozenset(["contiguous", "clone"])


def group_heads(graph: GraphModule) -> None:
    """Attention of repeated heads becomes attention of groups of heads."""
    for part in (m for m in graph.modules() if isinstance(m, GraphModule)):
        calls = list(part.graph.find_nodes(op="call_function", target=ATTENTION))
        if calls and not any(map(writes, part.graph.nodes)):
            for node in calls:
                _group_heads(node)
            part.recompile()


def _group_heads(call: Node) -> None:
    given = {**dict(zip(ARGUMENTS, call.args, strict=False)), **call.kwargs}
    if given.get("enable_gqa"):
        return
    key, value = (_before_repetition(given.get(name)) for name in ("key", "value"))
    if key is None or value is None or _heads(key) != _heads(value):
        return
    with call.graph.inserting_before(call):
        given |= {"key": _dropped(key), "value": _dropped(value), "enable_gqa": True}
    call.args, call.kwargs = (), given


def _before_repetition(heads: Any) -> Node | None:
    """What is repeated, with a dimension of one behind its heads where it has one."""
    heads, shape = _called(heads), _shape(heads)
    if heads is None or shape is None or len(shape) != 4:
        return None
    if operation(heads) == "repeat_interleave":
        given = {**dict(zip(("input", "repeats", "dim"), heads.args, strict=False)), **heads.kwargs}
        fits = isinstance(given.get("repeats"), int) and given.get("dim") in (1, -3) and "input" in given
        return given["input"] if fits else None
    wide = _called(heads.args[0]) if operation(heads) in _MERGES else None
    if wide is None or operation(wide) not in _EXPANDS:
        return None
    before, after = _shape(wide.args[0]) or (), _shape(wide) or ()
    if len(before) != 5 or len(after) != 5 or before[2] != 1 or shape[1] != before[1] * after[2]:
        return None
    same = (*before[:2], *before[3:]) == (*after[:2], *after[3:]) and (shape[0], *shape[2:]) == (before[0], *before[3:])
    return wide.args[0] if same else None  # type: ignore[return-value]


def _called(value: Any) -> Node | None:
    """The call that makes a value, before it is copied."""
    while isinstance(value, Node) and value.op in ("call_function", "call_method"):
        if operation(value) not in _COPIES:
            return value
        value = value.args[0]
    return None


def _dropped(heads: Node) -> Node:
    """Heads without a dimension of one behind them."""
    return heads.graph.call_method("squeeze", (heads, 2)) if len(_shape(heads) or ()) == 5 else heads


def _heads(node: Node) -> int:
    return int((_shape(node) or (0, 0))[1])


def _shape(node: Any) -> tuple[Any, ...] | None:
    made = node.meta.get("example_value") if isinstance(node, Node) else None
    return tuple(made.shape) if isinstance(made, Tensor) else None
