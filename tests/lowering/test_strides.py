"""Traced element-wise results have eager's strides, for operands permuted, expanded and of size 1."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_function

from onepass.lowering import decomposition_table

from ..checking import DEVICE, strides_that_matter

SHAPES = [(4, 5), (3, 4, 5), (2, 3, 4, 5), (2, 1, 3, 4), (1, 1, 1, 2), (2, 3, 1, 1), (3, 0, 2)]
OPERATIONS = [
    torch.lt,
    torch.add,
    torch.mul,
    torch.atan2,
    torch.maximum,
    torch.hypot,
    torch.logaddexp,
    torch.logaddexp2,
    torch.xlogy,
    torch.special.xlog1py,
    lambda a, b: (a * a - b).square().neg(),
    lambda a, b: torch.clamp(a, b - 1, b),
    lambda a, b: (a > b).contiguous(),
    lambda a, b: torch.maximum(a, b[0]),
    lambda a, b: (a + b).reshape(-1),
]


def operand(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of some order of dimensions, a few of them expanded."""
    order = rng.sample(range(len(shape)), len(shape))
    own = [1 if rng.random() < 0.25 else shape[dim] for dim in order]
    numbers = torch.rand(own, generator=torch.Generator().manual_seed(rng.randrange(1000)))
    return numbers.to(dtype).permute([order.index(dim) for dim in range(len(shape))]).expand(shape)


def promised(function: Any, tensors: list[torch.Tensor], table: Any) -> torch.Tensor:
    """The result by the metadata of the graph; the graph itself gives the same values."""
    results: list[torch.Tensor] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        (output,) = graph.graph.output_node().args[0]
        results.append(output.meta["val"])
        return graph.forward

    values = aot_function(function, fw_compiler=keep, decompositions=table)(*tensors)
    torch.testing.assert_close(values, function(*tensors))
    return results[0]


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_strides_are_eagers(number: int) -> None:
    function, rng = OPERATIONS[number], random.Random(number)
    for _ in range(12):
        shape, dtype = rng.choice(SHAPES), rng.choice([torch.float32, torch.bfloat16])
        tensors = [operand(rng, shape, dtype) for _ in range(2)]
        found = promised(function, tensors, decomposition_table())
        assert strides_that_matter(found) == strides_that_matter(function(*tensors)), [t.stride() for t in tensors]


def test_torch_promises_other_strides() -> None:
    """Else there is nothing to repair, and the repair can go."""
    a, b = torch.rand(3, 1, 5).half().expand(3, 17, 5), torch.rand(17, 3, 5).half().transpose(0, 1)
    assert promised(torch.lt, [a, b], None).stride() == (85, 5, 1) != torch.lt(a, b).stride()


def test_a_contiguous_graph_is_left_alone() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = aot_function(lambda a, b: (a.t() + b.t()) * a.t(), fw_compiler=keep, decompositions=decomposition_table())
    run(torch.rand(3, 4), torch.rand(3, 4))
    assert [n.target for n in graphs[0].graph.nodes].count(torch.ops.aten.permute.default) <= 3


INDICES = [
    lambda x: x[torch.arange(6).view(3, 2).t() % 3],
    lambda x: x[:, torch.zeros(2, 3, dtype=torch.int64).t()],
    lambda x: x[[[0], [2]], :, torch.arange(4).view(2, 2).t() % 2],
    lambda x: x[:, [0, 0], torch.arange(4).view(2, 2).t() % 2].sin().reshape(-1),
    lambda x: x[..., [0]],
]


@pytest.mark.parametrize("number", range(len(INDICES)))
def test_strides_of_an_index_are_eagers(number: int) -> None:
    """By the strides of what is indexed, then by those of the indices."""
    function, rng = INDICES[number], random.Random(number)
    for _ in range(12):
        x = operand(rng, rng.choice([(3, 1, 4, 5), (3, 4, 5, 1), (3, 1, 2, 1)]), torch.float32)
        found = promised(function, [x], decomposition_table())
        assert strides_that_matter(found) == strides_that_matter(function(x)), x.stride()


def test_torch_promises_other_strides_of_an_index() -> None:
    """Else there is nothing to repair, and the repair can go."""
    x = torch.rand(64, 16, 1, 1).transpose(2, 0)
    assert promised(INDICES[1], [x], None).stride() != INDICES[1](x).stride()


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's order")
@pytest.mark.parametrize("shift", [1, -2, 0, 9])
def test_strides_of_a_roll_are_eagers(shift: int) -> None:
    """Those of two slices that are joined, in their memory format."""
    for x in (torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.rand(4, 3, 5).transpose(0, 1)):
        for dim in range(x.ndim):
            for roll in (lambda x, d=dim: x.roll(shift, d).sin(), lambda x, d=dim: x.roll((shift, 1), (d, 0))):
                found = promised(roll, [x], decomposition_table())
                assert strides_that_matter(found) == strides_that_matter(roll(x)), (x.stride(), dim)


def test_torch_promises_other_strides_of_a_roll() -> None:
    """Else there is nothing to repair, and the repair can go."""
    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert promised(lambda x: x.roll(1, 2), [x], None).stride() != x.stride()
