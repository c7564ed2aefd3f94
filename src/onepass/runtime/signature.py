"""What an exported program takes and gives: structures of containers as JSON, and each tensor's type, sizes and layout.

A structure is ["leaf", k], ["constant", value], ["tuple" | "list", [parts]], ["dict", [[key, part], ...]] or
["named", name, [fields], [parts]], a named tuple. A size is a number or text over symbols: "s0", "4*s0".
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..errors import InputMismatch

Size = int | str
_SYMBOL = re.compile(r"s\d+")
_EXPRESSION = re.compile(r"(?:s\d+|\d+|//|[-+*() ])+")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that the program was exported for; without a dtype an int, whose symbol is its shape."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]

    def __str__(self) -> str:
        return f"a tensor of {self.dtype}{_shown(self.shape)} with strides {_shown(self.strides)}"


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that is asked of a call's arguments. `ranges`: the least and the largest value of a symbol."""

    structure: Any
    leaves: tuple[Leaf, ...]
    ranges: dict[str, tuple[int, int | None]]

    @staticmethod
    def from_json(data: Any) -> Inputs:
        """Raises LookupError, TypeError or ValueError where the data describes no inputs."""
        leaves = tuple(Leaf(str(x[0]), x[1], tuple(x[2]), tuple(x[3])) for x in data["leaves"])
        for leaf in leaves:
            for size in (*leaf.shape, *leaf.strides):
                if not (type(size) is int or (type(size) is str and _EXPRESSION.fullmatch(size))):
                    raise ValueError(f"not a size: {size!r}")
            if leaf.dtype and not isinstance(getattr(torch, leaf.dtype, None), torch.dtype):
                raise ValueError(f"not a dtype: {leaf.dtype!r}")
        ranges = {str(name): (int(low), high if high is None else int(high)) for name, (low, high) in data["ranges"]}
        return Inputs(data["structure"], leaves, ranges)

    def to_json(self) -> Any:
        """Plain data."""
        leaves = [[x.name, x.dtype, x.shape, x.strides] for x in self.leaves]
        return {"structure": self.structure, "leaves": leaves, "ranges": list(self.ranges.items())}

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> list[Any]:
        """The tensors and numbers of a call in order; `InputMismatch` for any that the program is not for."""
        found: list[Any] = []
        _, (of_args, of_kwargs) = self.structure
        _take(of_args, args, "what is passed by position", found)
        _take(of_kwargs, kwargs, "what is passed by name", found)
        symbols: dict[str, int] = {}
        later: list[tuple[str, int, str]] = []
        for value, leaf in zip(found, self.leaves, strict=True):
            if leaf.dtype:
                _check(value, leaf, device, symbols, later)
            elif type(value) is not int:
                raise InputMismatch(leaf.name, _brief(value), "an int")
            else:
                _meet(value, str(leaf.shape[0]), leaf.name, symbols, later)
        for where, got, size in later:
            if got != (wanted := _value(size, symbols)):
                raise InputMismatch(where, got, f"{size}, which is {wanted} here")
        for name, (low, high) in self.ranges.items():
            if name in symbols and not (low <= symbols[name] and (high is None or symbols[name] <= high)):
                raise InputMismatch(_named(name, self.leaves), symbols[name], _range(low, high))
        return found


def _take(structure: Any, value: Any, where: str, found: list[Any]) -> None:
    match structure:
        case ["leaf", _]:
            found.append(value)
        case ["constant", wanted]:
            if type(value) is not type(wanted) or value != wanted:
                raise InputMismatch(where, _brief(value), f"the value {wanted!r}")
        case ["dict", pairs]:
            keys = [k for k, _ in pairs]
            if not isinstance(value, dict) or set(value) != set(keys):
                got = f"a dict of {sorted(map(str, value))}" if isinstance(value, dict) else _brief(value)
                raise InputMismatch(where, got, f"a dict of {keys}")
            for key, part in pairs:
                _take(part, value[key], f"{key!r} in {where}", found)
        case [kind, *_, parts]:
            if not isinstance(value, list if kind == "list" else tuple) or len(value) != len(parts):
                got = f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else _brief(value)
                raise InputMismatch(where, got, f"a {'list' if kind == 'list' else 'tuple'} of {len(parts)}")
            for number, (part, item) in enumerate(zip(parts, value, strict=True)):
                _take(part, item, f"number {number} in {where}", found)


