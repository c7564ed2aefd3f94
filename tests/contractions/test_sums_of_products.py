"""A sum of products of different depths: the short one adds the long one to its result; nothing else is launched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.explain.explanation import Explanation
from tests.checking import near_as_eager
from tests.unbuilt import unbuilt

pytest.importorskip("triton")


def adapted(x: Tensor, frozen: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """A frozen weight and a product of two thin ones that are trained."""
    return F.linear(x, frozen) + F.linear(F.linear(x, down), up) * 2.0


def planned(rows: int, width: int, train: bool) -> Explanation:
    shapes = (rows, width), (width, width), (16, width), (width, 16)
    with FakeTensorMode(), unbuilt(), torch.set_grad_enabled(train):
        inputs = [torch.empty(s, dtype=torch.bfloat16, requires_grad=train and k != 1) for k, s in enumerate(shapes)]
        return onepass.explain(adapted, *inputs, target="sm_90", options={"tune": "off", "cache": False})


@pytest.mark.parametrize(("rows", "width"), [(2048, 1024), (8192, 1024), (2048, 4096)])
def test_the_short_product_adds_the_long_one(rows: int, width: int) -> None:
    (graph,) = planned(rows, width, train=False).graphs
    both, last = graph.kernels
    assert not graph.externs and [o["op"] for o in both.operations] == ["aten.mm.default"] * 2
    assert [o["op"] for o in last.operations] == ["aten.mm.default", "aten.mul.Tensor", "aten.add.Tensor"]


def test_the_gradient_of_the_input_is_added_up_in_the_short_product() -> None:
    _, backward = planned(8192, 1024, train=True).graphs
    sums = [k for k in backward.kernels if any(o["op"] == "aten.add.Tensor" for o in k.operations)]
    assert [o["op"] for k in sums for o in k.operations] == ["aten.mm.default", "aten.add.Tensor"]


@pytest.mark.parametrize("rows", [1, 19, 64])
def test_values(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, 40), (24, 40), (16, 40), (24, 16)
    near_as_eager(adapted, [torch.randn(s, generator=generator).half() * 0.2 for s in shapes])
