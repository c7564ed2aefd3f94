"""Backward of attention from plain math: right gradients by kernels that compute weights again, however it is spelled.

The kernels run in an interpreter; a plan for a chip that is not here says what would be stored there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.autograd import recomputed
from onepass.backend import record_compilations
from onepass.explain.explanation import Explanation
from onepass.ir.record import CompileRecord
from tests.checking import DEVICE
from tests.contractions import test_sinks
from tests.contractions.judging import INTERPRETED
from tests.contractions.spellings import SPELLINGS, Spelling, also, distance, half, heads, scores

pytest.importorskip("triton")
# Near misses of the library's attention are spellings here.
KERNELS = [
    "scale_after_divided", "scale_after_multiplied", "scale_before_on_queries", "scale_before_on_both",
    "no_scale_at_all", "exponentials_over_their_sum", "division_after_the_values", "by_logsumexp", "by_log_softmax",
    "in_float32_and_back", "upcast_before_the_softmax", "exponentials_without_maximum", "causal_by_masked_fill",
    "causal_by_where_of_positions", "causal_by_an_added_triangle", "causal_by_finfo_min",
    "causal_by_a_stored_triangle", "mask_of_keys", "mask_of_keys_as_an_added_minimum", "sliding_window",
    "document_mask", "prefix_mask", "lengths", "soft_cap", "alibi_with_computed_slopes",
    "scale_by_the_logarithm_of_the_position", "sink_in_the_sum", "with_the_logarithm_of_the_sum",
    "positions_before_heads", "packed", "packed_in_front", "grouped_heads_by_expand", "grouped_heads_by_repeat",
    "grouped_heads_by_view", "one_head_of_keys", "by_einsum", "by_einsum_heads_inside", "without_batch",
    "values_of_another_size", "cross_attention", "gated_and_added",
]  # fmt: skip
# A bias, slopes, a scale or a column beside the scores, whose gradient needs the scores' gradient as a whole.
WHOLE = [
    "scale_for_each_head", "mask_of_floats", "alibi", "relative_position_from_a_table",
    "relative_position_in_buckets", "bias_for_each_head", "by_baddbmm",
]  # fmt: skip
COLUMNS = [test_sinks.joined_column, test_sinks.joined_first, test_sinks.maximum_before]
Result = list[Tensor | None]


def gradients(function: Callable[..., object], inputs: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> Result:
    """Results, and the gradients of all floating inputs."""
    own = [x.detach().clone() for x in inputs]
    own = [x.to(dtype) if dtype is not None and x.is_floating_point() else x for x in own]
    differentiated = [x.requires_grad_() for x in own if x.is_floating_point()]
    found = function(*own)
    results = [*found] if isinstance(found, tuple) else [found]
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, device=DEVICE) for x in results]
    sum((x * y.to(x.dtype)).sum() for x, y in zip(results, weights, strict=True)).backward()
    return [*(x.detach() for x in results), *(x.grad for x in differentiated)]


def compiled(function: Callable[..., object], **options: object) -> Callable[..., object]:
    torch._dynamo.reset()
    return torch.compile(function, backend="onepass", options={**INTERPRETED, **options})


def judged(spelling: Spelling, slack: float = 2.0) -> list[CompileRecord]:
    """The records of both directions; every gradient is as near to float64's as eager's, or nearly."""
    torch.manual_seed(0)
    inputs = spelling.arguments()
    exact, eager = gradients(spelling.function, inputs, torch.float64), gradients(spelling.function, inputs)
    with record_compilations() as records:
        ours = gradients(compiled(spelling.function), inputs)
    for number, (x, y, z) in enumerate(zip(exact, eager, ours, strict=True)):
        assert (y is None) == (z is None)
        if x is None or y is None or z is None:
            continue
        assert torch.equal(z.isnan(), y.isnan()), number
        off, allowed = ((v.double() - x).nan_to_num(0.0).abs().max().item() for v in (z, y))
        assert off <= slack * allowed + 2e-6 * x.nan_to_num(0.0).abs().max().item(), number
    return records


def planned(function: Callable[..., object], *shapes: tuple[int, ...], target: str = "sm_90") -> Explanation:
    """What a chip would run, forward and backward."""
    inputs = [torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True) for s in shapes]
    return onepass.explain(function, *inputs, target=target, options={"strict": True})


def spelled(name: str) -> Spelling:
    return SPELLINGS[name]


with_sinks = also(half, lambda: torch.randn(2).half())


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.masked_fill(distance(s) < 0, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_by_kernels(name: str) -> None:
    """No product is left to the library, and no weights are kept."""
    spelling = spelled(name)
    forward, backward = judged(spelling)
    assert not forward.externs and not backward.externs, [d.reason for d in backward.decisions]
    found = [d for d in backward.decisions if d.kind == "recompute" and "computed again in backward" in d.reason]
    assert [d.accepted for d in found] == [True] and "us stored" in found[0].reason
    again = [d for d in backward.decisions if d.kind == "again"]
    assert [d.accepted for d in again] == [True] and "kernels that each compute" in again[0].reason


@pytest.mark.parametrize("spelling", [*map(spelled, WHOLE), *(Spelling(f, with_sinks) for f in COLUMNS)])
def test_gradients_that_need_all_scores(spelling: Spelling) -> None:
    """Forward keeps nothing; backward computes scores once more, and their statistics from what it then stores."""
    forward, backward = judged(spelling)
    assert not forward.externs and forward.saved_bytes == 0
    (decision,) = (d for d in backward.decisions if d.kind == "recompute" and "us stored" in d.reason)
    assert decision.accepted and "needs values of its size there" in decision.reason


@pytest.mark.rotating
def test_weights_of_rounded_scores_sum_to_one() -> None:
    """Large scores differ by their rounding: a maximum and a sum of others would not belong to them."""
    spelling = spelled("scale_for_each_head")
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, scale = spelling.arguments()
        inputs = (4 * q, 4 * k, v, scale)
        exact, eager = gradients(spelling.function, inputs, torch.float64), gradients(spelling.function, inputs)
        for x, y, z in zip(exact, eager, gradients(compiled(spelling.function), inputs), strict=True):
            assert x is not None and y is not None and z is not None
            if x.dim() == 4:  # the norm of all errors
                assert (z.double() - x).norm() <= 1.2 * (y.double() - x).norm()


def test_softmax_over_the_other_dimension_is_stored() -> None:
    """The sums of its gradient are over columns: they are needed before the scores' gradient."""
    _, backward = judged(spelled("transposed_scores"))
    (decision,) = (d for d in backward.decisions if "values of its size" in d.reason)
    assert not decision.accepted


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k).softmax(-1), 0.3) @ v


