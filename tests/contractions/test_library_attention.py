"""Attention that is nothing else may be the library's: which programs are, when it pays, and what comes out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import onepass
from onepass.backend import record_compilations
from onepass.ir.target import find_target, targets
from onepass.planner.library_attention import Offer
from tests.contractions.judging import FREE, INTERPRETED, explained, interpreted, judge
from tests.contractions.spellings import NEAR_MISSES, SPELLINGS, distance, heads, lower, scores
from tests.unbuilt import unbuilt

pytest.importorskip("triton")
CALL = "aten.scaled_dot_product_attention.default"
BF16 = torch.bfloat16
LARGE = (4, 16, 4096, 128)
plain, causal = (SPELLINGS[name].function for name in ("scale_after_divided", "causal_by_masked_fill"))

# What is softmax(scale * q k^T) v, causal or not, in 16 bits. All others have something else in them.
ALIKE = [
    "scale_after_divided",
    "scale_after_multiplied",
    "scale_before_on_queries",
    "scale_before_on_both",
    "no_scale_at_all",
    "exponentials_over_their_sum",
    "by_logsumexp",
    "in_float32_and_back",
    "upcast_before_the_softmax",
    "causal_by_masked_fill",
    "causal_by_where_of_positions",
    "causal_by_an_added_triangle",
    "positions_before_heads",
    "packed",
    "packed_in_front",
    "grouped_heads_by_expand",
    "grouped_heads_by_repeat",
    "grouped_heads_by_view",
    "one_head_of_keys",
    "by_einsum",
    "by_einsum_heads_inside",
    "without_batch",
    "transposed_scores",
    "transposed_result",
    "size_80",
    "size_96",
    "cross_attention",
    "gated_and_added",
]
# Attention several times over, or of matrices that another kernel stores.
WITH_MORE = ["attention_of_attention", "queries_in_chunks", "rotary_in_front"]


def planned(
    function: Callable[..., Any], *shapes: tuple[int, ...], target: str = "sm_90", **options: Any
) -> onepass.Explanation:
    """The plan for tensors without memory."""
    with FakeTensorMode(), torch.no_grad(), unbuilt():
        arguments = [torch.empty(shape, dtype=BF16) for shape in shapes]
        return onepass.explain(function, *arguments, target=target, options={**FREE, **options})


def calls(explanation: onepass.Explanation) -> int:
    return [e.op for e in explanation.externs].count(CALL)


def reasons(explanation: onepass.Explanation) -> list[str]:
    """Why attention is the library's, or why it is not."""
    return [d.reason for d in explanation.decisions if d.kind == "library"]


@pytest.fixture
def willing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is attention is the library's, however small; calls run on this machine."""
    for name in ("triton-interpret", "sm_90"):
        monkeypatch.setitem(targets(), name, replace(find_target(name), attention=True))
    monkeypatch.setattr(Offer, "with_rest", lambda *_: 0.0)


# --- when it pays ---


@pytest.mark.parametrize(("function", "library", "own"), [(plain, 0.81, 1.024), (causal, 0.472, 0.567)])
def test_large_heads_go_to_the_library(function: Callable[..., Tensor], library: float, own: float) -> None:
    """The times are those that one H200 showed."""
    e = planned(function, LARGE, LARGE, LARGE)
    assert calls(e) == 1 and not e.kernels
    reason = reasons(e)[-1]
    first, second = (float(x) for x in re.findall(r"([\d.]+) us", reason)[:2])
    assert first / 1e3 == pytest.approx(library, rel=0.05) and own / 1.4 < second / 1e3 < own * 1.4
    assert "by the library's attention" in reason and "in one kernel" in reason
    text = str(e)
    assert "scaled_dot_product_attention" in text and reason in text


