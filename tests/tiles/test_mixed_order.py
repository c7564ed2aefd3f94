"""Rows and columns of one tensor reduced in one pass: norm backward over long rows, scales along both axes,
results that lie across, batch norm. Plans and builds for absent chips, values by the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.ir.target import find_target
from tests.chips import CHIPS
from tests.schedule.test_carried import close, compile_for, step

pytest.importorskip("triton")
Make = Callable[[], list[torch.Tensor]]


def graph_of(function: Callable[..., Any], make: Make, chip: str = "sm_90", direction: str = "inference") -> Any:
    """The record of one graph, built: nothing may spill or ask for more shared memory than there is."""
    with FakeTensorMode():
        explanation = onepass.explain(function, *make(), target=chip, options={"cache": False, "strict": True})
    (graph,) = [g for g in explanation.graphs if g.direction == direction]
    assert not graph.fallback and not graph.externs
    for kernel in graph.kernels:
        assert kernel.registers and not kernel.spilled_bytes
        assert kernel.shared_bytes <= find_target(chip).shared_bytes
    return graph


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def rms_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def trained(rows: int, columns: int, dtype: torch.dtype) -> Make:
    return lambda: [torch.empty(s, dtype=dtype).requires_grad_() for s in ((rows, columns), (columns,), (columns,))]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
@pytest.mark.parametrize(
    ("columns", "dtype"), [(16384, torch.bfloat16), (12288, torch.float32), (10240, torch.bfloat16)]
)
def test_norm_backward_is_one_pass(
    function: Callable[..., torch.Tensor], columns: int, dtype: torch.dtype, chip: str
) -> None:
    if columns == 16384 and chip in ("sm_80", "sm_100"):
        columns = 12288  # the last registers there: whether more fits depends on Triton's version
    graph = graph_of(function, trained(131072, columns, dtype), chip, "backward")
    names = [k.name.rsplit("_", 1)[1] for k in graph.kernels]
    assert names == ["partial", "finish"]
    assert " x " in graph.kernels[0].schedule and "split over c0" in graph.kernels[0].schedule
    assert graph.bytes_moved <= 1.02 * graph.bytes_minimum


def test_the_next_row_is_on_its_way() -> None:
    graph = graph_of(layer_norm, trained(131072, 16384, torch.bfloat16), direction="backward")
    source = graph.kernels[0].source
    assert "num_stages=2" in source
    rows = [line for line in source.splitlines() if "tl.load" in line and "* 16384" in line]
    assert len(rows) == 8  # four pieces of two tensors, each loaded once: bfloat16 is what stays in registers
    assert source.count("op_reopen(") == 8


def test_what_does_not_fit_beside_the_states_is_loaded_again() -> None:
    graph = graph_of(rms_norm, trained(131072, 18432, torch.float32), "gfx942", "backward")
    assert len(graph.kernels) == 2 and "c1[18432]: swept by 9 x 2048" in graph.kernels[0].schedule
    assert graph.bytes_moved <= 1.02 * graph.bytes_minimum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_that_do_not_fit_take_two_passes(dtype: torch.dtype) -> None:
    graph = graph_of(layer_norm, trained(131072, 32768, dtype), direction="backward")
    assert len(graph.kernels) == 3  # input gradient; columns in two steps
    assert graph.bytes_moved <= 1.68 * graph.bytes_minimum  # both operands twice, nothing between


@pytest.mark.rotating
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((37, 12288), torch.bfloat16),
        ((40, 10000), torch.float32),  # the last piece is not full
        ((33, 16384), torch.bfloat16),
        ((33, 16384), torch.float32),
        ((34, 9216), torch.float16),
        ((33, 24576), torch.float32),  # rows loaded again
    ],
)
def test_norm_backward_values(
    function: Callable[..., torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    n = shape[-1:]
    tensors = [(torch.randn(s, generator=generator) + 0.5).to(dtype) for s in (shape, n, n, shape)]
    used = tensors if function is layer_norm else [tensors[0], tensors[1], tensors[3]]
    called = function if function is layer_norm else lambda x, w: rms_norm(x, w, w)
    ours = step(compile_for("triton-interpret", called), *used)  # type: ignore[arg-type]
    close(ours, step(called, *used), step(called, *(t.double() for t in used)))


def test_every_kind_of_state_over_long_rows() -> None:
    """Sums, maxima, value and index, variances over columns beside two reductions of every row."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.softmax(x, -1)
        return [y, y.sum(0), x.amax(0)]

    def others(x: torch.Tensor) -> list[torch.Tensor]:
        y = x / x.abs().amax(-1, keepdim=True)
        return [y, x.var(0), x.argmax(0)]

    x = torch.randn(36, 9000, generator=torch.Generator().manual_seed(2))
    for f in (function, others):
        ours, eager, exact = compile_for("triton-interpret", f)(x), f(x), f(x.double())
        close(ours[:2], eager[:2], exact[:2])  # type: ignore[index]
        assert torch.equal(ours[2], eager[2])  # type: ignore[index]


