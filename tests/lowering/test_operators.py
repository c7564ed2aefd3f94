"""Operators of torch's own database that lower completely: right values and strides, and no extern.

`lowered_operators.txt` is the list; an operator that stops lowering fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from .tracing import Traced

NAMES = (Path(__file__).parent / "lowered_operators.txt").read_text().split()
OPERATORS = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def _on_tensors(operator: Any, sample: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The operator as a function of the sample's tensors alone."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, spec)
        return operator.op(first, *args, **kwargs)

    return function, [leaves[k] for k in places]


def _lowers_completely(name: str, dtype: torch.dtype) -> None:
    operator = OPERATORS[name]
    torch.manual_seed(0)
    function, tensors = _on_tensors(operator, next(iter(operator.sample_inputs("cpu", dtype))))
    expected = function(*(x.clone() for x in tensors))
    traced = Traced(function)
    result = traced(*(x.clone() for x in tensors))
    assert [e for program in traced.programs for e in program.externs()] == []
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    for ours, eager in zip(tree_flatten(result)[0], tree_flatten(expected)[0], strict=True):
        if isinstance(eager, torch.Tensor):
            torch.testing.assert_close(ours, eager, equal_nan=True, check_stride=True, **tolerance)


def _types(name: str) -> list[torch.dtype]:
    if name not in OPERATORS:
        pytest.skip("this torch does not have it")
    return [dtype for dtype in DTYPES if dtype in OPERATORS[name].supported_dtypes("cpu")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_lowers_completely(name: str) -> None:
    for dtype in _types(name)[:1]:
        _lowers_completely(name, dtype)


@pytest.mark.rotating
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_other_types_lower_completely(name: str) -> None:
    for dtype in _types(name)[1:]:
        _lowers_completely(name, dtype)
