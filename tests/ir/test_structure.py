"""Programs as text without names: equal layers have one text, other programs have another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tuning.planned import traced
from torch import Tensor

from onepass.ir.program import Program
from onepass.ir.structure import Unwritable, structure
from onepass.lowering.graph import lower_graph

X, W = (8, 6), (6, 6)
Arguments = tuple[Tensor, ...]


def lowered(function: Callable[..., Any], *arguments: Tensor) -> Program:
    return lower_graph(traced(function, *arguments), precision="fused")


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(F.linear(x, w, b)) * b + x, (6,))


def inputs() -> Arguments:
    return torch.randn(X), torch.randn(W), torch.randn(6)


def test_names_do_not_count() -> None:
    """Among them the order of commuting operands, which depends on names: other parameters come before these."""
    plain = lowered(layer, *inputs())
    texts = {structure(plain)}
    for more in range(1, 9):
        unused = [torch.randn(3) for _ in range(more)]
        program = lowered(lambda *a: layer(*a[-3:]), *unused, *inputs())
        assert repr(program) != repr(plain)
        texts.add(structure(program))
    assert len(texts) == 1


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "operation": (lambda x, w, b: F.layer_norm(F.silu(F.linear(x, w, b)) * b + x, (6,)), inputs),
    "number": (lambda x, w, b: F.layer_norm(F.gelu(F.linear(x, w, b)) * b + x, (6,), eps=1e-3), inputs),
    "operand": (lambda x, w, b: F.layer_norm(F.gelu(F.linear(x, w, b)) * x + x, (6,)), inputs),
    "the same twice": (lambda x, w, b: layer(x, x[:6], b), inputs),
    "size": (layer, lambda: (torch.randn(9, 6), torch.randn(W), torch.randn(6))),
    "strides": (layer, lambda: (torch.randn(X), torch.randn(W).t(), torch.randn(6))),
    "type": (layer, lambda: tuple(t.half() for t in inputs())),
    "result": (lambda x, w, b: (layer(x, w, b), F.linear(x, w, b)), inputs),
}


@pytest.mark.parametrize("name", CHANGES)
def test_everything_else_does(name: str) -> None:
    function, arguments = CHANGES[name]
    assert structure(lowered(function, *arguments())) != structure(lowered(layer, *inputs()))


def test_indices_that_are_read_count() -> None:
    table, first, second = torch.randn(9, 6), torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    one = structure(lowered(lambda t, i, j: t[i] + i[:, None], table, first, second))
    assert one != structure(lowered(lambda t, i, j: t[i] + j[:, None], table, first, second))
    assert one == structure(lowered(lambda j, t, i: t[i] + i[:, None], second, table, first))


def test_what_cannot_be_written() -> None:
    """A result that is no tensor."""
    with pytest.raises(Unwritable):
        structure(lowered(lambda x: torch.sort(x)[0] + 1, torch.randn(4)))


def test_scans() -> None:
    """The axis, the operation and the direction of a scan are part of what is computed."""
    functions = (
        lambda x: x.cumsum(0),
        lambda x: x.cumsum(1),
        lambda x: x.cumprod(1),
        lambda x: x.flip(1).cumsum(1).flip(1),
    )
    assert len({structure(lowered(f, torch.randn(X))) for f in functions}) == len(functions)
