"""The rules of decision 6: what a GPU program takes, by shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass

pytest.importorskip("triton")
Make = Callable[[], list[torch.Tensor]]


def kernels(function: Callable[..., Any], make: Make, direction: str = "inference") -> list[Any]:
    with FakeTensorMode():
        explanation = onepass.explain(function, *make(), target="sm_90", options={"cache": False})
    return [k for g in explanation.graphs if g.direction == direction for k in g.kernels]


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, w)


def trained(rows: int, columns: int) -> Make:
    return lambda: [torch.empty(s).requires_grad_() for s in ((rows, columns), (columns,))]


def test_rows_and_columns_too_many_to_hold_are_two_kernels() -> None:
    """One program would sweep columns within rows: it took a hundred times as long."""
    for rows, columns in ((30, 4097), (30, 1000)):
        found = kernels(norm, trained(rows, columns), "backward")
        parts = [part for k in found for part in k.schedule.split(" | ")]  # they may share a launch
        assert len(parts) == 2 and not any(part.count("swept") > 1 for part in parts)


def test_rows_that_start_anywhere_carry_nothing() -> None:
    aligned = [k.schedule for k in kernels(norm, trained(20000, 4096), "backward")]
    odd = [k.schedule for k in kernels(norm, trained(20000, 4097), "backward")]
    assert any("split over c0" in s and "held" in s for s in aligned)
    assert not any("split over c0" in s and "held" in s for s in odd)


def test_neighbours_in_memory_are_neighbouring_programs() -> None:
    def function(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * row)

    make = lambda: [torch.empty(1000, 8192).t(), torch.empty(1000)]  # noqa: E731
    (kernel,) = kernels(function, make)
    # Contiguous along the first dimension, so its tiles are the ones counted fastest.
    assert "g1 = program1 % 8\n" in kernel.source and "c0[8192]: grid x tile 1024" in kernel.schedule


def test_warps_lie_along_the_contiguous_axis() -> None:
    make = lambda: [torch.empty(7, 1_000_000, dtype=torch.float16).t()]  # noqa: E731
    (kernel,) = kernels(lambda x: x.sum(-1), make)
    assert "tile 2048" in kernel.schedule and "4 warps" in kernel.schedule  # 32 threads x 16 elements x 4


def test_loads_come_before_random_numbers() -> None:
    make = lambda: [torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(2)]  # noqa: E731
    (kernel,) = kernels(lambda x, y: F.dropout(x, 0.1) + y, make)
    lines = kernel.source.splitlines()
    draw = next(n for n, line in enumerate(lines) if "op_random4(" in line and "import" not in line)
    loads = [n for n, line in enumerate(lines) if "tl.load" in line]
    assert len(loads) >= 2 and max(loads) < draw


def test_rows_across_lines_of_memory_are_taken_many_at_once() -> None:
    """Swept twice and too long to hold: one row a program would read two bytes of every line."""
    make = lambda: [torch.empty(4097, 65520, dtype=torch.float16).t(), torch.empty(4097, dtype=torch.float16)]  # noqa: E731
    (kernel,) = kernels(norm, make)
    assert "c0[65520]: grid x tile 64; c1[4097]: swept by 64" in kernel.schedule
    few = lambda: [torch.empty(4097, 132, dtype=torch.float16).t(), torch.empty(4097, dtype=torch.float16)]  # noqa: E731
    assert all("c0[132]: grid;" in k.schedule or "swept" not in k.schedule for k in kernels(norm, few))


def test_the_last_tile_of_columns_is_not_mostly_empty() -> None:
    make = lambda: [torch.empty(50257, 132, dtype=torch.float16).t()]  # noqa: E731
    partial, _ = kernels(lambda x: x.sum(-1), make)
    assert "c0[132]: grid x tile 64" in partial.schedule


def test_few_rows_leave_their_tiles_to_columns() -> None:
    def function(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * row)

    make = lambda: [torch.empty(3, 262148)[:, 1:262145], torch.empty(262144)]  # noqa: E731
    (kernel,) = kernels(function, make)
    assert "c1[262144]: grid x tile 1024" in kernel.schedule


def test_long_rows_that_nearly_fit_the_cache_have_a_program_each() -> None:
    first, *_ = kernels(norm, trained(5341, 50257), "backward")
    assert "c0[5341]: grid;" in first.schedule and "split" not in first.schedule


def test_long_rows_that_few_programs_would_read_twice_are_shared_out() -> None:
    """The reductions come first; what is computed from them, and the sums over rows, are one more pass."""
    first, *_, second = kernels(norm, trained(132, 262144), "backward")
    assert "c0[132]: grid; c1[262144]: swept" in first.schedule
    assert "c0[132]: swept by 16; c1[262144]: grid x tile 128" in second.schedule
    assert len(kernels(norm, trained(1320, 262144), "forward")) == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_long_rows_across_memory_are_not_swept_twice(transposed: bool) -> None:
    """Centred rows: what needs the mean is a kernel of its own only where reading the rows again costs as much."""
    with FakeTensorMode():
        x = torch.empty(4097, 65520, dtype=torch.float16).t() if transposed else torch.empty(65520, 4097).half()
        e = onepass.explain(lambda x: x - x.mean(-1, keepdim=True), x, target="sm_90", options={"cache": False})
    assert (len(e.kernels) > 1) is transposed
