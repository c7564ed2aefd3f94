"""The price of built kernels: what it must see, and the plans that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unbuilt import unbuilt
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.ir.time import Time, total_us

BF16 = torch.bfloat16


def planned(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[Any]:
    torch._dynamo.reset()
    with unbuilt(), FakeTensorMode(allow_non_fake_inputs=True):
        arguments = [torch.empty(s, dtype=dtype) for s in shapes]
        return onepass.explain(function, *arguments, target="sm_90", options={"cache": False, "tune": "off"}).kernels


def price_us(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> float:
    return float(sum(k.predicted_us for k in planned(function, *shapes, dtype=dtype)))


def test_the_largest_limit_decides_and_others_add_a_little() -> None:
    time = Time(memory_us=100.0, scalar_us=50.0, serial_us=20.0, launch_us=3.0)
    assert 105.0 < time.total_us < 110.0 and time.bound == "memory"
    assert total_us([time, time]) == 2 * time.total_us


def test_one_program_on_a_processor_overlaps_with_nothing() -> None:
    alone, many = (Time(memory_us=100.0, serial_us=80.0, at_once=n) for n in (1.0, 8.0))
    assert alone.total_us > 1.2 * many.total_us


@pytest.mark.parametrize(
    ("function", "shapes", "floor_us"),
    [
        (lambda x, y: x + y, [(8192, 4096), (8192, 4096)], 47.6),
        (lambda x: F.softmax(x, -1), [(16384, 4096)], 63.5),
        (lambda x, w: F.rms_norm(x, (8192,), w), [(16384, 8192), (8192,)], 127.0),
        (lambda x: x.sum(0), [(32768, 4096)], 63.5),
    ],
)
def test_kernels_near_the_bandwidth_are_priced_near_it(function: Any, shapes: Any, floor_us: float) -> None:
    """The floor is bytes over 4.23 TB/s; on one H200 each of these took 1.02 to 1.15 of it."""
    assert floor_us < price_us(function, *shapes) < 1.6 * floor_us


def test_operations_count() -> None:
    cheap = price_us(lambda x: x + 1, (8192, 4096))
    dear = price_us(lambda x: torch.sin(torch.cos(torch.sin(x))), (8192, 4096))
    assert dear > 2 * cheap


def programs_of(schedule: str) -> int:
    """Positions of the axes that programs are numbered by, tiles aside."""
    total = 1
    for part in schedule.split("; "):
        if ": grid" in part:
            total *= int(part[part.index("[") + 1 : part.index("]")])
    return total


def test_a_loss_over_two_axes_has_a_program_for_every_few_rows() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (torch.logsumexp(x[:, :-1].float(), -1) * w).sum()

    kernels = planned(loss, (8, 1024, 32000), (8, 1023))
    assert programs_of(kernels[0].schedule) >= 1000, kernels[0].schedule
    assert sum(k.predicted_us for k in kernels) < 200


def test_the_one_program_that_finishes_a_loss_has_as_many_threads_as_a_processor_takes() -> None:
    """With 256 threads the finish of 8192 states took 22 us on one H200: a thread waits for a few loads at a time."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (torch.logsumexp(x.float(), -1) * w).sum()

    _, finish = planned(loss, (8192, 32000), (8192,))
    assert finish.schedule.endswith("[8192]: held; 32 warps"), finish.schedule


def test_results_without_a_common_grid_are_apart() -> None:
    def both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        k = k[:, :, None].expand(8, 8, 2, 1024, 64).reshape(8, 16, 1024, 64)
        return q * 2, k + 1

    (kernel,) = planned(both, (8, 1024, 16, 64), (8, 8, 1024, 64))  # one launch, each with its own part of the grid
    assert " | " in kernel.schedule and "swept" not in kernel.schedule


def test_labels_that_are_masked_do_not_keep_a_one_hot_in_memory() -> None:
    def loss(x: Tensor) -> Tensor:
        labels = torch.zeros(8, 1024, dtype=torch.int64)
        return F.cross_entropy(x[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())

    torch._dynamo.reset()
    with unbuilt(), FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(8, 1024, 32000, dtype=BF16, requires_grad=True)
        e = onepass.explain(loss, x, target="sm_90", options={"cache": False, "tune": "off"})
    (backward,) = (g for g in e.graphs if g.direction == "backward")
    assert sum(k.bytes_written for k in backward.kernels) <= 1.01 * 8 * 1024 * 32000 * 2


def test_reductions_that_keep_different_axes_are_apart_on_a_cpu() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.abs().amax(), x.mean(), (x * y).sum(0)

    with FakeTensorMode(allow_non_fake_inputs=True):
        x, y = torch.empty(4096, 4096), torch.empty(4096, 4096)
        kernels = onepass.explain(function, x, y, options={"cache": False}).kernels
    assert any("mul" in k.name and "amax" not in k.name for k in kernels), [k.name for k in kernels]


def test_the_plan_carries_the_schedule_that_was_priced() -> None:
    from onepass import pipeline
    from onepass.schedule.group import schedule_group

    seen: list[tuple[str, str]] = []

    def watch(group: Any, target: Any, name: str) -> Any:
        built = schedule_group(group, target, name)
        if group.schedule is not None and not group.products:
            seen.append((str(group.schedule), str(built.kernels[0].schedule)))
        return built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "schedule_group", watch)
        planned(lambda x, w: F.layer_norm(x, (1024,), w).sum(0), (4096, 1024), (1024,))
    assert seen and all(carried == built for carried, built in seen)


def test_wide_integers_take_longer() -> None:
    def cubes(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x * x + 3
        return x

    narrow, wide = (price_us(cubes, (8192, 8192), dtype=d) for d in (torch.int32, torch.int64))
    assert wide > 1.9 * narrow

    def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
        for _ in range(8):
            x = (x * 1.5).to(dtype).float()
        return x

    narrow, wide = (
        price_us(lambda x, d=d: rounded(x, d), (8192, 8192), dtype=BF16) for d in (torch.int32, torch.int64)
    )
    assert wide > 2 * narrow