@pytest.mark.parametrize(
    "hidden",
    [
        lambda n, place: torch.triu(torch.ones(n, n, device=place), 1).bool(),
        lambda n, place: torch.tril(torch.ones(n, n, dtype=torch.int64, device=place)) < 1,
        lambda n, place: (lambda i: i[:, None] < i)(torch.arange(n, dtype=torch.int32, device=place)),
    ],
)
def test_spellings_of_a_triangle(hidden: Callable[..., Tensor]) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).masked_fill(hidden(4096, q.device), -math.inf).softmax(-1) @ v

    e = planned(masked, LARGE, LARGE, LARGE)
    assert calls(e) == 1 and not e.kernels


@pytest.mark.parametrize(("shape", "keys"), [((1, 8, 4096, 128), 4096), ((64, 16, 1024, 72), 1000)])
def test_few_tiles_and_odd_sizes_go_to_the_library(shape: tuple[int, ...], keys: int) -> None:
    other = (*shape[:2], keys, shape[3])
    e = planned(plain, shape, other, other)
    assert calls(e) == 1 and not e.kernels, reasons(e)


@pytest.mark.parametrize(
    ("function", "shape", "why"),
    [
        (causal, (4, 16, 1024, 64), "predicted"),
        (plain, (1, 8, 256, 128), "predicted"),
        (causal, (4, 16, 2048, 256), "heads of 256"),
    ],
)
def test_the_others_stay_kernels(function: Callable[..., Tensor], shape: tuple[int, ...], why: str) -> None:
    e = planned(function, shape, shape, shape)
    assert not e.externs and len(e.kernels) == 1 and why in reasons(e)[0]


def test_one_query_stays_a_kernel() -> None:
    e = planned(plain, (8, 32, 1, 128), (8, 32, 4096, 128), (8, 32, 4096, 128))
    assert calls(e) == 0 and e.kernels


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_chips_of_which_nothing_is_known(target: str) -> None:
    e = planned(plain, LARGE, LARGE, LARGE, target=target)
    assert calls(e) == 0 and e.kernels and not reasons(e)


@pytest.mark.parametrize("option", [{"fuse": False}, {"precision": "eager"}])
def test_options_are_kept(option: dict[str, Any]) -> None:
    """One kernel for each operation, or eager's roundings: neither is what the library does."""
    assert calls(planned(plain, LARGE, LARGE, LARGE, **option)) == 0


def test_point_wise_work_after_it_is_one_kernel_more() -> None:
    gated = SPELLINGS["gated_and_added"].function
    e = planned(gated, LARGE, LARGE, LARGE, LARGE)
    assert calls(e) == 1 and len(e.kernels) == 1


@pytest.mark.parametrize("width", [64, 2048])
def test_what_follows_is_not_computed_from_what_the_library_keeps_to_itself(width: int) -> None:
    """The next product reads the call's result, whatever else it computes again."""

    def layer(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.relu(plain(q, k, v).transpose(1, 2).reshape(4, 4096, 2048)) @ w

    assert calls(planned(layer, LARGE, LARGE, LARGE, (2048, width))) == 1


@pytest.mark.parametrize("scale", [100.0, 500.0, 5000.0])
def test_large_scales(scale: float) -> None:
    e = planned(lambda q, k, v: torch.softmax(q @ k.mT * scale, -1) @ v, LARGE, LARGE, LARGE)
    assert calls(e) <= 1 and e.decisions


def test_inside_a_layer() -> None:
    """Projections before and after it; the result has the layout that the next one reads, without a copy."""

    def layer(x: Tensor, inward: Tensor, outward: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (x @ inward).view(b, n, 3, 16, c // 16).permute(2, 0, 3, 1, 4).unbind(0)
        return causal(q, k, v).transpose(1, 2).reshape(b, n, c) @ outward

    e = planned(layer, (4, 4096, 2048), (2048, 3 * 2048), (2048, 2048))
    assert sorted(x.op for x in e.externs) == ["aten.mm.default", "aten.mm.default", CALL] and not e.kernels
    first = float(re.findall(r"([\d.]+) us", reasons(e)[0])[0])
    assert first == pytest.approx(484, abs=3)  # 32 us less than with a copy


def test_the_library_is_left_alone() -> None:
    e = planned(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), LARGE, LARGE, LARGE)
    assert not e.kernels and not reasons(e)


def test_sizes_known_at_run_time_stay_a_kernel(willing: None) -> None:
    arguments = heads(1, 2, 70, 16)()
    for x in arguments:
        torch._dynamo.mark_dynamic(x, 2)
    run = interpreted(plain)
    with record_compilations() as records:
        judge(lambda *_: run(*arguments), plain, *arguments)
    assert [(len(r.kernels), len(r.externs)) for r in records] == [(1, 0)]
    assert "known at run time" in next(d.reason for d in records[0].decisions if d.kind == "library")


# --- what is attention ---


@pytest.mark.parametrize("name", [*SPELLINGS, *NEAR_MISSES])
def test_what_is_recognised(willing: None, name: str) -> None:
    """Decided on what is computed: all ways to write it, and nothing else."""
    spelling = {**SPELLINGS, **NEAR_MISSES}[name]
    e = explained(spelling.function, *spelling.arguments())
    assert (calls(e) > 0) == (name in [*ALIKE, *WITH_MORE]), reasons(e)


def _masked(s: Tensor, hidden: Tensor) -> Tensor:
    return s.masked_fill(hidden, -math.inf)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    return scores(q, k).softmax(-1)


def _one_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).float()
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1)).half() @ v