def test_dropout_is_the_same_in_both_directions() -> None:
    """What multiplies the values has the mask, and so have all gradients; only its seed is kept."""
    torch.manual_seed(0)
    q, k, v = half()
    run = compiled(dropped)
    columns = []
    for unit in torch.eye(96)[:70].half().split(32, -1):  # so that the result is a part of the weights
        torch.manual_seed(3)
        columns.append(run(q, k, unit.expand(1, 2, 70, 32).contiguous()))
    mask = torch.cat(columns, -1)[..., :70] != 0
    assert 0.6 < mask.double().mean() < 0.8
    torch.manual_seed(3)
    with record_compilations() as records:
        ours = gradients(compiled(dropped), (q, k, v))
    forward, backward = records
    assert not backward.externs and forward.saved_bytes <= 2 * 4 * 2 * 70 + 8

    def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (scores(q, k).softmax(-1) * mask / 0.7) @ v

    exact, eager = gradients(kept, (q, k, v), torch.float64), gradients(kept, (q, k, v))
    for x, y, z in zip(exact, eager, ours, strict=True):
        assert x is not None and y is not None and z is not None
        assert (z.double() - x).abs().max() <= 2 * (y.double() - x).abs().max()


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scores(q, k).masked_fill(mask, -math.inf).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k) + torch.where(mask, -math.inf, 0.0).to(q.dtype)).softmax(-1) @ v


@pytest.mark.parametrize("function", [masked, added])
def test_fully_masked_rows_are_nan_where_they_are_in_eager(function: Callable[..., Tensor]) -> None:
    rows = torch.zeros(70, 70, dtype=torch.bool)
    rows[[0, 33, 69]] = True
    spelling = Spelling(function, also(half, lambda: rows | (torch.rand(70, 70) < 0.2)))
    _, backward = judged(spelling)
    assert not backward.externs


def rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return causal(turn(q), turn(k), v)


def test_positions_rotated_before() -> None:
    tables = [lambda: torch.rand(70, 16).half()] * 2
    forward, backward = judged(Spelling(rotated, also(half, *tables)))
    assert not backward.externs and forward.saved_bytes < 3 * 2 * 70 * 32 * 2


