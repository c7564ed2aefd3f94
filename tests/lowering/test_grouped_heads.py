"""Attention of repeated heads is the library's attention of groups of heads: nothing is copied, values are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.checking import near_as_eager
from tests.unbuilt import unbuilt
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

import onepass
from onepass.lowering.grouped_heads import group_heads

Function = Callable[[Tensor], Tensor]


def by_expand(x: Tensor) -> Tensor:
    batch, heads, rows, width = x.shape
    return x[:, :, None].expand(batch, heads, 3, rows, width).reshape(batch, heads * 3, rows, width)


def by_flatten(x: Tensor) -> Tensor:
    return x.unsqueeze(-3).broadcast_to(2, 2, 3, 19, 16).contiguous().flatten(1, 2)


REPEATED: dict[str, Function] = {
    "expand": by_expand,
    "flatten": by_flatten,
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "repeat_interleave by names": lambda x: torch.repeat_interleave(x, repeats=3, dim=-3).clone(),
}


def changed(x: Tensor) -> Tensor:
    y = x.repeat_interleave(3, 1)
    x.mul_(2.0)
    return y


NEAR_MISSES: dict[str, Function] = {
    "the heads after each other": lambda x: x.repeat(1, 3, 1, 1),
    "as many as there are": lambda x: x.repeat_interleave(torch.tensor([4, 2], device=x.device), 1, output_size=6),
    "positions before heads": lambda x: x.mT.reshape(2, 2, 16, 19).repeat_interleave(3, 1).mT.flip(-1),
    "changed after it was repeated": changed,
}


def attention(repeated: Function, values: Function | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k * 1.0, v * 1.0
        return F.scaled_dot_product_attention(q, repeated(k), (values or repeated)(v), is_causal=True)

    return attend


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 19, 16, generator=generator).half() for n in (6, 2, 2)]


def grouped(function: Callable[..., Tensor]) -> bool:
    """Whether attention is called with groups of heads."""
    found: list[bool] = []

    def backend(graph: GraphModule, _: object) -> GraphModule:
        group_heads(graph)
        (call,) = graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        found.append(bool(call.kwargs.get("enable_gqa")))
        return graph

    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(function, backend=backend, fullgraph=True)(*operands()), function(*operands())
    )
    return found[0]


@pytest.mark.parametrize("name", REPEATED)
def test_heads_are_not_repeated(name: str) -> None:
    assert grouped(attention(REPEATED[name]))
    near_as_eager(attention(REPEATED[name]), operands())


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_heads_are_as_they_were(name: str) -> None:
    assert not grouped(attention(NEAR_MISSES[name]))


def test_keys_alone_are_no_group() -> None:
    repeated, other = REPEATED["repeat_interleave"], NEAR_MISSES["the heads after each other"]
    assert not grouped(attention(repeated, other)) and not grouped(attention(other, repeated))


def test_nothing_is_copied() -> None:
    """The library is given heads as they are and sums their gradients."""
    with FakeTensorMode(), unbuilt():
        inputs = [torch.empty(2, n, 19, 16, dtype=torch.bfloat16, requires_grad=True) for n in (6, 2, 2)]
        function = attention(REPEATED["expand"])
        report = onepass.explain(function, *inputs, target="sm_90", options={"tune": "off", "cache": False})
    assert {"attention" in e.op or e.op == "getitem" for e in report.externs} == {True}
    sizes = {o["op"] for k in report.kernels for o in k.operations}
    assert sizes <= {"aten.mul.Tensor"}


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = ((x * 2.0).repeat_interleave(3, 1) for x in (k, v))
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def test_plain_math_reads_heads_as_they_are() -> None:
    """Kernels read a head for its group in both directions; neither forward nor backward keeps a copy."""
    near_as_eager(plain, operands())
    with FakeTensorMode(), unbuilt():
        inputs = [torch.empty(8, n, 1024, 16, dtype=torch.bfloat16, requires_grad=True) for n in (12, 4, 4)]
        report = onepass.explain(plain, *inputs, target="sm_90", options={"tune": "off", "cache": False})
    statistics, heads = 2 * 4 * 8 * 12 * 1024, 2 * 8 * 4 * 1024 * 16
    assert not report.externs and report.saved_bytes <= statistics + 2 * heads
