"""Names of what a host program may call, both ways.

An operator overload is named as torch names it ("aten.mm.default", also of custom namespaces); plain
functions only if they are in the list below. Everything else has no name: it is called as a live object
and its graph is not cached.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .row_loop import over_rows

_ALLOWED: tuple[tuple[Any, str], ...] = (
    (operator, "getitem add sub mul truediv floordiv mod pow neg pos abs"),
    (operator, "and_ or_ xor not_ invert lshift rshift eq ne lt le gt ge"),
    (math, "ceil floor trunc sqrt cos cosh sin sinh tan tanh acos asin atan log exp pow"),
    (builtins, "int float bool round max min abs sum"),
    (torch, "sym_int sym_float sym_max sym_min sym_not sym_ite sym_sum sym_sqrt"),
)


PLUGGED = "onepass_plugged"  # the namespace of operators that run what users plug in


def graph_constant(value: torch.Tensor) -> torch.Tensor:
    """The operation of an extern that only names a tensor that is part of the graph."""
    return value


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    grouped: bool,
    place: Sequence[int],
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """The library's attention as a tensor of that shape and strides, where its own dimensions have strides `place`."""
    query, key, value = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (query, key, value))
    found = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
    if all(n == 1 or a == b for n, a, b in zip(found.shape, found.stride(), place, strict=True)):
        return found.as_strided(shape, strides)
    result = torch.empty_strided(shape, strides, dtype=found.dtype, device=found.device)
    result.as_strided(found.shape, place).copy_(found)
    return result


def operators(names: str) -> tuple[Any, ...]:
    """Torch's operators of a list of names: "neg" is aten.neg.default, "any.dim/dims" two overloads of aten.any."""
    found: list[Any] = []
    for name in names.split():
        *namespace, operation, overloads = name.split(".") if "." in name else (name, "default")
        packet = getattr(getattr(torch.ops, *namespace or ["aten"]), operation)
        found += [getattr(packet, overload) for overload in overloads.split("/")]
    return tuple(found)


@lru_cache(maxsize=1)
def _functions() -> dict[str, Callable[..., Any]]:
    listed = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module, names in _ALLOWED
        for name in names.split()
        if hasattr(module, name)
    }
    own = (graph_constant, attention, over_rows)
    return {**listed, **{f"onepass.{f.__name__}": f for f in own}}


@lru_cache(maxsize=1)
def _names() -> dict[Callable[..., Any], str]:
    return {function: name for name, function in reversed(_functions().items())}


def callable_name(target: Callable[..., Any]) -> str | None:
    """The name `resolve_callable` finds it by; None where there is none."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return f"{namespace}.{name}.{target._overloadname}"
    try:
        return _names().get(target)
    except TypeError:  # unhashable
        return None


def resolve_callable(name: str) -> Callable[..., Any]:
    """The callable of that name; LookupError where there is none (any more)."""
    found: Any = _functions().get(name)
    if found is None and name.count(".") == 2:
        with suppress(AttributeError):
            found = reduce(getattr, name.split("."), torch.ops)
        if not isinstance(found, torch._ops.OpOverload):
            found = None
    if found is None:
        raise LookupError(f"no operator is called {name!r}")
    function: Callable[..., Any] = found
    return function