@pytest.mark.parametrize("sizes", [(1, 2, 33, 16), (2, 1, 129, 64), (1, 1, 200, 24)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_odd_lengths(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    _, backward = judged(Spelling(causal, heads(*sizes, dtype=dtype)))
    assert not backward.externs


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.tanh(scores(q, k) / 30) * 30
    far = (distance(s) < 0) | (distance(s) >= 512)
    return s.masked_fill(far, -math.inf).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(4, 1) for x in (k, v))
    return causal(q, k, v)


LONG = (2, 8, 2048, 64)


@pytest.mark.parametrize(
    ("function", "shapes", "kernels"),
    [
        (causal, (LONG, LONG, LONG), 3),
        (capped, (LONG, LONG, LONG), 3),
        (grouped, (LONG, (2, 2, 2048, 64), (2, 2, 2048, 64)), 4),  # sums over groups of keys and values share a launch
    ],
)
def test_nothing_quadratic_is_stored(
    function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], kernels: int
) -> None:
    """Of rows a maximum and a sum are kept; keys' and values' gradients share a sweep over queries."""
    e = planned(function, *shapes)
    assert not e.externs and len(e.kernels) - len(e.graphs[0].kernels) == kernels
    assert e.saved_bytes <= 2 * 4 * math.prod(LONG[:-1])
    largest = max(k.bytes_read + k.bytes_written for k in e.kernels)
    assert largest < math.prod(LONG[:-2]) * LONG[-2] ** 2 and not any(k.spilled_bytes for k in e.kernels)


def test_masks_bound_the_sweeps() -> None:
    """The terms of all three sums are zero where a position is masked, whatever statistic was read."""

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).softmax(-1) @ v

    def times(function: Callable[..., Tensor]) -> list[float]:
        (backward,) = (g for g in planned(function, LONG, LONG, LONG).graphs if g.direction == "backward")
        return sorted(k.predicted_us for k in backward.kernels)[-2:]

    for bounded, whole in zip(times(causal), times(plain), strict=True):
        assert bounded < 0.7 * whole


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"precision": "eager"}, {"fuse": False}])
def test_nothing_changes_where_kernels_do_not_multiply(options: dict[str, object]) -> None:
    with record_compilations() as records:
        gradients(compiled(causal, **options), half())
    forward, backward = records
    assert forward.saved_bytes >= 2 * 2 * 70 * 70
    assert not any("computed again in backward" in d.reason for d in backward.decisions)


def test_long_sums_are_not_computed_again() -> None:
    """A product of 512 terms takes longer than its result travels."""
    wide = (1, 4, 1024, 512)
    e = planned(lambda q, k, v: scores(q, k).softmax(-1) @ v, wide, wide, wide)
    assert e.saved_bytes >= 2 * 4 * 1024 * 1024
    assert any("more than 256 terms" in d.reason for d in e.rejected)


def test_two_layers() -> None:
    """Each decides for itself; what one saves does not disturb the other."""

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = causal(q, k, v)
        return causal(F.rms_norm(x, x.shape[-1:]), k, x + v)

    forward, backward = judged(Spelling(layers, half))
    assert not backward.externs and not forward.externs


def test_lengths_known_at_run_time() -> None:
    """Any number of positions; a size of the heads that is not known leaves all as it was."""
    torch.manual_seed(0)
    inputs = half()
    with record_compilations() as records:
        gradients(torch.compile(causal, backend="onepass", options=INTERPRETED, dynamic=True), inputs)
    assert any("known at run time only" in d.reason for d in records[1].decisions)
    torch._dynamo.reset()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    exact, eager = gradients(causal, inputs, torch.float64), gradients(causal, inputs)
    ours = gradients(torch.compile(causal, backend="onepass", options=INTERPRETED), inputs)
    for x, y, z in zip(exact, eager, ours, strict=True):
        assert x is not None and y is not None and z is not None
        assert (z.double() - x).abs().max() <= 2 * (y.double() - x).abs().max()


def test_a_checkpoint_computes_all_again() -> None:
    """What backward recomputes of a checkpointed block is a part of its family: no weights are stored there, either."""

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(causal, q, k, v, use_reentrant=False)

    forward, backward = judged(Spelling(block, half))
    assert not forward.externs and not backward.externs and forward.saved_bytes == 0


def test_a_rule_that_fails_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[object]:
        raise RuntimeError("a rule failed")

    monkeypatch.setattr(recomputed, "normalise", broken)
    with record_compilations() as records:
        gradients(compiled(causal, strict=False), half())
    assert any("a rule failed" in d.reason for d in records[1].decisions) and not any(r.fallback for r in records)
    with pytest.raises(Exception, match="a rule failed"):
        gradients(compiled(causal), half())
