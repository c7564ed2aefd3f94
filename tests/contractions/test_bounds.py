"""Steps of a sweep are left out only where nothing that is summed depends on them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from onepass.analysis.bounds import find_ranges, needed
from onepass.analysis.conditions import position
from onepass.analysis.formulas import ALWAYS, NEVER, UNKNOWN, Formula, Positive, chosen, decide, every, opposite, some
from onepass.ir.dtypes import DType
from onepass.ir.expr import Index, Load, const, pointwise
from onepass.ir.poly import Axis, Poly
from onepass.ir.program import Buffer
from tests.contractions.judging import explained, interpreted

pytest.importorskip("triton")
INFINITY = math.inf


def later(scores: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1], device=scores.device)
    return place[None, :] > place[:, None]


def masked_maximum_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The maximum is causal, the weights are not."""
    scores = (q @ k.transpose(-1, -2)) * 0.2
    top = scores.masked_fill(later(scores), float("-inf")).amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def two_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Half of every weight is causal."""
    scores = (q @ k.transpose(-1, -2)) * 0.2
    masked = scores.masked_fill(later(scores), float("-inf"))
    top = masked.amax(-1, keepdim=True)
    weights = torch.exp(masked - top) + torch.exp(scores - top)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * 0.2
    return scores.masked_fill(later(scores), float("-inf")).softmax(-1) @ v


def sweeps(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    (kernel,) = explained(function, *inputs).kernels
    return kernel.source.count("for i")


@pytest.mark.parametrize(("function", "parts"), [(causal, 2), (masked_maximum_alone, 3), (two_weights, 3)])
def test_what_a_mask_leaves_out(function: Callable[..., Tensor], parts: int) -> None:
    """Causal attention has a loop without the mask and one with it; sums that go everywhere come after."""
    with FakeTensorMode():
        inputs = [torch.empty(4, 16, 200, 32, dtype=torch.bfloat16) for _ in range(3)]
        assert sweeps(function, *inputs) == parts
    q, k, v = (torch.randn(1, 2, 200, 32) for _ in range(3))
    ours = interpreted(function)(q, k, v)
    exact = function(q.double(), k.double(), v.double())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_sum_with_terms_before_the_first_of_its_maximum() -> None:
    """No maximum yet, but terms that count: they cannot be carried to a maximum that comes later."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * 0.2
        early = torch.arange(scores.shape[-1], device=scores.device) < 150
        weights = torch.exp(scores - scores.masked_fill(early, float("-inf")).amax(-1, keepdim=True))
        return (weights / weights.sum(-1, keepdim=True)) @ v

    q, k, v = (torch.randn(1, 1, 200, 16) for _ in range(3))
    ours = interpreted(function)(q, k, v)
    exact = function(q.double(), k.double(), v.double())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_a_sum_beside_a_masked_maximum_needs() -> None:
    row, column = Axis("row", Poly.of(8)), Axis("column", Poly.of(8))
    buffer = Buffer("s", DType.F32, (Poly.of(8), Poly.of(8)), (Poly.of(8), Poly.ONE))
    score = Load(buffer, (row.poly(), column.poly()))
    condition = pointwise("le", Index(column.poly()), Index(row.poly()))
    masked = pointwise("where", condition, score, const(float("-inf"), DType.F32))
    kept = pointwise("exp", pointwise("sub", masked, const(1.0, DType.F32)))
    whole = pointwise("exp", pointwise("sub", score, const(1.0, DType.F32)))
    causal = Positive(row - column + 1)
    assert needed(kept, "sum", True) == causal
    assert needed(pointwise("mul", whole, kept), "sum", True) == causal
    assert needed(whole, "sum", True) == ALWAYS
    assert needed(pointwise("add", whole, kept), "sum", True) == ALWAYS
    assert needed(pointwise("add", kept, kept), "sum", True) == causal
    read = pointwise("exp", pointwise("sub", masked, score))  # a statistic may be -inf, and the weight NaN
    assert needed(read, "sum", True) == causal
    assert needed(read, "sum", False) == ALWAYS


# --- however a mask is written ---


