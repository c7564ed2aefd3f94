"""Attention from plain math: one kernel whatever the spelling, right values whatever the numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from onepass.backend import record_compilations
from tests.contractions.judging import explained, interpreted, judge, products_left
from tests.contractions.spellings import NEAR_MISSES, SPELLINGS, Spelling, distance, half, heads, lower, scores

pytest.importorskip("triton")
INFINITY, NAN = float("inf"), float("nan")
plain, causal = (SPELLINGS[name].function for name in ("scale_after_divided", "causal_by_masked_fill"))


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_kernel(name: str) -> None:
    spelling = SPELLINGS[name]
    e = explained(spelling.function, *spelling.arguments())
    kernels = 2 if name == "relative_position_in_buckets" else 1  # the bias is computed once for the whole batch
    assert [len(g.kernels) for g in e.graphs] == [kernels] and not products_left(e), [d.reason for d in e.rejected]


@pytest.mark.parametrize("name", SPELLINGS)
def test_values(name: str) -> None:
    spelling = SPELLINGS[name]
    judge(interpreted(spelling.function), spelling.function, *spelling.arguments())


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    spelling = NEAR_MISSES[name]
    judge(interpreted(spelling.function), spelling.function, *spelling.arguments())


def test_inside_a_layer() -> None:
    """Projections go to the library; what lies between them is one kernel."""

    def layer(x: Tensor, inward: Tensor, outward: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (x @ inward).view(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return causal(q, k, v).transpose(1, 2).reshape(b, n, c) @ outward

    arguments = torch.randn(2, 37, 64).half(), torch.randn(64, 192).half() / 8, torch.randn(64, 64).half() / 8
    e = explained(layer, *arguments)
    assert len(e.kernels) == 1 and len(products_left(e)) == 2, [d.reason for d in e.rejected]
    judge(interpreted(layer), layer, *arguments)


def in_front(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def in_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in x.flatten(2).view(*x.shape[:2], -1, x.shape[-1]).chunk(3, 2))
    return q, k, v


@pytest.mark.parametrize("unpacked", [in_front, in_parts])
def test_two_results_of_packed_inputs(unpacked: Callable[..., tuple[Tensor, ...]]) -> None:
    """One kernel without a copy: queries, keys and values of one buffer are told apart by where they start in it."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = unpacked(x)
        s = (q @ k.mT * 0.1).float()
        total = torch.logsumexp(s, -1, keepdim=True)
        return torch.exp(s - total).to(v.dtype) @ v, total.squeeze(-1)

    e = explained(function, torch.randn(2, 512, 3, 4, 64).half())
    assert len(e.kernels) == 1 and not products_left(e), [d.reason for d in e.rejected]
    judge(interpreted(function), function, torch.randn(2, 37, 3, 2, 16).half())


