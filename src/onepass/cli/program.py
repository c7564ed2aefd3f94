"""FILE.py:NAME on the command line -> something to call and its arguments.

Arguments are, in this order: what `--input` gave; `NAME_inputs()`; `example_inputs()`; none, where every
parameter has a default. The two functions give a tuple or list (positional), a dict (by name) or one value.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import UnusableProgram, nearest

SHORT = {
    "f64": "float64", "f32": "float32", "f16": "float16", "fp64": "float64", "fp32": "float32", "fp16": "float16",
    "bf16": "bfloat16", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8",
    "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """A callable and the arguments it is to be explained with."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_program(text: str, given: tuple[Any, ...] | None = None) -> LoadedProgram:
    """Load the file, find the function and its arguments."""
    file, separator, name = text.rpartition(":")
    if not separator or not file or not name:
        raise UnusableProgram(f"{text!r} is not FILE.py:NAME", "Name the function after a colon: model.py:forward")
    module = _load_file(Path(file))
    function = _find(module, name, file)
    args, kwargs = (given, {}) if given is not None else _example_arguments(module, name)
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:
        pass  # a builtin without a signature
    except TypeError as error:
        raise UnusableProgram(f"{name} cannot be called with these arguments ({error})", _how_to(name)) from error
    return LoadedProgram(function, args, kwargs)


def random_inputs(specifications: Sequence[str], train: bool) -> tuple[torch.Tensor, ...]:
    """Tensors from texts such as "4096x4096" and "8x128:bfloat16", the same each time."""
    generator = torch.Generator().manual_seed(0)
    return tuple(_random_input(text, train, generator) for text in specifications)


def _random_input(text: str, train: bool, generator: torch.Generator) -> torch.Tensor:
    shape_text, _, dtype_text = text.partition(":")
    dtype = getattr(torch, SHORT.get(dtype_text, dtype_text or "float32"), None)
    try:
        shape = [int(size) for size in shape_text.split("x")] if shape_text else []
    except ValueError:
        shape = [-1]
    if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape):
        raise UnusableProgram(f"--input {text!r} is not SHAPE[:DTYPE]", "Write it like 4096x4096 or 8x128:bf16")
    if dtype.is_floating_point or dtype.is_complex:
        tensor = torch.randn(shape, generator=generator).to(dtype)
        return tensor.requires_grad_(train)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@contextmanager
def in_evaluation(function: Callable[..., Any], wanted: bool) -> Iterator[None]:
    """A module as it is evaluated, if that is wanted; afterwards as it was before."""
    modules = list(function.modules()) if wanted and isinstance(function, torch.nn.Module) else []
    before = [m.training for m in modules]
    for m in modules:
        m.training = False
    try:
        yield
    finally:
        for m, training in zip(modules, before, strict=True):
            m.training = training


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnusableProgram(f"there is no file {path}", "Give a path relative to the current folder")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise UnusableProgram(f"{path} is not a Python file", "Its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # As `python FILE.py` would: its folder first, and findable by name (dataclasses and dynamo look there).
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, name: str, file: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if inspect.isclass(found) and issubclass(found, torch.nn.Module):
        try:
            found = found()
        except TypeError as error:
            problem = f"{name} cannot be made without arguments ({error})"
            raise UnusableProgram(problem, f"Make one in {file} and name that instead") from error
    if callable(found):
        function: Callable[..., Any] = found
        return function
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    hint = nearest(name, own).lstrip("; .").capitalize()
    raise UnusableProgram(
        f"{file} has no function {name}", f"{hint} Functions there: {', '.join(own) or 'none'}".lstrip()
    )


def _example_arguments(module: ModuleType, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for source in (f"{name.replace('.', '_')}_inputs", "example_inputs"):
        make = getattr(module, source, None)
        if callable(make):
            match make():
                case dict() as kwargs:
                    return (), kwargs
                case tuple() | list() as args:
                    return tuple(args), {}
                case value:
                    return (value,), {}
    return (), {}


def _how_to(name: str) -> str:
    return f"Add a function {name.replace('.', '_')}_inputs() to the file that returns them, or give --input 1024x1024"