ALMOST: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "one position further": lambda q, k, v: _masked(scores(q, k), distance(scores(q, k)) < -1).softmax(-1) @ v,
    "keys before only": lambda q, k, v: _masked(scores(q, k), distance(scores(q, k)) > 0).softmax(-1) @ v,
    "a window": lambda q, k, v: _masked(scores(q, k), distance(scores(q, k)).abs() > 40).softmax(-1) @ v,
    "a finite mask": lambda q, k, v: scores(q, k).masked_fill(~lower(scores(q, k)), -1e4).softmax(-1) @ v,
    "scores of zero are no scores": lambda q, k, v: _masked(scores(q, k), scores(q, k) == 0).softmax(-1) @ v,
    "a limit": lambda q, k, v: scores(q, k).clamp(max=1.0).softmax(-1) @ v,
    "no maximum": lambda q, k, v: (e := scores(q, k).float().exp()).half() @ v / e.sum(-1, keepdim=True).half(),
    "one more in the sum": _one_more,
    "a negative scale": lambda q, k, v: (-scores(q, k)).softmax(-1) @ v,
    "twice the weights": lambda q, k, v: (2 * _weights(q, k)) @ v,
    "dropout": lambda q, k, v: F.dropout(_weights(q, k), 0.5) @ v,
    "values in reverse": lambda q, k, v: _weights(q, k) @ v.flip(-1),
    "the sum of queries": lambda q, k, v: _weights(q + 1, k) @ v,
    "weights in float32": lambda q, k, v: (scores(q, k).float().softmax(-1) @ v.float()).half(),
    "the result in float32": lambda q, k, v: _weights(q, k).float() @ v.float(),
}


@pytest.mark.parametrize("name", ALMOST)
def test_almost(willing: None, name: str) -> None:
    e = explained(ALMOST[name], *heads(1, 2, 70, 32)())
    assert calls(e) == 0, reasons(e)


# --- what comes out ---


def right(function: Callable[..., Any], *arguments: Tensor, times: int = 1) -> None:
    """The library computes it, and the values are right."""
    with record_compilations() as records:
        judge(interpreted(function), function, *arguments)
    assert [[e.op for e in r.externs].count(CALL) for r in records] == [times], [
        d.reason for r in records for d in r.decisions
    ]


@pytest.mark.parametrize("name", ALIKE)
def test_values(willing: None, name: str) -> None:
    right(SPELLINGS[name].function, *SPELLINGS[name].arguments())


@pytest.mark.parametrize("size", [8, 64, 96, 128])
@pytest.mark.parametrize("n", [1, 2, 37, 130])
@pytest.mark.parametrize("function", [plain, causal])
def test_sizes(willing: None, function: Callable[..., Tensor], n: int, size: int) -> None:
    if n == 1:  # no softmax at all
        judge(interpreted(function), function, *heads(1, 3, n, size)())
    else:
        right(function, *heads(1, 3, n, size)())


