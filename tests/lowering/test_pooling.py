"""Pooling and its gradients: eager's values, ties, NaN and strides, in kernels shared with their neighbours."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass.backend import make_backend

from ..checking import DEVICE, Function, compare, compare_strides, compile_direct, execute, fresh, to_float64
from ..unbuilt import unbuilt

HERE = {"strict": True, "cache": False}
INTERPRETED = HERE if DEVICE == "cuda" else {**HERE, "target": "triton-interpret"}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
NAN, INFINITY = float("nan"), float("inf")


def numbers(*shape: int, last: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Few different values, so that windows have ties."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    x = torch.randint(-8, 9, shape, generator=generator, device=DEVICE).to(dtype) / 8
    return x.to(memory_format=LAST[len(shape)]) if last else x


def check(function: Function, x: torch.Tensor, options: dict[str, Any], gradients: bool = True) -> None:
    """Eager's values, strides and gradients."""
    given = [x.detach().requires_grad_(gradients)]
    ours = compile_direct(function, given, make_backend(options))
    got, expected = execute(ours, fresh(given), gradients), execute(function, fresh(given), gradients)
    wide = execute(function, [to_float64(v) for v in given], gradients) if x.is_floating_point() else None
    compare(got, expected, wide)
    compare_strides(got, expected)


def found(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def pool(operation: Callable[..., Any], *geometry: Any, **settings: Any) -> Function:
    return lambda x: found(operation(x, *geometry, **settings))


# name -> (function, shape)
CASES: dict[str, tuple[Function, tuple[int, ...]]] = {
    "max": (pool(F.max_pool2d, 3, 2, 1), (2, 3, 8, 10)),
    "max, odd sizes": (pool(F.max_pool2d, 3, 2, 1, return_indices=True), (2, 3, 7, 13)),
    "max, last window cut": (pool(F.max_pool2d, 3, 2, 1, ceil_mode=True, return_indices=True), (1, 3, 8, 6)),
    "max, spread": (pool(F.max_pool2d, (3, 2), 1, (1, 0), (2, 3), return_indices=True), (2, 2, 7, 8)),
    "max, apart": (pool(F.max_pool2d, 2, (3, 4), return_indices=True), (2, 3, 8, 9)),
    "max, overlapping": (pool(F.max_pool2d, 5, 1, 2, return_indices=True), (1, 2, 7, 6)),
    "max, large": (pool(F.max_pool2d, 7, 3, 2, return_indices=True), (2, 3, 12, 14)),
    "max, all": (pool(F.max_pool2d, (6, 7), return_indices=True), (2, 3, 6, 7)),
    "max, no batch": (pool(F.max_pool2d, 2, return_indices=True), (3, 6, 7)),
    "max, 1d": (pool(F.max_pool1d, 3, 2, 1), (2, 3, 11)),
    "max, 3d": (pool(F.max_pool3d, 2, 2, 1, return_indices=True), (1, 2, 4, 5, 6)),
    "max, 3d overlapping": (pool(F.max_pool3d, 3, 2, 1), (1, 2, 5, 4, 6)),
    "mean": (pool(F.avg_pool2d, 3, 2, 1), (2, 3, 8, 10)),
    "mean, odd sizes": (pool(F.avg_pool2d, 3, 2, 1, count_include_pad=False), (2, 3, 7, 13)),
    "mean, last window cut": (pool(F.avg_pool2d, 3, 2, 1, ceil_mode=True), (1, 3, 8, 6)),
    "mean, last cut, inside": (pool(F.avg_pool2d, 3, 2, 1, True, False), (1, 3, 8, 6)),
    "mean, divisor": (pool(F.avg_pool2d, (2, 3), divisor_override=5), (2, 3, 6, 7)),
    "mean, large": (pool(F.avg_pool2d, 7, 2, 3), (2, 3, 12, 14)),
    "mean, 1d": (pool(F.avg_pool1d, 4, 3, 1), (2, 3, 11)),
    "mean, 3d": (pool(F.avg_pool3d, (1, 2, 3), 2, (0, 1, 1)), (1, 2, 4, 5, 6)),
    "equal parts": (pool(F.adaptive_avg_pool2d, (3, 2)), (2, 3, 6, 8)),
    "equal parts, 1d": (pool(F.adaptive_avg_pool1d, 4), (2, 3, 12)),
    "equal parts, 3d": (pool(F.adaptive_avg_pool3d, 2), (1, 2, 4, 4, 6)),
    "one part": (pool(F.adaptive_avg_pool2d, 1), (2, 3, 6, 8)),
    "maxima of equal parts": (pool(F.adaptive_max_pool2d, (3, 2), return_indices=True), (2, 3, 6, 8)),
    "maximum of all": (pool(F.adaptive_max_pool2d, 1, return_indices=True), (2, 3, 6, 7)),
    "an empty batch": (pool(F.max_pool2d, 2), (0, 3, 4, 6)),
    "between": (lambda x: [torch.tanh(F.max_pool2d(torch.relu(x * 2 + 1), 3, 2, 1))], (2, 3, 8, 10)),
    "two of one input": (lambda x: [F.max_pool2d(x, 2), F.avg_pool2d(x, 2)], (2, 3, 8, 6)),
    "one after the other": (lambda x: [F.max_pool2d(F.max_pool2d(x, 3, 1, 1), 3, 1, 1)], (1, 2, 7, 6)),
}  # fmt: skip
UNEQUAL: dict[str, tuple[Function, tuple[int, ...]]] = {
    "mean": (pool(F.adaptive_avg_pool2d, 5), (2, 3, 6, 8)),
    "max": (pool(F.adaptive_max_pool2d, 5, return_indices=True), (2, 3, 6, 8)),
}


def layouts(shape: tuple[int, ...]) -> tuple[bool, ...]:
    return (False, True) if len(shape) in LAST else (False,)


EACH = [(name, last) for name, (_, shape) in CASES.items() for last in layouts(shape)]
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="eager on a GPU pools no integers; plans do not run")