def _check(
    tensor: Any, leaf: Leaf, device: torch.device, symbols: dict[str, int], later: list[tuple[str, int, str]]
) -> None:
    """Compare a tensor; sizes that cannot be compared yet are for `later`."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise InputMismatch(leaf.name, _brief(tensor), leaf)
    if tensor.dtype is not getattr(torch, leaf.dtype):
        raise InputMismatch(f"the dtype of {leaf.name}", str(tensor.dtype).removeprefix("torch."), leaf.dtype)
    if tensor.device != device:
        raise InputMismatch(f"the device of {leaf.name}", tensor.device, f"{device}, where it was loaded")
    if tensor.shape == leaf.shape and tensor.stride() == leaf.strides:
        return
    shape, strides = _shown(tensor.shape), _shown(tensor.stride())
    if tensor.dim() != len(leaf.shape):
        raise InputMismatch(f"the shape of {leaf.name}", shape, _shown(leaf.shape))
    for dim, (size, wanted) in enumerate(zip(tensor.shape, leaf.shape, strict=True)):
        if isinstance(wanted, str):
            _meet(size, wanted, f"size {dim} of {leaf.name}", symbols, later)
        elif size != wanted:
            raise InputMismatch(f"the shape of {leaf.name}", shape, _shown(leaf.shape))
    if not tensor.numel():
        return
    for size, got, stride in zip(tensor.shape, tensor.stride(), leaf.strides, strict=True):
        if size != 1 and isinstance(stride, str):
            later.append((f"a stride of {leaf.name}", got, stride))
        elif size != 1 and got != stride:
            raise InputMismatch(f"the strides of {leaf.name}", strides, _shown(leaf.strides))


def _meet(size: int, wanted: str, where: str, symbols: dict[str, int], later: list[tuple[str, int, str]]) -> None:
    if not _SYMBOL.fullmatch(wanted) or symbols.setdefault(wanted, size) != size:
        later.append((where, size, wanted))


@cache
def _compiled(size: str) -> Any:
    if not _EXPRESSION.fullmatch(size):
        raise ValueError(f"not a size: {size!r}")
    return compile(size, "<size>", "eval")


def _value(size: str, symbols: dict[str, int]) -> int | None:
    """A size by its symbols; None where one of them is unknown."""
    try:
        value: int = eval(_compiled(size), {"__builtins__": {}}, symbols)
    except (NameError, ZeroDivisionError):
        return None
    return value


def _named(symbol: str, leaves: Sequence[Leaf]) -> str:
    """Where a symbol is seen."""
    found = ((leaf, leaf.shape.index(symbol)) for leaf in leaves if symbol in leaf.shape)
    leaf, dim = next(found, (None, 0))
    if leaf is None:
        return f"size {symbol}"
    return f"size {dim} of {leaf.name}" if leaf.dtype else leaf.name


def _range(low: int, high: int | None) -> str:
    return f"{low} and more" if high is None else f"{low} to {high}"


def _shown(sizes: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _brief(value: Any) -> str:
    return repr(value) if isinstance(value, None | bool | int | float | str) else f"of type {type(value).__name__}"


def builder_of(structure: Any) -> Callable[[Sequence[Any]], Any]:
    """What makes the containers of a structure around its leaves."""
    match structure:
        case ["leaf", int(k)]:
            return lambda leaves: leaves[k]
        case ["constant", value]:
            return lambda leaves: value
        case ["dict", pairs]:
            keyed = [(key, builder_of(part)) for key, part in pairs]
            return lambda leaves: {key: build(leaves) for key, build in keyed}
        case ["list", parts]:
            items = [builder_of(part) for part in parts]
            return lambda leaves: [build(leaves) for build in items]
        case ["tuple", parts]:
            items = [builder_of(part) for part in parts]
            return lambda leaves: tuple(build(leaves) for build in items)
        case ["named", str(name), [*fields], [*parts]]:
            made: Any = namedtuple(name, fields)  # type: ignore[misc]
            items = [builder_of(part) for part in parts]
            return lambda leaves: made(*(build(leaves) for build in items))
    raise ValueError(f"not a structure: {structure!r}")
