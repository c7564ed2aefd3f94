"""HostProgram and KernelSource as JSON, both ways: no pickle, nothing executed on reading.

JSON's own values are themselves; everything else is tagged with its type: {"t": "tuple", "v": [...]}. A dataclass of
`ir/source.py` is tagged with its name and holds its fields. Reading malformed data raises `MalformedProgram`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar, get_args

from .source import HostProgram, Instruction, KernelSource, Matrix, Tree, TreeLeaf

T = TypeVar("T")
_CLASSES: dict[str, type[Any]] = {
    c.__name__: c for c in (HostProgram, KernelSource, Matrix, *get_args(Instruction), *get_args(TreeLeaf))
}


class MalformedProgram(ValueError):
    """Stored data that does not describe a host program."""


def host_to_json(host: HostProgram) -> Any:
    """Plain data; the program must be cacheable."""
    if not host.cacheable:
        raise ValueError("a host program with live objects has no JSON form")
    return encode_tree(replace(host, constants=()))


def host_from_json(data: Any, constants: tuple[Any, ...] = ()) -> HostProgram:
    """The program that `host_to_json` wrote, with the constants of the graph it is to run."""
    return replace(read_tree(data, HostProgram), constants=constants)


def read_tree(data: Any, kind: type[T]) -> T:
    """The host program or kernel that `encode_tree` wrote."""
    try:
        found = decode_tree(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedProgram(f"not a {kind.__name__}: {error!r}") from error
    if not isinstance(found, kind):
        raise MalformedProgram(f"not a {kind.__name__}: {type(found).__name__}")
    return found


def encode_tree(tree: Tree) -> Any:
    """A tree as JSON data. JSON writes NaN, infinities and -0.0 as Python reads them back."""
    values: Any
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case list() | tuple():
            values = tree
        case dict():
            values = tree.items()
        case slice():
            values = (tree.start, tree.stop, tree.step)
        case complex():
            values = (tree.real, tree.imag)
        case _ if tree is ...:
            values = ()
        case _ if type(tree).__name__ in _CLASSES:
            values = [getattr(tree, f.name) for f in fields(tree)]
        case _:
            raise ValueError(f"no JSON form for {type(tree).__name__}")
    return {"t": type(tree).__name__, "v": [encode_tree(v) for v in values]}


_MAKERS: dict[str, Callable[..., Tree]] = {
    **_CLASSES,
    "list": lambda *values: list(values),
    "tuple": lambda *values: values,
    "dict": lambda *items: dict(items),
    "slice": slice,
    "complex": complex,
    "ellipsis": lambda: ...,
}


def decode_tree(data: Any) -> Tree:
    """The tree that `encode_tree` wrote."""
    return _MAKERS[data["t"]](*map(decode_tree, data["v"])) if isinstance(data, dict) else data
