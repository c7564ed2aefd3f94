"""Softmaxes that compare a row with more than its own scores: sinks, a one beside the sum, maxima taken twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from tests.chips import CHIPS
from tests.contractions.judging import FREE, explained, interpreted, judge, products_left
from tests.contractions.spellings import scores
from tests.contractions.test_dynamic_splits import behind, marked

pytest.importorskip("triton")
INFINITY = float("inf")
Spelling = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def masked(q: Tensor, k: Tensor) -> Tensor:
    """Causal scores; the first query sees no key where there are as many of both."""
    s = scores(q, k)
    return s.masked_fill(behind(s) <= 0, -INFINITY)


def joined_column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    s = masked(q, k)
    s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


def joined_first(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Two columns, in front."""
    s = masked(q, k)
    s = torch.cat([sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 2), s], -1)
    return s.softmax(-1)[..., 2:] @ v


def maximum_before(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The largest is taken off before softmax takes it off again."""
    s = masked(q, k)
    s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    s = s - s.max(-1, keepdim=True).values
    return s.softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(v.dtype)[..., :-1] @ v


def by_hand(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    s, sink = masked(q, k), sinks.view(1, -1, 1, 1)
    top = torch.maximum(s.amax(-1, keepdim=True), sink)
    p = torch.exp(s - top)
    return (p / (p.sum(-1, keepdim=True) + torch.exp(sink - top))) @ v


def one_more(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """A one beside the sum: attention may be to nothing."""
    s = masked(q, k)
    top = s.amax(-1, keepdim=True).clamp(min=0)
    p = torch.exp(s - top)
    return (p / (p.sum(-1, keepdim=True) + torch.exp(-top))) @ v


def log_sums(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    s = masked(q, k).to(torch.promote_types(q.dtype, torch.float32))
    whole = torch.logaddexp(torch.logsumexp(s, -1, keepdim=True), sinks.view(1, -1, 1, 1).to(s.dtype))
    return torch.exp(s - whole).to(v.dtype) @ v


def twice(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    s = scores(q, k) + sinks.view(1, -1, 1, 1)
    s = s - s.amax(-1, keepdim=True)
    return s.softmax(-1) @ v


SPELLINGS: tuple[Spelling, ...] = (joined_column, joined_first, maximum_before, by_hand, one_more, log_sums, twice)


def drawn(queries: int, keys: int, dtype: torch.dtype, factor: float = 1.0) -> list[Tensor]:
    torch.manual_seed(queries + keys)
    shapes = ((2, 4, queries, 32), (2, 4, keys, 32), (2, 4, keys, 32), (4,))
    q, *others = (torch.randn(s).to(dtype) for s in shapes)
    return [q * factor, *others]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.rotating) for d in (torch.float16, torch.float32))]
)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_values(spelling: Spelling, dtype: torch.dtype) -> None:
    """Rows that see nothing but the sink, keys that are no multiple of a tile, and one query."""
    for queries, keys in ((70, 70), (3, 150), (1, 300)):
        judge(interpreted(spelling, dynamic=False), spelling, *drawn(queries, keys, dtype))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_large_scores_and_sinks(spelling: Spelling) -> None:
    """The sink above every score, below, and infinitely so."""
    for value in (300.0, -300.0, -INFINITY):
        q, k, v, sinks = drawn(40, 70, torch.float32, factor=60.0)
        if spelling is twice and value == -INFINITY:
            continue  # of every score -inf is taken off -inf
        judge(interpreted(spelling, dynamic=False), spelling, q, k, v, torch.full_like(sinks, value))


@pytest.mark.parametrize("spelling", [joined_column, maximum_before, by_hand, log_sums])
def test_sizes_that_change(spelling: Spelling) -> None:
    run = interpreted(spelling)
    for n in (70, 33, 129, 2):
        q, k, v, sinks = drawn(n, n, torch.float32)
        own = [*marked((q, 2), (k, 2), (v, 2)), sinks]
        judge(lambda *_, own=own: run(*own), spelling, *own)


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_kernel(spelling: Spelling, target: str) -> None:
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(4, 16, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
        e = onepass.explain(spelling, q, k, v, torch.empty(16, dtype=torch.bfloat16), target=target, options=FREE)
    (kernel,) = e.kernels
    assert not products_left(e) and kernel.spilled_bytes == 0
    loops = kernel.source.split("for i")[1:]
    for loop in (one.split("\n    for ")[0].split("\n    sum_0 = ")[0] for one in loops):
        assert loop.count("tl.dot(") == 2, "both products in one sweep"
        assert loop.count("= op_exp") == 2, "one for the weights, and one of a column to carry sums along"


def test_masks_are_in_the_prediction() -> None:
    """Of a causal mask half of the keys count, of a window few."""

    def windowed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        s = scores(q, k) + sinks.view(1, -1, 1, 1)
        return s.masked_fill((behind(s) < 0) | (behind(s) >= 128), -INFINITY).softmax(-1) @ v

    with FakeTensorMode():
        q, k, v = (torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16) for _ in range(3))
        sinks = torch.empty(16, dtype=torch.bfloat16)
        whole, half, few = (explained(f, q, k, v, sinks).kernels[0].predicted_us for f in (twice, by_hand, windowed))
    assert 0.4 < half / whole < 0.6 and few < 0.2 * whole
