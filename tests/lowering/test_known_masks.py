"""Masks that are known when a graph is compiled: attention loses them, or gets `is_causal`; values are eager's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

import onepass
from onepass.lowering.known_masks import simplify_masks

from ..checking import DEVICE
from ..unbuilt import unbuilt

INTERPRETED = {"target": "triton-interpret", "cache": False}
ROWS = 19


def operands(rows: int = ROWS, keys: int = ROWS, grad: bool = True) -> list[Tensor]:
    made = torch.Generator(DEVICE).manual_seed(0)
    sizes = (2, 4, rows, 16), (2, 4, keys, 16), (2, 4, keys, 16)
    return [torch.randn(*s, generator=made, device=DEVICE).requires_grad_(grad) for s in sizes]


def found(mask_of: Callable[[Tensor], Tensor], keys: int = ROWS, dynamic: bool = False, grad: bool = True) -> str:
    """What is left of the mask of a call: "mask", "causal" or "nothing"; the values must not change."""
    left: list[str] = []

    def backend(graph: GraphModule, _: object) -> GraphModule:
        simplify_masks(graph)
        (call,) = graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        masked = isinstance(call.kwargs.get("attn_mask"), Node) or len(call.args) > 3
        left.append("mask" if masked else "causal" if call.kwargs.get("is_causal") else "nothing")
        return graph

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(torch.arange(k.shape[2], device=q.device) + 0))

    inputs = operands(keys=keys, grad=grad)
    torch._dynamo.reset()
    run = torch.compile(attend, backend=backend, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(run(*inputs), attend(*inputs))
    return left[0]


def packed(p: Tensor) -> Tensor:
    """Documents by positions that start again, as in packed batches; here there is one."""
    positions = p[None].expand(2, -1)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    document = (steps != 1).cumsum(-1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return (p[:, None] >= p) & same


CAUSAL = {
    "positions": lambda p: p[None, None, None, :] <= p[None, None, :, None],
    "expanded": lambda p: (p <= p[:, None]).expand(2, 4, -1, -1),
    "tril": lambda p: torch.ones(ROWS, ROWS, dtype=torch.bool, device=p.device).tril(),
    "added": lambda p: torch.full((ROWS, ROWS), -math.inf, device=p.device).triu(1),
    "least": lambda p: torch.zeros(ROWS, ROWS, device=p.device).masked_fill(p > p[:, None], torch.finfo().min),
    "packed": packed,
    "not later": lambda p: ~(p > p[:, None]),
    "a wide window": lambda p: (p <= p[:, None]) & (p > p[:, None] - ROWS),
}
STAYING = {
    "one more": lambda p: p <= p[:, None] + 1,
    "without the diagonal but the first": lambda p: (p < p[:, None]) | (p == 0),
    "window": lambda p: (p <= p[:, None]) & (p > p[:, None] - ROWS + 1),
    "a bias": lambda p: torch.full((ROWS, ROWS), -2.0, device=p.device).triu(1),
    "anti-causal": lambda p: p >= p[:, None],
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_a_flag(name: str) -> None:
    assert found(CAUSAL[name]) == "causal"


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("grad", [False, True])
def test_values_and_gradients_are_eagers(name: str, grad: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL[name](torch.arange(ROWS, device=q.device)))

    inputs = operands(grad=grad)
    run = torch.compile(attend, backend="onepass", options=INTERPRETED)
    results = run(*inputs), attend(*inputs)
    torch.testing.assert_close(*results)
    if grad:
        gradients = [torch.autograd.grad(r.square().sum(), inputs) for r in results]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STAYING)
def test_other_masks_stay(name: str) -> None:
    assert found(STAYING[name]) == "mask"


def test_rows_and_columns_must_be_the_same_positions() -> None:
    assert found(lambda p: torch.ones(ROWS, 23, dtype=torch.bool, device=p.device).tril(), keys=23) == "mask"
    assert found(lambda p: torch.ones(ROWS, 23, dtype=torch.bool, device=p.device), keys=23) == "nothing"


def test_random_numbers_and_what_is_given_are_not_known() -> None:
    given = torch.ones(ROWS, ROWS, dtype=torch.bool, device=DEVICE)
    assert found(lambda p: torch.rand(ROWS, ROWS, device=p.device) >= 0) == "mask"
    assert found(lambda p: given) == "mask"
    assert found(lambda p: given & (p >= 0)) == "mask"


def test_sizes_known_at_run_time_need_a_proof() -> None:
    assert found(CAUSAL["positions"], dynamic=True) == "mask"


def test_without_backward_the_mask_is_one_of_positions() -> None:
    """A kernel of ours reads bounds from it: nothing of how it was made is left."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = packed(torch.arange(q.shape[2], device=q.device))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with torch.device("meta"):
        inputs = [torch.empty(2, 4, 2048, 64, dtype=torch.bfloat16) for _ in range(3)]
    with torch.no_grad(), unbuilt():
        (graph,) = onepass.explain(attend, *inputs, target="sm_90", options={"tune": "off"}).graphs
    (kernel,) = graph.kernels
    assert not graph.externs and kernel.bytes_read == 3 * 2 * 2 * 4 * 2048 * 64


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_that_is_true_everywhere_is_dropped(dynamic: bool) -> None:
    assert found(lambda p: (p[:, None] >= 0).expand(2, 4, -1, ROWS), dynamic=dynamic) == "nothing"


def overwritten(positions: Tensor) -> Tensor:
    positions -= 5
    return positions[None, None, :, None] >= 0


def shifted(positions: Tensor) -> Tensor:
    same = positions
    positions <<= 63
    return same[None, None, :, None] >= 0


def doubled(positions: Tensor) -> Tensor:
    """Until odd ones leave 64 bits."""
    for _ in range(63):
        positions = positions + positions
    return positions[None, None, :, None] >= 0


@pytest.mark.parametrize(
    "mask_of",
    [
        shifted,
        doubled,
        lambda p: p[None, None, :, None] >= 1,
        lambda p: (p - 3)[None, None, :, None] >= 0,
        lambda p: (p[None, None, :, None] >= 0) & (p[None, None, None, :] >= 2),
        overwritten,
    ],
)
def test_a_mask_that_hides_something_stays(mask_of: Callable[[Tensor], Tensor]) -> None:
    assert found(lambda p: mask_of(p).expand(2, 4, ROWS, ROWS)) == "mask"
