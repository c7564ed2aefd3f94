"""Triton kernels on CPU tensors, without a GPU: every program runs through Triton's interpreter, one after another.

For values, not for speed. The generated text runs unchanged; the prelude is loaded a second time as plain Python,
and what Triton takes from the GPU's math library comes from torch. Reductions combine halves with the prelude's
own functions, so those are what is tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from ..ir.source import KernelSource
from .prelude import PRELUDE_FOLDER, load_module
from .triton_private import Interpreter


def interpreted(source: KernelSource) -> Callable[[int], tuple[Callable[..., int], Callable[..., None]]]:
    """As a GPU's: of a device, `function(*addresses, *sizes, programs, stream)` that runs the programs in order."""
    interpreter, prelude = _interpreter(), _prelude()
    namespace: dict[str, Any] = {k: v for k, v in vars(prelude).items() if k.startswith("op_")}
    namespace |= {"tl": interpreter.language, "libdevice": _Library(interpreter)}
    definition = source.text[source.text.index("def " + source.entry) :]
    exec(compile(definition, f"<{source.name}>", "exec"), namespace)
    kernel = namespace[source.entry]
    types, kinds = source.signature[: source.pointers], source.signature[source.pointers :]

    def launch(*arguments: int) -> int:
        addresses, rest = arguments[: source.pointers], arguments[source.pointers :]
        sizes, programs = rest[: source.symbols], rest[source.symbols]
        pointers = [interpreter.pointer(a, t) for a, t in zip(addresses, types, strict=True)]
        numbers = [interpreter.number(n, t) for n, t in zip(sizes, kinds, strict=True)]
        interpreter.run(kernel, (*pointers, *numbers), programs, _fold, _scan)
        return 0

    return lambda _device: (launch, _never)


def _never(*_arguments: int) -> None:
    raise AssertionError("the interpreter returns no error")


@functools.cache
def _interpreter() -> Interpreter:
    return Interpreter()


@functools.cache
def _prelude() -> ModuleType:
    """The prelude's functions undecorated, with torch's mathematics."""
    prelude = _plain(PRELUDE_FOLDER / "triton_prelude.py")
    prelude.__dict__["hardware"] = _plain(PRELUDE_FOLDER / "triton_hardware.py")
    return prelude


def _plain(path: Path) -> ModuleType:
    module = load_module(path, f"onepass_{path.stem}_plain", JIT=lambda function: function)
    module.__dict__["libdevice"] = _Library(_interpreter())
    return module


def _fold(values: Any, axis: int, combine: Callable[..., Any], keep_dims: bool = False) -> Any:
    """tl.reduce: halves are combined until one lane is left, as a whole tile at a time."""
    interpreter = _interpreter()
    several = isinstance(values, tuple)
    state = [(interpreter.data(v), v.dtype) for v in (values if several else (values,))]
    while state[0][0].shape[axis] > 1:
        halves = zip(*(np.split(x, 2, axis) for x, _ in state), strict=True)
        joined = combine(*(interpreter.tensor(x, d) for h in halves for x, (_, d) in zip(h, state, strict=True)))
        parts = joined if isinstance(joined, tuple) else (joined,)
        state = [(interpreter.data(p), d) for p, (_, d) in zip(parts, state, strict=True)]
    arrays = [(x if keep_dims else x.squeeze(axis), d) for x, d in state]
    results = tuple(interpreter.tensor(x, d, single=not x.ndim) for x, d in arrays)
    return results if several else results[0]


def _scan(values: Any, axis: int, combine: Callable[..., Any], reverse: bool = False) -> Any:
    """tl.associative_scan: each element with the one before it, then with the one two before it, and so on."""
    interpreter = _interpreter()
    several = isinstance(values, tuple)
    state = [
        (np.flip(d, axis) if reverse else d, v.dtype)
        for v in (values if several else (values,))
        for d in [interpreter.data(v)]
    ]
    lanes, back = state[0][0].shape[axis], 1
    while back < lanes:
        before = [interpreter.tensor(np.roll(x, back, axis), d) for x, d in state]
        joined = combine(*before, *(interpreter.tensor(x, d) for x, d in state))
        parts = joined if isinstance(joined, tuple) else (joined,)
        first = (np.arange(lanes) < back).reshape([-1 if k == axis else 1 for k in range(state[0][0].ndim)])
        state = [(np.where(first, x, interpreter.data(p)), d) for p, (x, d) in zip(parts, state, strict=True)]
        back *= 2
    results = tuple(interpreter.tensor(np.flip(x, axis).copy() if reverse else x, d) for x, d in state)
    return results if several else results[0]


class _Library:
    """The GPU's math library by torch's names for the same functions."""

    _NAMES: ClassVar[dict[str, Callable[..., torch.Tensor]]] = {
        "pow": torch.pow, "nearbyint": torch.round, "erfc": torch.special.erfc, "erfinv": torch.special.erfinv,
        "lgamma": torch.lgamma, "fast_dividef": torch.div,
    }  # fmt: skip

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = self._NAMES.get(name) or getattr(torch, name)

        def call(*arguments: Any) -> Any:
            typed = [a for a in arguments if not isinstance(a, float)]
            tensors = [torch.tensor(a if isinstance(a, float) else self._interpreter.data(a)) for a in arguments]
            single = not any(a.type.is_block() for a in typed)
            return self._interpreter.tensor(function(*tensors).numpy(), typed[0].dtype, single)

        return call