def check_layout(name: str, last: bool, options: dict[str, Any]) -> None:
    if last and name.startswith("mean") and DEVICE == "cuda":
        pytest.skip(
            "torch 2.11 on CUDA: the gradient of padded means in channels-last is that of means without padding"
        )
    function, shape = CASES[name]
    check(function, numbers(*shape, last=last), options)


@pytest.mark.parametrize(("name", "last"), EACH)
def test_values_and_gradients_are_eagers(name: str, last: bool) -> None:
    check_layout(name, last, HERE)


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "last"), EACH)
def test_values_on_tiles_are_eagers(name: str, last: bool) -> None:
    check_layout(name, last, INTERPRETED)


def test_maxima_on_tiles_are_eagers() -> None:
    function, shape = CASES["max, odd sizes"]
    check(function, numbers(*shape, last=True), INTERPRETED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["between", "max, large", "mean, last window cut"])
def test_other_floats(name: str, dtype: torch.dtype) -> None:
    function, shape = CASES[name]
    check(function, numbers(*shape, dtype=dtype), HERE)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("odd", [NAN, INFINITY, -INFINITY])
def test_of_several_nans_the_last_is_the_maximum_and_of_infinities_the_first(size: int, odd: float) -> None:
    x = numbers(2, 2, 9, 10)
    x[0, 0, :, 3:] = odd
    x[1, 1, 2:7, 4] = odd
    x[0, 1] = odd
    x[1, 0, 4, 5] = NAN
    check(pool(F.max_pool2d, size, 2, size // 2, return_indices=True), x, HERE)


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 5, (2, 3, 7, 8), dtype=dtype)
    x[0] = torch.iinfo(dtype).min
    check(pool(F.max_pool2d, 3, 2, 1, return_indices=True), x, HERE, gradients=False)


@ON_CPU
def test_means_of_integers_are_rounded_to_zero() -> None:
    x = torch.randint(-9, 9, (2, 3, 7, 8))
    check(pool(F.avg_pool2d, 3, 2, 1, count_include_pad=False), x, HERE, gradients=False)


def explained(function: Function, x: torch.Tensor, target: str = "cpu") -> Any:
    with unbuilt():
        return onepass.explain(function, x, target=target)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_to_eager(name: str) -> None:
    function, shape = CASES[name]
    found = explained(function, numbers(*shape).requires_grad_())
    assert not found.externs


@ON_CPU
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("last", [False, True])
def test_neighbours_share_the_kernel(target: str, last: bool) -> None:
    """One kernel that reads its input once and writes maxima alone; the gradient is one kernel."""
    function, x = CASES["between"][0], numbers(4, 32, 56, 56, last=last)
    (kernel,) = explained(function, x, target).kernels
    assert (kernel.bytes_read, kernel.bytes_written) == (x.nbytes, x.nbytes // 4)
    _, backward = explained(lambda x: F.max_pool2d(torch.relu(x * 2), 3, 2, 1), x.requires_grad_(), target).graphs
    assert len(backward.kernels) == 1


def test_a_costly_value_is_not_computed_for_every_window() -> None:
    x = numbers(4, 32, 56, 56)
    found = explained(lambda x: F.max_pool2d(torch.erfinv(torch.sin(x) / torch.lgamma(x)), 3, 1, 1), x)
    assert len(found.kernels) == 2


def test_a_maximum_saves_a_byte_for_its_gradient() -> None:
    x = numbers(2, 4, 16, 16).requires_grad_()
    assert explained(lambda x: F.max_pool2d(x, 3, 2, 1), x).saved_bytes == 2 * 4 * 8 * 8


@pytest.mark.parametrize("name", UNEQUAL)
def test_windows_of_unequal_sizes_are_left_to_eager(name: str) -> None:
    function, shape = UNEQUAL[name]
    check(function, numbers(*shape), HERE)
    call = explained(function, numbers(*shape)).externs[0]
    assert call.why == "adaptive pooling with windows of unequal sizes"


@pytest.mark.parametrize("last", [False, True])
def test_loops_have_no_conditions(last: bool) -> None:
    """Borders and the remainders of strides have their own code."""
    found = explained(CASES["max"][0], numbers(2, 16, 24, 24, last=last).requires_grad_())
    for kernel in found.kernels:
        loops = kernel.source.split("#pragma omp simd")[1:]
        assert loops
        assert not any(word in loop.split("}")[0] for loop in loops for word in ("inside", " % ", " / "))


def geometry(draw: random.Random) -> tuple[Function, torch.Tensor]:
    """Pooling of one kind, and what it takes."""
    dims = draw.choice([1, 2, 2, 2, 3])
    size = [draw.randint(1, 4 if dims < 3 else 3) for _ in range(dims)]
    step = [draw.randint(1, 4) for _ in range(dims)]
    before = [draw.randint(0, k // 2) for k in size]
    ceil = draw.random() < 0.4
    if draw.random() < 0.5:
        spread = [draw.randint(1, 3) for _ in range(dims)]
        settings = {"dilation": spread, "ceil_mode": ceil, "return_indices": dims > 1}
    else:
        spread = [1] * dims
        settings = {"ceil_mode": ceil, "count_include_pad": draw.random() < 0.5}
    least = [(k - 1) * d + 1 for k, d in zip(size, spread, strict=True)]
    shape = [draw.randint(1, 2), draw.randint(1, 3), *(n + draw.randint(0, 7) for n in least)]
    kind = "max" if "dilation" in settings else "avg"
    x = numbers(*shape, last=dims > 1 and draw.random() < 0.4)
    return pool(getattr(F, f"{kind}_pool{dims}d"), size, step, before, **settings), x


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.rotating if s else ()) for s in range(6)])
def test_any_geometry(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(5):
        function, x = geometry(draw)
        check(function, x, HERE)


def test_symbolic_sizes() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x: F.avg_pool2d(F.max_pool2d(x, 3, 2, 1), 2), backend="onepass", dynamic=True)
    for batch, height, width in itertools.product((2, 3), (9, 12), (8,)):
        x = numbers(batch, 3, height, width)
        torch.testing.assert_close(function(x), F.avg_pool2d(F.max_pool2d(x, 3, 2, 1), 2))
