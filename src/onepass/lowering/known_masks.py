"""Masks of attention that are known when a graph is compiled, because they are made of positions and numbers alone.

    seen = (arange(n)[:, None] >= arange(n)) & (documents == 0)        documents: zeros, made in the graph
    scaled_dot_product_attention(q, k, v, attn_mask=seen)  ->  scaled_dot_product_attention(q, k, v, is_causal=True)

The pass changes dynamo's graph, before AOTAutograd chooses a kernel of the library: the fastest ones take no mask.
With fixed sizes the mask is computed once and looked at; for sizes known at run time a proof is needed. Where nothing
differentiates the call, the mask is only written as a condition on positions, which a kernel of ours reads as bounds.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from .torch_private import without_modes

ATTENTION = torch.nn.functional.scaled_dot_product_attention
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
MOST_ELEMENTS = 2**27  # of a mask that is computed to be looked at
FULL, CAUSAL = "full", "causal"
# Functions and methods whose result depends on nothing but their arguments, by name.
_NAMES = (
    "arange ones zeros full tensor ones_like zeros_like full_like new_ones new_zeros new_full tril triu cat stack "
    "diff cumsum where logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not "
    "bitwise_xor eq ne lt le gt ge add sub mul neg abs floor_divide remainder minimum maximum clamp expand "
    "broadcast_to view reshape unsqueeze squeeze permute transpose flatten to bool int long float half bfloat16 "
    "masked_fill index_select gather contiguous clone repeat flip any all isin and or xor invert floordiv mod "
    "getitem"
)
_PURE = frozenset(_NAMES.split())
_LOGIC = (operator.and_, operator.or_)
_VIEWS = frozenset(["getitem", "expand", "unsqueeze", "view", "reshape", "to"])
_CHANGES = "setitem iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ior ixor"
_IN_PLACE = {*_CHANGES.split(), *(f"__{name}__" for name in _CHANGES.split())}


def simplify_masks(graph: GraphModule) -> None:
    """Attention loses a mask that hides nothing, and gets `is_causal` for one that hides later positions."""
    for part in (m for m in graph.modules() if isinstance(m, GraphModule)):
        _simplify_masks(part)


def _simplify_masks(graph: GraphModule) -> None:
    calls = list(graph.graph.find_nodes(op="call_function", target=ATTENTION))
    if not calls or any(writes(n) for n in graph.graph.nodes):
        return
    known: dict[Node, Any] = {}
    kinds: dict[Node, str | None] = {}
    for node in calls:
        given = {**dict(zip(ARGUMENTS, node.args, strict=False)), **node.kwargs}
        mask = given.get("attn_mask")
        if not isinstance(mask, Node) or given.get("is_causal"):
            continue
        if mask not in kinds:
            kinds[mask] = _kind(mask, graph.graph, known)
        if (kind := kinds[mask]) is None or not _fits(kind, mask, given):
            continue
        if _is_differentiated(node):
            given |= {"attn_mask": None, "is_causal": kind is CAUSAL}
        elif mask in known:
            given["attn_mask"] = _of_positions(kind, node, mask)
        node.args = node.args[:3]
        node.kwargs = {name: value for name, value in given.items() if name not in ARGUMENTS[: len(node.args)]}
    graph.recompile()


def _is_differentiated(node: Node) -> bool:
    made = node.meta.get("example_value")
    return torch.is_grad_enabled() and isinstance(made, Tensor) and made.requires_grad


def writes(node: Node) -> bool:
    """Whether a node may change a tensor that others read."""
    name, schema = _name(node), getattr(node.target, "_schema", None)
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and node.target not in _LOGIC)
    return node.op.startswith("call") and (in_place or "out" in node.kwargs or bool(schema and schema.is_mutable))


def _name(node: Node) -> str:
    """The name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def operation(node: Node) -> str:
    """The same, however it is spelled: `operator.and_`, `Tensor.__and__`."""
    return _name(node).strip("_")


def _fits(kind: str, mask: Node, given: dict[str, Any]) -> bool:
    """Whether `is_causal` means what the mask means: rows and columns are the positions of the same tensor."""
    if kind is FULL:
        return True
    sizes = [given[name].meta["example_value"].shape[-2] for name in ("query", "key")]
    return tuple(mask.meta["example_value"].shape[-2:]) == (sizes[0], sizes[0]) and sizes[0] == sizes[1]


