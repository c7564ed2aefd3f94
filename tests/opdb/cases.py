"""Which operators, types and samples there are, and a sample as a function of its tensors alone."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

try:
    import expecttest  # noqa: F401
except ImportError:  # torch's test modules want no more of it than a class to inherit from
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db

from ..checking import DEVICE, FLOATS, tensors_of, to_float64

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SKIPS = Path(__file__).parent / "skips.txt"
# Results that are whatever memory held; only type, shape and strides can be compared.
UNSPECIFIED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
# The database reseeds inside its random operators, which a compiled program cannot see; the caller seeds here.
common_methods_invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
_WIDE = {**dict.fromkeys(FLOATS, torch.float64), torch.complex64: torch.complex128}


def name_of(operator: Any) -> str:
    """`softmax.with_dtype`: the operator and its variant."""
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else str(operator.name)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def operators() -> dict[str, Any]:
    return {name_of(operator): operator for operator in op_db}


def pairs() -> list[tuple[str, torch.dtype]]:
    """Every operator with each type it takes."""
    return [(n, d) for n, o in operators().items() for d in DTYPES if d in o.supported_dtypes(DEVICE)]


@functools.cache
def skips() -> dict[tuple[str, str], str]:
    """(operator, type or *) -> reason; an operator may be `device:name`."""
    lines = (line for line in SKIPS.read_text().splitlines() if line.strip() and not line.startswith("#"))
    fields = (line.split(maxsplit=2) for line in lines)
    return {(operator, dtype): reason for operator, dtype, reason in fields}


def skip_reason(name: str, dtype: torch.dtype) -> str | None:
    places = [(f"{prefix}{name}", kind) for prefix in ("", f"{DEVICE}:") for kind in (short(dtype), "*")]
    return next((skips()[place] for place in places if place in skips()), None)


@dataclass(frozen=True)
class Case:
    """One sample: `function(*tensors)` calls the operator and gives the tensors of its result."""

    operator: Any
    tensors: list[torch.Tensor]
    leaves: list[Any]
    layout: pytree.TreeSpec
    differentiable: bool

    def function(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return self._call(self.leaves, tensors)

    def reference(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The same in float64: narrower types among the arguments become wide."""
        leaves = [_WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf for leaf in self.leaves]
        return self._call(leaves, tensors)

    def _call(self, leaves: list[Any], tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, self.layout)
        return tensors_of(self.operator(*args, **kwargs))

    def wide(self) -> list[torch.Tensor]:
        return [to_float64(t) for t in self.tensors]


def samples(name: str, dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """All samples of an operator, the same for the same seed."""
    operator = operators()[name]
    differentiable = bool(
        dtype.is_floating_point and operator.supports_autograd and dtype in operator.supported_backward_dtypes(DEVICE)
    )
    torch.manual_seed(seed)
    random.seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in operator.sample_inputs(DEVICE, dtype, requires_grad=differentiable):
            leaves, layout = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            yield Case(operator, tensors, leaves, layout, differentiable)


def some_samples(name: str, dtype: torch.dtype, seed: int, count: int) -> list[Case]:
    """Samples drawn by the seed; where there is room for two, the first is the database's first: the ordinary use."""
    found = list(itertools.islice(samples(name, dtype, seed), 40))
    rng = random.Random(f"{seed} {name} {dtype}")
    if count == 1 or len(found) <= count:
        return rng.sample(found, min(count, len(found)))
    return found[:1] + rng.sample(found[1:], count - 1)