def places(k: Tensor, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Positions of queries and of keys, as many of both; on the device of the keys, also where that is traced."""
    place = torch.arange(k.shape[-2], dtype=dtype, device=k.device)
    return place[:, None], place


def ones(k: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(k.shape[-2], k.shape[-2], dtype=dtype, device=k.device)


def distance(k: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    i, j = places(k, dtype)
    return i - j


def in_blocks(k: Tensor, size: int) -> tuple[Tensor, Tensor]:
    i, j = places(k)
    return i // size, j // size


def sink_and_window(k: Tensor) -> Tensor:
    i, j = places(k)
    return ((j <= i) & (i - j < 40)) | ((j <= i) & (j < 4))


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "not low, or padded": lambda k, pad: ~(distance(k) >= 0) | pad,
    "logical or": lambda k, pad: torch.logical_or(~(distance(k) >= 0), pad),
    "not (low and kept)": lambda k, pad: torch.logical_not((distance(k) >= 0) & ~pad),
    "triangle of ones": lambda k, pad: torch.triu(ones(k), 1).bool(),
    "no triangle of ones": lambda k, pad: ~torch.tril(ones(k)).bool(),
    "above zero": lambda k, pad: ~(torch.tril(ones(k, torch.uint8)) > 0),
    "below one": lambda k, pad: torch.tril(ones(k, torch.int64)) < 1,
    "not zero": lambda k, pad: torch.triu(ones(k), 1) != 0,
    "below a half": lambda k, pad: torch.tril(ones(k, torch.int32)) < 0.5,
    "one less a triangle": lambda k, pad: (1 - torch.tril(ones(k, torch.bfloat16))).bool(),
    "product of triangles": lambda k, pad: torch.tril(ones(k)) * torch.triu(ones(k), -40) == 0,
    "int32": lambda k, pad: operator.lt(*places(k, torch.int32)),
    "difference of int32": lambda k, pad: distance(k, torch.int32) < 0,
    "float32": lambda k, pad: operator.lt(*places(k, torch.float32)),
    "far": lambda k, pad: distance(k).abs() > 40,
    "not near": lambda k, pad: ~(distance(k).abs() <= 40),
    "near in int32": lambda k, pad: distance(k, torch.int32).abs() >= 40,
    "late or far": lambda k, pad: (distance(k) < 0) | (distance(k).abs() > 40),
    "band of bools": lambda k, pad: ~ones(k, torch.bool).tril().triu(-40),
    "band of numbers": lambda k, pad: ones(k).tril().triu(-40) == 0,
    "other block": lambda k, pad: operator.ne(*in_blocks(k, 50)),
    "not the same block": lambda k, pad: ~operator.eq(*in_blocks(k, 64)),
    "later block": lambda k, pad: operator.lt(*in_blocks(k, 50)),
    "every third": lambda k, pad: places(k)[1] * 3 > places(k)[0],
    "prefix": lambda k, pad: ~((distance(k) >= 0) | (places(k)[1] < 70)),
    "prefix of a window": lambda k, pad: (distance(k).abs() > 20) & (places(k)[1] >= 30),
    "sink and window": lambda k, pad: ~sink_and_window(k),
    "two ends": lambda k, pad: (distance(k) < 0) | (places(k)[1] >= 130),
    "two ends and a window": lambda k, pad: (distance(k).abs() > 50) | (places(k)[1] >= 130) | (places(k)[1] < 10),
    "first rows see nothing": lambda k, pad: distance(k) < 70,
    "last rows see nothing": lambda k, pad: (distance(k).abs() > 20) | (places(k)[1] >= 90),
}


def soft_capped(q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(q @ k.transpose(-1, -2) / 20) * 4


def bounded(function: Callable[..., Tensor]) -> bool:
    """Whether no loop of a kernel for a GPU sweeps every key."""
    with FakeTensorMode():
        q, k, v = (torch.empty(4, 16, 1000, 64, dtype=torch.bfloat16) for _ in range(3))
        (kernel,) = explained(function, q, k, v, torch.empty(1000, dtype=torch.bool)).kernels
    loops = [line for line in kernel.source.splitlines() if line.strip().startswith("for i")]
    return bool(loops) and all("min(" in line for line in loops)


def judge_bounded(function: Callable[..., Tensor], size: int = 200) -> None:
    pad = torch.arange(size) % 7 == 3
    assert bounded(function)
    q, k, v = (torch.randn(1, 1, size, 16) for _ in range(3))
    ours = interpreted(function)(q, k, v, pad)
    exact = function(q.double(), k.double(), v.double(), pad)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("name", MASKS)
def test_spellings_of_masks(name: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        return soft_capped(q, k).masked_fill(MASKS[name](k, pad), -INFINITY).softmax(-1) @ v

    judge_bounded(function)


@pytest.mark.parametrize(
    "name", ["other block", "prefix", "sink and window", "first rows see nothing", "band of bools"]
)
@pytest.mark.parametrize("size", [65, 331])
def test_sizes_of_masks(name: str, size: int) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        return soft_capped(q, k).masked_fill(MASKS[name](k, pad), -INFINITY).softmax(-1) @ v

    judge_bounded(function, size)


def added_triangle(q: Tensor, k: Tensor, pad: Tensor) -> Tensor:
    n = k.shape[-2]
    return (
        soft_capped(q, k)
        + torch.triu(torch.full((n, n), -INFINITY, dtype=q.dtype, device=q.device), 1)
        + pad.to(q.dtype)
    )


def added_choice(q: Tensor, k: Tensor, pad: Tensor) -> Tensor:
    late = torch.where(distance(k) < 0, -INFINITY, 0.0) + torch.where(pad, -INFINITY, 0.0)
    return soft_capped(q, k) + late.to(q.dtype)


@pytest.mark.parametrize("scores", [added_triangle, added_choice])
def test_added_masks(scores: Callable[..., Tensor]) -> None:
    judge_bounded(lambda q, k, v, pad: scores(q, k, pad).softmax(-1) @ v)


def late(k: Tensor) -> Tensor:
    return distance(k) < 0


def decay(k: Tensor) -> Tensor:
    return torch.where(late(k), -INFINITY, distance(k) * -0.05).exp().to(k.dtype)


def over_their_sum(weights: Tensor, v: Tensor) -> Tensor:
    return (weights @ v) / weights.sum(-1, keepdim=True)


WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "sigmoid of masked": lambda q, k, v, pad: soft_capped(q, k).masked_fill(late(k), -INFINITY).sigmoid() @ v,
    "masked sigmoid": lambda q, k, v, pad: soft_capped(q, k).sigmoid().masked_fill(late(k) | pad, 0) @ v,
    "retention": lambda q, k, v, pad: (q @ k.transpose(-1, -2) * decay(k)) @ v,
    "triangle": lambda q, k, v, pad: (q @ k.transpose(-1, -2)).tril() @ v,
    "times a mask": lambda q, k, v, pad: (torch.relu(q @ k.transpose(-1, -2)) * ~late(k)) @ v,
    "nothing for first rows": lambda q, k, v, pad: (q @ k.transpose(-1, -2)).tril(-70) @ v,
    "exponentials": lambda q, k, v, pad: over_their_sum(soft_capped(q, k).exp().masked_fill(late(k), 0), v),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_without_softmax(name: str) -> None:
    judge_bounded(WEIGHTS[name])


@pytest.mark.parametrize("kind", ["one", "read"])
def test_weights_that_do_not_vanish(kind: str) -> None:
    """A weight of one behind the mask counts; so does NaN, where a row's statistic is -inf."""

    def function(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
        scores = soft_capped(q, k)
        if kind == "one":
            return scores.exp().masked_fill(late(k), 1) @ v
        return (scores.masked_fill(late(k), -INFINITY) - row[:, None]).exp() @ v

    row = torch.zeros(200)
    row[3] = -INFINITY
    q, k, v = (torch.randn(1, 1, 200, 16) for _ in range(3))
    ours = interpreted(function)(q, k, v, row)
    exact = function(q.double(), k.double(), v.double(), row.double())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_conditions_of_data_are_answered_by_a_kernel_before() -> None:
    """They bound nothing by their form."""

    def function(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        return soft_capped(q, k).masked_fill(~((distance(k) >= 0) | pad), -INFINITY).softmax(-1) @ v

    with FakeTensorMode():
        q, k, v = (torch.empty(4, 16, 1000, 64, dtype=torch.bfloat16) for _ in range(3))
        *asking, kernel = explained(function, q, k, v, torch.empty(1000, dtype=torch.bool)).kernels
    loops = [line for line in kernel.source.splitlines() if line.strip().startswith("for i")]
    assert any("visits" in k.name for k in asking) and len(loops) == 3 and all("end" in line for line in loops)


# --- the algebra ---


ROW, COLUMN = Axis("row", Poly.of(40)), Axis("column", Poly.of(40))
CASES = {
    "below": ROW - COLUMN + 1,
    "blocks": ROW // 7 - COLUMN // 5 + 1,
    "blocks from below": COLUMN // 5 - (ROW - 3) // 7,
    "scaled": ROW - COLUMN * 3 + 2,
    "scaled from below": COLUMN * 3 - ROW * 2 - 4,
    "scaled blocks": ROW * 2 - ((COLUMN + 2) // 4) * 3,
    "falling": Poly.of(30) - ROW - COLUMN,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("first", [0, 8, 32])
def test_a_bound_is_what_counting_finds(name: str, first: int) -> None:
    lanes, difference = 8, CASES[name]
    ((bound,),) = find_ranges(Positive(difference), ROW, COLUMN, Poly.of(first), lanes)
    loose, tight = bound.loose.constant, bound.tight.constant
    assert loose is not None and tight is not None
    for column in range(40):
        holds = [difference.evaluate({ROW: row, COLUMN: column}) > 0 for row in range(first, first + lanes)]
        assert any(holds) == (column < loose if bound.upper else column >= loose)
        assert all(holds) == (column < tight if bound.upper else column >= tight)


def test_ranges_of_alternatives() -> None:
    low, late, sink = Positive(ROW - COLUMN + 1), Positive(COLUMN - ROW + 9), Positive(4 - COLUMN.poly())

    def found(formula: Formula) -> list[int]:
        return [len(one) for one in find_ranges(formula, ROW, COLUMN, Poly.ZERO, 8)]

    assert found(every((low, late))) == [2]
    assert found(some((low, sink))) == [1, 1]
    assert found(some((every((low, late)), every((low, sink))))) == [1, 2]  # the first one has one end only
    assert found(some((low, every((low, late))))) == [1]  # one within the other
    assert found(some((late, every((late, sink)), UNKNOWN))) == [0]
    assert found(some((late, Positive(COLUMN + ROW - 20)))) == [0]  # neither starts at the first position
    assert found(every((low, UNKNOWN))) == [1]


def test_opposites_and_decisions() -> None:
    low = Positive(ROW - COLUMN + 1)
    assert opposite(some((low, UNKNOWN))) == every((Positive(COLUMN - ROW), UNKNOWN))
    assert opposite(opposite(low)) == low
    assert chosen(low, UNKNOWN, UNKNOWN) == UNKNOWN and chosen(low, ALWAYS, ALWAYS) == ALWAYS
    assert some((low, ALWAYS)) == ALWAYS and every((low, NEVER)) == NEVER
    assert decide(low, (Positive(ROW - COLUMN),)) is True  # strictly below
    assert decide(low, (Positive(COLUMN - ROW),)) is False
    assert decide(low, (Positive(COLUMN - ROW + 1),)) is None  # equal is both
    assert decide(every((low, UNKNOWN)), (Positive(COLUMN - ROW),)) is False
    assert decide(every((low, UNKNOWN)), (Positive(ROW - COLUMN),)) is None
    assert decide(every((low, UNKNOWN)), (some((Positive(COLUMN - ROW), UNKNOWN)),)) is False


def test_positions_that_a_type_does_not_have() -> None:
    """Rounded or wrapped numbers are no positions."""
    for dtype, most in ((DType.F32, 1 << 24), (DType.BF16, 1 << 8), (DType.I32, 1 << 31)):
        whole, more = (Index(Axis("a", Poly.of(n)).poly()) for n in (most, most + 2))
        assert position(pointwise("cast", whole, dtype=dtype)) is whole.poly
        assert position(pointwise("cast", more, dtype=dtype)) is None
    half = const(0.5, DType.F32)
    assert position(half) is None
    row = pointwise("cast", Index(ROW.poly()), dtype=DType.I32)
    assert position(pointwise("floordiv", row, const(5, DType.I32))) is ROW // 5
    assert position(pointwise("truncdiv", pointwise("neg", row), const(5, DType.I32))) is None