def _packed(qkv: Tensor, of: Callable[..., Tensor] = causal) -> Tensor:
    b, n, c = qkv.shape
    q, k, v = qkv.view(b, n, 3, 4, c // 12).permute(2, 0, 3, 1, 4).unbind(0)
    return of(q, k, v).transpose(1, 2).reshape(b, n, c // 3)


def _grouped(q: Tensor, k: Tensor, v: Tensor, times: int) -> Tensor:
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    return causal(q, k, v)


def test_packed_and_causal(willing: None) -> None:
    right(_packed, torch.randn(3, 37, 12 * 16).to(BF16))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kept", [1, 2])
def test_grouped_and_causal(willing: None, batch: int, kept: int) -> None:
    make = [torch.randn(batch, h, 37, 16).half() for h in (2 * kept, kept, kept)]
    right(lambda q, k, v: _grouped(q, k, v, 2), *make)


def test_grouped_with_positions_before_heads(willing: None) -> None:
    """Batches, heads and groups are three axes; heads count on through their groups."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _grouped(q, k, v, 3).transpose(1, 2).contiguous()

    right(function, *(torch.randn(2, 37, h, 16).half() for h in (6, 2, 2)))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3), (2, 1, 0, 3)])
def test_layouts_of_inputs(willing: None, order: tuple[int, ...]) -> None:
    shape = (2, 3, 37, 16)
    inside = [order.index(k) for k in range(4)]
    arguments = [torch.randn([shape[k] for k in order]).half().permute(inside) for _ in range(3)]
    right(causal, *arguments)


def test_strides_are_kept(willing: None) -> None:
    """The result lies in memory as eager's does."""
    q, k, v = (torch.randn(2, 37, 3, 16).half().transpose(1, 2) for _ in range(3))
    assert interpreted(plain)(q, k, v).stride() == plain(q, k, v).stride()


def test_pointers_between_vectors(willing: None) -> None:
    q, k, v = (torch.randn(2 * 37 * 16 + 1).half()[1:].view(1, 2, 37, 16) for _ in range(3))
    right(plain, q, k, v)


def test_rows_between_vectors_are_refused(willing: None) -> None:
    q, k, v = (torch.randn(1, 2, 37, 20).half()[..., :16] for _ in range(3))
    with record_compilations() as records:
        judge(interpreted(plain), plain, q, k, v)
    assert [len(r.externs) for r in records] == [0]
    assert "multiples of 8" in next(d.reason for d in records[0].decisions if d.kind == "library")


def test_the_result_is_read_by_another_kernel(willing: None) -> None:
    right(lambda q, k, v: (plain(q, k, v).transpose(1, 2).float() * 2).sum(-1), *heads(2, 3, 37, 16)())


def test_attention_of_attention(willing: None) -> None:
    right(lambda q, k, v: causal(plain(q, k, v), k, v), *heads(2, 2, 37, 16)(), times=2)


def test_training(willing: None) -> None:
    """Whatever backward keeps: values and gradients are right."""
    arguments = [x.requires_grad_() for x in heads(1, 2, 37, 16)()]
    compiled = torch.compile(causal, backend="onepass", options=INTERPRETED)
    out, expected = compiled(*arguments), causal(*arguments)
    weight = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), arguments) for x in (out, expected))
    for mine, other in zip((out, *ours), (expected, *theirs), strict=True):
        assert torch.allclose(mine, other, rtol=1e-2, atol=2e-3)


def test_from_the_cache(willing: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored graph calls the library again."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    arguments = heads(1, 2, 37, 16)()
    for expected in ("miss", "hit"):
        torch._dynamo.reset()
        compiled = torch.compile(causal, backend="onepass", options={**INTERPRETED, "cache": True})
        with record_compilations() as records:
            judge(compiled, causal, *arguments)
        assert [(r.cache, len(r.externs), len(r.kernels)) for r in records] == [(expected, 1, 0)]