def test_places_in_a_table_that_are_inside_it_are_not_checked() -> None:
    """Relative positions are positions: what is read there lies at a constant distance for each step."""
    table = SPELLINGS["relative_position_from_a_table"]
    (kernel,) = explained(table.function, *table.arguments()).kernels
    assert "assert" not in kernel.source and "int64" not in kernel.source

    def outside(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        s = scores(q, k)
        return (s + table[:, distance(s)]).softmax(-1) @ v  # from the end where it is negative

    q, k, v, relative = table.arguments()
    (kernel,) = explained(outside, q, k, v, relative).kernels
    assert "assert" in kernel.source
    judge(interpreted(outside), outside, q, k, v, relative)


# --- masks that leave rows or blocks empty ---


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scores(q, k).masked_fill(mask, -INFINITY).softmax(-1) @ v


def masked_by_the_minimum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    s = scores(q, k)
    return s.masked_fill(mask, torch.finfo(s.dtype).min).softmax(-1) @ v


@pytest.mark.parametrize("function", [masked, masked_by_the_minimum])
def test_fully_masked_rows(function: Callable[..., Tensor]) -> None:
    """-inf everywhere gives NaN; the smallest number everywhere gives the mean of the values."""
    mask = torch.rand(70, 70) < 0.3
    mask[3] = mask[60:] = True
    judge(interpreted(function), function, *half(), mask)


def chosen(p: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen, p, 0.0)


def zero_filled(p: Tensor, seen: Tensor) -> Tensor:
    return p.masked_fill(~seen, 0.0)


def chosen_by_row(p: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen.any(-1, keepdim=True), p, 0.0)


def chosen_too_often(p: Tensor, seen: Tensor) -> Tensor:
    """Of a row without any score, too."""
    return torch.where(seen | (torch.arange(seen.shape[-1], device=seen.device) < 3), p, 0.0)


def after(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, weights: Callable[..., Tensor]) -> Tensor:
    p = scores(q, k).masked_fill(~seen, -INFINITY).softmax(-1)
    return weights(p, seen) @ v


@pytest.mark.rotating
@pytest.mark.parametrize("weights", [chosen, zero_filled, chosen_by_row, chosen_too_often])
@pytest.mark.parametrize(("rows", "keys"), [(70, 70), (7, 600)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_fully_masked_rows(weights: Callable[..., Tensor], rows: int, keys: int, dtype: torch.dtype) -> None:
    """Zero where they are chosen to be, NaN where they are not: whatever the sum is that divides them."""

    def loaded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return after(q, k, v, seen, weights)

    def by_position(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return after(q, k, v, distance(q @ k.mT) >= 5, weights)

    tensors = heads(1, 2, rows, 16, dtype=dtype, keys=keys)()
    seen = torch.rand(rows, keys) < 0.7
    seen[3] = False
    judge(interpreted(loaded), loaded, *tensors, seen)
    judge(interpreted(by_position), by_position, *tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", [chosen, zero_filled])
def test_choosing_weights_takes_no_sweep_more(weights: Callable[..., Tensor], dtype: torch.dtype) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return after(q, k, v, lower(q @ k.mT), weights)

    with FakeTensorMode():
        q, k, v = heads(4, 16, 512, 64, dtype=dtype)()
        (kernel,) = explained(function, q, k, v).kernels
        (bare,) = explained(causal, q, k, v).kernels
    assert kernel.source.count("for i") == bare.source.count("for i") == 2  # without the mask, and with it


def with_a_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = scores(q, k)
    s, sink = s.masked_fill(distance(s) < 5, -INFINITY).float(), sink.float()
    top = torch.maximum(s.amax(-1, keepdim=True), sink)
    e = torch.exp(s - top)
    return (e / (e.sum(-1, keepdim=True) + torch.exp(sink - top))).to(v.dtype) @ v


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "keys"), [(150, 150), (3, 600)])
def test_a_sink_beside_the_maximum(rows: int, keys: int, dtype: torch.dtype) -> None:
    """One sweep: what the maximum is compared with is the same for all terms. Rows that see nothing are zero."""
    tensors = heads(1, 2, rows, 16, dtype=dtype, keys=keys)()
    for size in (1.0, -40.0, -INFINITY):
        judge(interpreted(with_a_sink), with_a_sink, *tensors, (torch.randn(2, 1, 1) + size).to(dtype))
    if dtype is not torch.float32:
        with FakeTensorMode():
            wide = heads(4, 16, 512, 64, dtype=dtype)()
            (kernel,) = explained(with_a_sink, *wide, torch.randn(16, 1, 1).to(dtype)).kernels
        assert kernel.source.count("for i") == 2


@pytest.mark.parametrize("worst", [-INFINITY, torch.finfo(torch.float16).min])
def test_fully_masked_rows_by_position(worst: float) -> None:
    """The bound of a sweep must not skip blocks where masked scores still count."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        return s.masked_fill(distance(s) < 5, worst).softmax(-1) @ v

    judge(interpreted(function), function, *heads(1, 1, 150, 16)())


def test_a_row_masked_by_the_minimum_sees_every_key() -> None:
    """Keys beyond the causal line are as good as those before it where all scores are the smallest number."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k).float()
        worst = torch.finfo(torch.float32).min
        hidden = torch.where(torch.arange(s.shape[-1], device=s.device) < 100, worst, s)
        return torch.where(distance(s) >= 0, hidden, worst).softmax(-1).to(v.dtype) @ v

    judge(interpreted(function), function, *heads(1, 1, 150, 16)())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["multiplied", "loaded"])
def test_added_minimum_of_a_wide_type(dtype: torch.dtype, form: str) -> None:
    """The lowest number added to all scores of a row: weights are equal, not NaN. Left-padded batches are like that."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        s = scores(q, k)
        if form == "multiplied":
            mask = (1.0 - mask.to(q.dtype)) * torch.finfo(dtype).min
        return (s + mask).softmax(-1) @ v

    keep = lower(torch.empty(70, 70)) & (torch.arange(70) >= 10)
    worst = torch.finfo(dtype).min
    mask = keep.long() if form == "multiplied" else torch.where(keep, 0.0, worst).to(dtype)
    judge(interpreted(function), function, *heads(1, 1, 70, 16, dtype=dtype)(), mask)


def test_first_blocks_masked_by_position() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        return s.masked_fill(distance(s) > 0, -INFINITY).softmax(-1) @ v

    judge(interpreted(function), function, *heads(1, 1, 200, 16)())


def test_first_blocks_masked_by_loaded_values() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return scores(q, k).masked_fill(~keep, -INFINITY).softmax(-1) @ v

    judge(interpreted(function), function, *heads(1, 1, 200, 16)(), torch.arange(200) > 150)


def test_dilated_causal_mask() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        apart = distance(scores(q, k))
        return torch.where((apart >= 0) & (apart % 3 == 0), scores(q, k), -INFINITY).softmax(-1) @ v

    judge(interpreted(function), function, *heads(1, 1, 150, 16)())


def test_causal_by_blocks() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block = torch.arange(k.shape[-2], device=k.device) // 50
        return torch.where(block[:, None] >= block, scores(q, k), -INFINITY).softmax(-1) @ v

    judge(interpreted(function), function, *heads(1, 1, 150, 16)())


@pytest.mark.parametrize("shape", [(70, 70), (1, 1, 1, 70), (1, 2, 1, 70), (1, 1, 70, 1), (70,)])
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_masks_broadcast(shape: tuple[int, ...], kind: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        s = scores(q, k)
        return (s.masked_fill(mask, -INFINITY) if mask.dtype is torch.bool else s + mask).softmax(-1) @ v

    mask = torch.rand(shape) < 0.3 if kind == "bool" else torch.randn(shape).half()
    judge(interpreted(function), function, *heads(1, 2, 70, 16)(), mask)


# --- odd numbers ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_scores(dtype: torch.dtype) -> None:
    """Scores of 1e4 and beyond: one key has all the weight; float16 overflows, and eager is NaN there."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (scores(q, k) * 1e4).softmax(-1) @ v

    judge(interpreted(function), function, *heads(1, 2, 70, 16, dtype=dtype)())


@pytest.mark.parametrize("odd", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("which", range(3))
def test_odd_numbers_in_inputs(odd: float, which: int) -> None:
    arguments = half()
    arguments[which][0, 0, 33, 3] = odd
    judge(interpreted(plain), plain, *arguments)


@pytest.mark.parametrize("which", range(2))
def test_nan_behind_a_causal_mask(which: int) -> None:
    arguments = heads(1, 1, 150, 16)()
    arguments[which][0, 0, 140, 3] = NAN
    judge(interpreted(causal), causal, *arguments)


@pytest.mark.xfail(strict=True, reason="blocks beyond the causal line are skipped: 0 * NaN is never formed there")
def test_nan_in_masked_values() -> None:
    """A weight of zero times NaN is NaN in eager, for every row."""
    arguments = heads(1, 1, 300, 64)()
    arguments[2][0, 0, 290, 3] = NAN
    judge(interpreted(causal), causal, *arguments)


@pytest.mark.parametrize("name", ["by_log_softmax", "by_logsumexp", "exponentials_over_their_sum"])
@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_scores_far_from_zero(name: str, shift: float) -> None:
    """What scales a sum leaves it without making the exponentials overflow."""
    spelled = SPELLINGS[name].function

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return spelled(torch.cat([q, torch.ones_like(q)], -1), torch.cat([k, torch.full_like(k, shift / 4)], -1), v)

    judge(interpreted(function), function, *heads(1, 1, 37, 16)())


# --- sizes ---


@pytest.mark.parametrize(("n", "keys"), [(1, 1), (1, 70), (37, 1), (2, 2), (17, 3), (0, 5), (5, 0)])
def test_short_rows(n: int, keys: int) -> None:
    judge(interpreted(plain), plain, *heads(1, 2, n, 16, keys=keys)())


@pytest.mark.parametrize("outer", [(0, 2), (2, 0), (3,), ()])
def test_batches(outer: tuple[int, ...]) -> None:
    judge(interpreted(causal), causal, *heads(*outer, 37, 16)())


@pytest.mark.parametrize("size", [1, 3, 16, 40, 320])
def test_head_sizes(size: int) -> None:
    judge(interpreted(plain), plain, *heads(1, 1, 37, size)())


@pytest.mark.parametrize("n", [37, 64, 200])
@pytest.mark.parametrize(("size", "values"), [(16, 32), (32, 16), (64, 16), (64, 32), (128, 64)])
def test_keys_and_values_of_other_sizes(n: int, size: int, values: int) -> None:
    q, k, _ = heads(1, 1, n, size)()
    judge(interpreted(plain), plain, q, k, torch.randn(1, 1, n, values).half())


def test_double_precision_stays_with_the_library() -> None:
    judge(interpreted(plain), plain, *heads(1, 2, 37, 16, dtype=torch.float64)())


DYNAMIC = ("causal_by_masked_fill", "alibi", "sliding_window", "grouped_heads_by_repeat", "mask_of_keys", "packed")


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_lengths(name: str) -> None:
    """One kernel, compiled once, for any number of positions."""
    spelling = SPELLINGS[name]
    run = interpreted(spelling.function)
    with record_compilations() as records:
        for n in (70, 37, 129):
            judge(lambda *_, n=n: run(*_with_length(spelling, n)), spelling.function, *_with_length(spelling, n))
    assert [(len(r.kernels), len(r.externs)) for r in records] == [(1, 0)]


def _with_length(spelling: Spelling, n: int) -> list[Tensor]:
    """Arguments with n positions where there were 37, 70 or 130, marked as a size that changes."""
    torch.manual_seed(n)
    found = []
    for x in spelling.arguments():
        places = [k for k, size in enumerate(x.shape) if size in (37, 70, 130)]
        shape = [n if k in places else size for k, size in enumerate(x.shape)]
        found.append(torch.rand(shape) < 0.7 if x.dtype is torch.bool else torch.randn(shape).to(x.dtype))
        for k in places:
            torch._dynamo.mark_dynamic(found[-1], k)
    return found


def test_all_sizes_dynamic() -> None:
    """Also the head size is not known: right values, whoever computes the products."""
    run = interpreted(causal, dynamic=True)
    for n in (70, 37):
        judge(run, causal, *heads(1, 2, n, 16)())


# --- dropout, gradients ---


def test_dropout_of_the_weights() -> None:
    """With the identity as values the kernel gives its weights: a fifth is gone, the others are scaled."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(scores(q, k).softmax(-1), 0.2) @ v

    q, k, _ = heads(1, 1, 70, 16)()
    values = torch.eye(70).half().expand(1, 1, 70, 70)
    e = explained(function, q, k, values)
    assert len(e.kernels) == 1 and not products_left(e)
    weights = interpreted(function)(q, k, values)
    alive = weights != 0
    assert 0.17 < 1 - alive.float().mean().item() < 0.23
    expected = torch.where(alive, plain(q, k, values) / 0.8, 0)
    assert torch.allclose(weights, expected, rtol=4e-3, atol=1e-4)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_training(rate: float) -> None:
    """Forward and backward: the scores may be wanted by backward, values and gradients are right."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        weights = s.masked_fill(~lower(s), -INFINITY).softmax(-1)
        return (F.dropout(weights, rate) if rate else weights) @ v

    q, k, v = (x.requires_grad_() for x in heads(1, 1, 19, 16, dtype=torch.float32)())
    out = interpreted(function)(q, k, v)
    ours = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(g.isfinite().all()) for g in ours)
    if not rate:
        expected = function(q, k, v)
        theirs = torch.autograd.grad(expected.sum(), (q, k, v))
        for mine, other in zip((out, *ours), (expected, *theirs), strict=True):
            assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)