def test_states_over_long_rows_are_the_first_thing_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiles.test_spills import spilling_if

    spilling_if(monkeypatch, lambda source: "c1[14336]: held" in source.text)
    with FakeTensorMode():
        made = trained(131072, 14336, torch.bfloat16)()
        explanation = onepass.explain(layer_norm, *made, target="sm_90", options={"cache": False})
    graph = next(g for g in explanation.graphs if g.direction == "backward")
    assert len(graph.kernels) == 3 and "c1[14336]: held" not in graph.kernels[0].schedule
    assert not any("operations, limit" in d.reason for d in graph.decisions)


# --- scales along both axes ---


def both_scales(x: torch.Tensor, block: int = 32) -> tuple[torch.Tensor, ...]:
    m, n = x.shape
    rows = x.view(m, n // block, block).float()
    row_scale = rows.abs().amax(-1, keepdim=True) / 127
    by_row = (rows / row_scale).round().clamp(-127, 127).to(torch.int8).view(m, n)
    columns = x.view(m // block, block, n).float()
    column_scale = columns.abs().amax(1, keepdim=True) / 127
    by_column = (columns / column_scale).round().clamp(-127, 127).to(torch.int8).view(m, n)
    return by_row, row_scale.squeeze(-1), by_column.t().contiguous(), column_scale.squeeze(1)


def narrowed_with_its_largest(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.to(torch.bfloat16)
    return y, x.abs().max(), y.t().contiguous()


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.abs().max(), x.abs().mean(), x.square().mean()


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Make:
    return lambda: [torch.empty(rows, columns, dtype=dtype)]


@pytest.mark.parametrize("chip", CHIPS)
def test_scales_along_both_axes_are_one_kernel(chip: str) -> None:
    graph = graph_of(both_scales, matrix(16384, 8192), chip)
    (kernel,) = graph.kernels
    assert kernel.source.count("tl.load") == 1
    assert kernel.schedule.count("tile 2") == 2 and kernel.schedule.count("held") == 2  # 64 x 64
    assert graph.bytes_moved <= 1.01 * graph.bytes_minimum


def test_several_statistics_read_once() -> None:
    graph = graph_of(statistics, matrix(16384, 8192))
    assert len(graph.kernels) == 2
    assert graph.bytes_moved <= 1.01 * graph.bytes_minimum


@pytest.mark.parametrize("rows", [4096, 16384])
def test_a_transposed_copy_beside_a_reduction_is_stored_in_tiles(rows: int) -> None:
    graph = graph_of(narrowed_with_its_largest, matrix(rows, 8192, torch.float32))
    first, last = graph.kernels
    assert first.source.count("tl.load") == 1 and last.bytes_read < 1 << 17
    assert f"c0[{rows}]: grid x tile {32 if rows > 4096 else 16}; c1[8192]: swept by" in first.schedule


@pytest.mark.parametrize("target", ["cpu", "triton-interpret"])
@pytest.mark.parametrize("function", [both_scales, narrowed_with_its_largest, statistics])
@pytest.mark.parametrize("shape", [(512, 192), (96, 416), (64, 64)])
def test_values_along_both_axes(function: Callable[..., Sequence[torch.Tensor]], shape: Any, target: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    x = x if function is narrowed_with_its_largest else x.bfloat16()
    ours, eager = compile_for(target, function)(x), function(x)
    for a, b in zip(ours, eager, strict=True):  # type: ignore[call-overload]
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=torch.finfo(torch.bfloat16).eps if function is statistics else 0, atol=0)


# --- batch norm ---


def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
    return F.batch_norm(x, mean, var, w, b, True, 0.1, 1e-5)


def images(shape: tuple[int, ...], last: bool) -> Make:
    def make() -> list[torch.Tensor]:
        x = torch.empty(shape).to(memory_format=torch.channels_last if last else torch.contiguous_format)
        channels = [torch.empty(shape[1]) for _ in range(4)]
        return [x.requires_grad_(), *(c.requires_grad_() for c in channels[:2]), *channels[2:]]

    return make


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(64, 256, 56, 56), (32, 64, 112, 112)])
def test_batch_norm_is_statistics_and_a_pass(shape: tuple[int, ...], last: bool, direction: str) -> None:
    graph = graph_of(batch_norm, images(shape, last), direction=direction)
    size = 4 * shape[0] * shape[1] * shape[2] * shape[3]
    if len(graph.kernels) == 1:  # a channel is a program of many threads that sweeps it twice
        (kernel,) = graph.kernels
        assert not last and kernel.schedule.endswith(("16 warps", "32 warps")) and "num_stages=3" in kernel.source
        return
    partial, finish, whole = graph.kernels
    reads = 1 if direction == "forward" else 2
    assert partial.bytes_read <= 1.01 * reads * size and finish.bytes_read < size / 50
    assert whole.bytes_read + whole.bytes_written <= 1.01 * (reads + 1) * size
    assert "swept" not in whole.schedule  # small results beside the large one do not decide who runs


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(8, 6, 40, 48), (16, 24, 7, 7)])
def test_batch_norm_values(shape: tuple[int, ...], last: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x, gradient = (torch.randn(shape, generator=generator) * 2 + 3 for _ in range(2))
    if last:
        x, gradient = (v.to(memory_format=torch.channels_last) for v in (x, gradient))
    channels = [torch.rand(shape[1], generator=generator) + 0.5 for _ in range(4)]

    def trained_step(function: Callable[..., Any], *tensors: torch.Tensor) -> list[torch.Tensor]:
        running = [t.clone() for t in tensors[3:5]]
        leaves = [t.clone().requires_grad_() for t in tensors[:3]]
        y = function(*leaves, *running)
        return [y.detach(), *running, *torch.autograd.grad(y, leaves, tensors[5])]

    tensors = [x, *channels, gradient]
    ours = trained_step(compile_for("triton-interpret", batch_norm), *tensors)
    close(ours, trained_step(batch_norm, *tensors), trained_step(batch_norm, *(t.double() for t in tensors)))


def test_small_results_beside_large_ones() -> None:
    """Stored once each, by the programs that have the first positions of what they lack."""

    def function(x: torch.Tensor, row: torch.Tensor, one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = row.exp() + one
        return x * scale, scale, one * 2, (x * scale).t().contiguous()

    x, row, one = torch.randn(300, 70), torch.randn(70), torch.randn(())
    ours = compile_for("triton-interpret", function)(x, row, one)
    for a, b in zip(ours, function(x, row, one), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(a, b)


def test_small_results_beside_an_empty_one_are_stored() -> None:
    def function(x: torch.Tensor, one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x - one, one.sin()

    x, one = torch.randn(0, 4), torch.randn(())
    ours = compile_for("triton-interpret", function)(x, one)
    for a, b in zip(ours, function(x, one), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(a, b)
