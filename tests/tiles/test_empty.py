"""A tensor without elements may have no memory: a kernel that has other work beside it must not read there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onepass

pytest.importorskip("triton")

CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]] = {
    "beside a result that has elements": lambda x, y: [x.sin() + y, y * 2],
    "reduced to a sum of nothing": lambda x, y: [(x * y).sum(0), y * 2],
    "integers divided": lambda x, y: [y.int() // x.int(), y * 2],
    "as an index": lambda x, y: [y[0][x.long()], y * 2],
}


@pytest.mark.parametrize("target", ["triton-interpret", "cpu"])
@pytest.mark.parametrize("stride", [0, 4])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read(name: str, stride: int, target: str) -> None:
    function, options = CASES[name], {"target": target, "strict": True}
    x, y = torch.empty_strided((0, 4), (stride, 1)), torch.ones(1, 4)
    compiled: Any = onepass.jit(function, options=options)
    for ours, eager in zip(compiled(x, y), function(x, y), strict=True):
        torch.testing.assert_close(ours, eager)
