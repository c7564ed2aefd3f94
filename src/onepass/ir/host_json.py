"""HostProgram and KernelSource as JSON, both ways: no pickle, nothing executed on reading.

Instructions are [class name, fields...]; trees tag what JSON cannot say: {"t": "ref", ...}.
Reading malformed data raises `MalformedProgram`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, fields
from typing import Any

from .source import (
    Allocate,
    Bind,
    Call,
    Check,
    Constant,
    Copy,
    Free,
    HostProgram,
    Instruction,
    KernelSource,
    Launch,
    Matrix,
    Ref,
    SizeOf,
    TorchValue,
    Tree,
    WriteBack,
)

_INSTRUCTIONS: dict[str, type[Any]] = {
    c.__name__: c for c in (Bind, Check, WriteBack, Allocate, Launch, Call, Copy, Free)
}


class MalformedProgram(ValueError):
    """Stored data that does not describe a host program."""


def host_to_json(host: HostProgram) -> dict[str, Any]:
    """Plain data; the program must be cacheable."""
    if not host.cacheable:
        raise ValueError("a host program with live objects has no JSON form")
    return {
        "inputs": list(host.inputs),
        "instructions": [_encode_instruction(i) for i in host.instructions],
        "outputs": [encode_tree(o) for o in host.outputs],
    }


def host_from_json(data: Any, constants: tuple[Any, ...] = ()) -> HostProgram:
    """The program that `host_to_json` wrote, with the constants of the graph it is to run."""
    try:
        return HostProgram(
            tuple(data["inputs"]),
            tuple(_decode_instruction(i) for i in data["instructions"]),
            tuple(decode_tree(o) for o in data["outputs"]),
            constants,
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedProgram(f"not a host program: {error!r}") from error


def kernel_to_json(source: KernelSource) -> dict[str, Any]:
    data = {f.name: getattr(source, f.name) for f in fields(source)}
    return data | {"matrices": [asdict(m) for m in source.matrices]}


def kernel_from_json(data: Any) -> KernelSource:
    """The kernel that `kernel_to_json` wrote."""
    try:
        matrices = tuple(Matrix(**m) for m in data.get("matrices", ()))
        return KernelSource(
            **{
                **data,
                "signature": tuple(data.get("signature", ())),
                "matrices": matrices,
                "multiples": tuple(data.get("multiples", ())),
            }
        )
    except (TypeError, AttributeError) as error:
        raise MalformedProgram(f"not a kernel: {error!r}") from error


def _encode_instruction(instruction: Instruction) -> list[Any]:
    if isinstance(instruction, Call):
        kwargs = {k: encode_tree(v) for k, v in instruction.kwargs.items()}
        return ["Call", instruction.result, instruction.target, [encode_tree(a) for a in instruction.args], kwargs]
    return [type(instruction).__name__, *astuple(instruction)]


def _decode_instruction(data: list[Any]) -> Instruction:
    name, *values = data
    if name == "Call":
        result, target, args, kwargs = values
        return Call(result, target, tuple(decode_tree(a) for a in args), {k: decode_tree(v) for k, v in kwargs.items()})
    instruction: Instruction = _INSTRUCTIONS[name](*(tuple(v) if isinstance(v, list) else v for v in values))
    return instruction


def encode_tree(tree: Tree) -> Any:
    """A tree as JSON data. JSON writes NaN, infinities and -0.0 as Python reads them back."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case list():
            return {"t": "list", "v": [encode_tree(x) for x in tree]}
        case tuple():
            return {"t": "tuple", "v": [encode_tree(x) for x in tree]}
        case dict():
            return {"t": "dict", "v": [[encode_tree(k), encode_tree(v)] for k, v in tree.items()]}
        case slice():
            return {"t": "slice", "v": [encode_tree(x) for x in (tree.start, tree.stop, tree.step)]}
        case complex():
            return {"t": "complex", "v": [tree.real, tree.imag]}
        case Ref():
            return {"t": "ref", "v": [tree.name, tree.shape, tree.strides, tree.offset]}
        case SizeOf():
            return {"t": "size", "v": tree.expression}
        case TorchValue():
            return {"t": "torch", "v": [tree.kind, tree.name]}
        case Constant():
            return {"t": "constant", "v": tree.number}
        case _ if tree is ...:
            return {"t": "ellipsis", "v": None}
    raise ValueError(f"no JSON form for {type(tree).__name__}")


_DECODERS: dict[str, Callable[[Any], Tree]] = {
    "list": lambda v: [decode_tree(x) for x in v],
    "tuple": lambda v: tuple(decode_tree(x) for x in v),
    "dict": lambda v: {decode_tree(k): decode_tree(x) for k, x in v},
    "slice": lambda v: slice(*(decode_tree(x) for x in v)),
    "complex": lambda v: complex(*v),
    "ref": lambda v: Ref(v[0], _names(v[1]), _names(v[2]), v[3]),
    "size": SizeOf,
    "torch": lambda v: TorchValue(*v),
    "constant": Constant,
    "ellipsis": lambda v: ...,
}


def decode_tree(data: Any) -> Tree:
    """The tree that `encode_tree` wrote."""
    return _DECODERS[data["t"]](data["v"]) if isinstance(data, dict) else data


def _names(value: list[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)