def _of_positions(kind: str, call: Node, mask: Node) -> Node:
    """The same mask as a comparison of positions."""
    graph, made = call.graph, mask.meta["example_value"]
    rows, columns = made.shape[-2:]
    origin = {name: mask.meta[name] for name in ("stack_trace",) if name in mask.meta}

    def positions(count: int) -> Node:
        return graph.call_function(torch.arange, (count,), {"device": made.device})

    with graph.inserting_before(call):
        if kind is FULL:
            seen = graph.call_function(operator.ge, (positions(columns), 0))
            nodes = [seen, graph.call_method("expand", (seen, rows, columns))]
        else:
            query = graph.call_method("unsqueeze", (positions(rows), 1))
            nodes = [graph.call_function(operator.ge, (query, positions(columns)))]
    for node in nodes:
        node.meta |= origin
    return nodes[-1]


# --- masks of fixed sizes are computed ---


def _kind(mask: Node, graph: Graph, known: dict[Node, Any]) -> str | None:
    """What a mask hides, if that is known: nothing, or later positions."""
    with without_modes():
        try:
            value = _value(mask, graph, known)
            seen = None if value is None else _seen(value)
            if seen is not None and seen.ndim >= 2:
                if bool(seen.all()):
                    return FULL
                return CAUSAL if bool((seen == torch.ones_like(seen).tril()).all()) else None
        except (RuntimeError, TypeError, ValueError, IndexError):
            known.pop(mask, None)  # a function that means something else than its name says
    return FULL if _is_true(mask) else None


def _seen(mask: Tensor) -> Tensor | None:
    """Which scores a mask leaves; None where it changes some. Dimensions along which it only repeats are 1."""
    for dim in range(mask.ndim - 2):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    hidden = (mask == -math.inf) | (mask == torch.finfo(mask.dtype).min)
    return mask == 0 if bool((hidden | (mask == 0)).all()) else None


def _value(node: Node, graph: Graph, known: dict[Node, Any]) -> Any:
    """The value of a node that is made of numbers alone; None for all others."""
    needed, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if current not in known and not _is_pure(current):
            return None
        fresh = [n for n in current.all_input_nodes if n not in needed] if current not in known else []
        needed.update(fresh)
        stack += fresh
    here = _device(node)
    for current in graph.nodes:
        if current in needed and current not in known:
            args, kwargs = torch.fx.node.map_arg((current.args, current.kwargs), known.__getitem__)
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: here, (args, dict(kwargs)))
            kwargs |= {"device": here} if isinstance(kwargs.get("device"), str) else {}
            called = getattr(torch.Tensor, current.target) if isinstance(current.target, str) else current.target
            known[current] = called(*args, **kwargs)
    return known[node]


def _is_pure(node: Node) -> bool:
    """Whether a node is a function of its arguments, of a size that is fixed and small enough."""
    made = node.meta.get("example_value")
    if node.op not in ("call_function", "call_method") or not isinstance(made, Tensor):
        return False
    fixed = all(type(n) is int for n in made.shape)
    return operation(node) in _PURE and fixed and made.numel() <= MOST_ELEMENTS and "out" not in node.kwargs


def _device(node: Node) -> torch.device:
    """Where a mask is computed: on its own device if that is here."""
    device: torch.device = node.meta["example_value"].device
    return device if device.type == "cuda" and torch.cuda.is_available() else torch.device("cpu")


# --- masks of any size that are proven to be true ---


def _is_true(node: Node) -> bool:
    """Whether a tensor of booleans is true everywhere, for all sizes."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        made = current.meta.get("example_value")
        if not isinstance(made, Tensor) or made.dtype is not torch.bool or not current.args:
            return False
        name = operation(current)
        if name == "ge" and isinstance(current.args[1], int):
            least = _least(current.args[0])
            if least is None or least < current.args[1]:
                return False
            continue
        if name not in _VIEWS and name != "and":
            return False
        parts = current.args if name == "and" else current.args[:1]
        if not all(isinstance(part, Node) for part in parts):
            return False
        waiting += [part for part in parts if isinstance(part, Node) and part not in seen]
        seen.update(waiting)
    return True


def _least(value: Any) -> int | None:
    """A number that no element of a tensor of positions is below."""
    if isinstance(value, int):
        return value if abs(value) < 2**31 else None  # no sum leaves 64 bits
    if not isinstance(value, Node) or value.kwargs.keys() - {"device", "dtype"}:
        return None
    made = value.meta.get("example_value")
    if not isinstance(made, Tensor) or made.dtype is not torch.int64:
        return None
    name = operation(value)
    if name == "arange" and len(value.args) == 1:
        return 0
    if name in _VIEWS:
        return _least(value.args[0])
    if name == "add" and any(isinstance(a, int) for a in value.args):
        terms = [_least(a) for a in value.args]
        return None if None in terms else sum(t for t in terms if t is not None)
    return None
