"""Schedules by what they do: values against eager and float64, and the form the kernel has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import onepass
from onepass.errors import KernelMismatch

STRICT = {"strict": True}
pytestmark = pytest.mark.usefixtures("two_cores")  # the form of a kernel follows from the target's facts


def source_of(function: Callable[..., object], *arguments: torch.Tensor) -> str:
    with torch.no_grad():
        kernels = onepass.explain(function, *arguments, options=STRICT).kernels
        return "\n".join(k.source.split("#include")[1] for k in kernels)


def close(
    function: Callable[..., torch.Tensor], x: torch.Tensor, tolerance: float = 1e-6, dynamic: bool | None = None
) -> None:
    ours = torch.compile(function, backend="onepass", options=STRICT, dynamic=dynamic)(x)
    eager, exact = function(x), function(x.double())
    error, allowed = (ours - exact).abs(), 2 * (eager - exact).abs() + tolerance * (1 + exact.abs())
    finite = exact.isfinite()
    assert (error[finite] <= allowed[finite]).all()
    assert torch.equal(ours.isnan(), eager.isnan())


def test_long_rows_use_the_online_form() -> None:
    x = torch.randn(8, 300_007) * 5
    text = source_of(lambda x: torch.softmax(x, -1), x)
    assert "reference0" in text and "carry0" in text
    assert "reference0" not in source_of(lambda x: torch.softmax(x, -1), x[:, :1000].contiguous())
    close(lambda x: torch.softmax(x, -1), x)
    close(lambda x: torch.logsumexp(x, -1), x)


def test_online_form_on_special_rows() -> None:
    x = torch.randn(6, 300_007)
    inf = float("inf")
    x[0] = -inf  # fully masked: NaN, as eager
    x[1, :200_000] = -inf  # the first blocks are masked
    x[2, 7] = inf
    x[3, 100] = float("nan")
    x[4] *= 1e4
    close(lambda x: torch.softmax(x, -1), x)


def test_dear_values_are_kept_between_sweeps() -> None:
    text = source_of(lambda x: torch.softmax(x, -1), torch.randn(64, 1000))
    assert text.count("op_exp_f32") == 2  # the tile and the tail of one sweep; the last sweep reads scratch
    assert "row0" in text


def rotated(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> list[torch.Tensor]:
    """Rotary positions on more heads of queries than of keys."""
    angle = torch.cat((angle, angle), -1)[:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        x, half = x.transpose(1, 2), x.shape[-1] // 2
        return (x * angle.cos() + torch.cat((-x[..., half:], x[..., :half]), -1) * angle.sin()).contiguous()

    return [turned(q), turned(k)]


@pytest.mark.parametrize(("heads", "tokens", "width"), [((8, 4), 64, 32), ((3, 1), 7, 10), ((1, 5), 1, 6)])
def test_both_parts_of_a_cat_are_loops_without_conditions(heads: tuple[int, int], tokens: int, width: int) -> None:
    q, k = (torch.randn(2, tokens, h, width) for h in heads)
    angle = torch.rand(2, tokens, width // 2) * 10
    text = source_of(rotated, q, k, angle)
    if tokens > 7:
        assert text.count("static int programs") == 1
        assert "inside" not in text and text.count("#pragma omp simd") == 4
    got = torch.compile(rotated, backend="onepass", options=STRICT)(q, k, angle)
    for mine, right in zip(got, rotated(q.double(), k.double(), angle.double()), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(65, 129), (64, 64), (1, 300), (300, 1), (7, 1031)])
def test_transposed_blocks(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    ours = torch.compile(lambda x: (x.relu(), x.relu().t().contiguous()), backend="onepass", options=STRICT)(x)
    assert torch.equal(ours[0], x.relu()) and torch.equal(ours[1], x.relu().t())


def test_large_results_are_streamed_and_right() -> None:
    x = torch.randn(2049, 2100)  # rows that start at any alignment
    text = source_of(lambda x: x * 2 + 1, x)
    assert "op_stream(" in text and "op_touched(out0)" in text
    assert "op_stream(" not in source_of(lambda x: x * 2 + 1, x[:100])
    for function in (lambda x: x * 2 + 1, lambda x: x > 0.5, lambda x: (x * 3).bfloat16()):
        ours = torch.compile(function, backend="onepass", options=STRICT)(x)
        assert torch.equal(ours, function(x))


@pytest.mark.parametrize("shape", [(4096, 1024), (4111, 1031)])
def test_column_sums_beside_streamed_results(shape: tuple[int, int]) -> None:
    """Every column has its own sum, however wide the tiles are that leave past the caches."""
    x = torch.randn(shape)
    doubled, sums = torch.compile(lambda x: (x * 2, (x * 2).sum(0)), backend="onepass", options=STRICT)(x)
    assert torch.equal(doubled, x * 2)
    torch.testing.assert_close(sums.double(), (x.double() * 2).sum(0), rtol=1e-5, atol=1e-4)


def test_long_sums_are_accurate() -> None:
    torch.manual_seed(1)
    for x in (torch.rand(3000, 257), torch.rand(1, 1 << 20) - 0.3, torch.rand(1 << 18, 3)):
        exact = x.double().sum(0)
        ours = torch.compile(lambda x: x.sum(0), backend="onepass", options=STRICT)(x)
        assert ((ours - exact).abs() <= 2e-7 * x.double().abs().sum(0)).all()
    y = torch.ones(70_000)
    y[3] = float("inf")
    assert torch.compile(lambda x: x.sum(), backend="onepass", options=STRICT)(y).item() == float("inf")


def test_one_state_beside_lanes() -> None:
    """A variance over two axes, fed from the strips of a softmax over one of them, beside a product over the other."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spread, mean = torch.var_mean(x.log_softmax(0), (0, 1))
        return (1 + x.softmax(0).sum(0) / 8).prod(0), spread, mean

    for shape in ((4, 17), (130, 9), (3, 3)):
        x = torch.randn(shape)
        ours = torch.compile(function, backend="onepass", options=STRICT)(x)
        for mine, exact in zip(ours, function(x.double()), strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


def test_variance_far_from_zero() -> None:
    x = torch.randn(64, 4096) + 1000
    # float32 holds 1000 to 6e-5; E[x^2] - E[x]^2 would be off by 1e-2 here.
    close(lambda x: x.var(-1), x, tolerance=5e-6)
    close(lambda x: x.var(0), x, tolerance=5e-5)


@pytest.mark.parametrize("dims", [(1, 3), (0, 2), (0, 1, 3), (0, 1, 2, 3), (0,), (0, 2, 3)])
@pytest.mark.parametrize("width", [64, 70, 3])
@pytest.mark.parametrize("dynamic", [False, True])
def test_variance_over_several_axes(dims: tuple[int, ...], width: int, dynamic: bool) -> None:
    """However many sweeps feed a lane, whole tiles or not, no lane divides to take an element in."""
    x = torch.randn(5, 7, 9, width) + 100
    function = lambda x: x.var(dims)  # noqa: E731
    close(function, x, tolerance=5e-6, dynamic=dynamic)
    if not dynamic:
        text = source_of(function, x)
        assert ("op_welford_scaled_" in text or "op_moments(" in text) and "op_welford_f" not in text


def test_variance_of_a_cut_axis() -> None:
    x = torch.randn(5, 7, 9, 70) + 100
    function = lambda x: torch.cat([x, x * 2], 3).var((1, 3))  # noqa: E731
    close(function, x, tolerance=5e-6)
    assert source_of(function, x).count("_shift = ") == 3  # set at the first piece that has elements


def test_debug_5_names_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import onepass.codegen.c as emitter

    right = emitter.c_pointwise
    function = lambda x: torch.softmax(x.exp(), -1)  # noqa: E731
    options = {**STRICT, "debug": 5}
    torch.compile(function, backend="onepass", options=options)(torch.randn(4, 8))
    torch._dynamo.reset()
    monkeypatch.setattr(emitter, "c_pointwise", lambda op, *rest: right("expm1" if op == "exp" else op, *rest))
    with pytest.raises(KernelMismatch, match=r"aten\.exp"):
        torch.compile(function, backend="onepass", options=options)(torch.randn(4, 8))
