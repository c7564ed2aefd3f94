"""Statistics of a product at real sizes: when its tiles leave states, why, and kernels that fit chips not here."""

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

import onepass
import onepass.planner.contractions as planning
from onepass.ir.target import find_target
from tests.chips import CHIPS
from tests.contractions.judging import products_left
from tests.contractions.state_spellings import activated, batch_norm, batch_statistics, beside, both_ways
from tests.contractions.test_row_planning import arg_max, layer_norm, log_sum_exp, planned, softmax


def row_norms(x: Tensor, w: Tensor) -> Tensor:
    return torch.linalg.vector_norm((x @ w.t()).float(), dim=-1)


def largest(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w.t()
    return y, y.abs().max()


def quantised(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled by the largest of all: what is scaled waits for every tile."""
    y = x @ w.t()
    scale = 448 / y.abs().max().float()
    return (y * scale).to(torch.float8_e4m3fn), scale


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x @ w.t(), (w.shape[0],))


def answers(e: onepass.Explanation) -> list[tuple[bool, str]]:
    return [(d.accepted, d.reason) for g in e.graphs for d in g.decisions if d.kind == "tiles"]


def times(reason: str) -> tuple[float, float]:
    """The predicted times that decided; of the first perhaps only what it takes at least."""
    both = r"predicted ([\d.]+) us with states of tiles, ([\d.]+) us by the library and one more"
    bound = r"at least ([\d.]+) us with states of tiles, predicted ([\d.]+) us by the library and one more"
    numbers = re.match(both, reason) or re.match(bound, reason)
    assert numbers, reason
    return float(numbers[1]), float(numbers[2])


# --- when ---

PAYS = [
    (beside, 65536, 8192, 512),
    (row_norms, 65536, 8192, 512),
    (row_norms, 65536, 8192, 128),
    (largest, 16384, 8192, 512),
    (quantised, 16384, 8192, 512),
    (both_ways, 65536, 8192, 256),
]


@pytest.mark.parametrize(("function", "rows", "columns", "k"), PAYS)
def test_states_where_they_pay(function: Callable[..., Any], rows: int, columns: int, k: int) -> None:
    """The product is stored once if somebody wants it, and nobody reads it for its statistics."""
    e = planned(function, rows, columns, k)
    assert not products_left(e) and answers(e)[-1][0], answers(e)
    together, apart = times(answers(e)[-1][1])
    assert together < apart
    first = e.kernels[0]
    assert first.name.endswith("_partial") and "columns by " in first.schedule
    finishes = [kernel for kernel in e.kernels if kernel.name.endswith("_finish")]
    assert finishes and all(kernel.bytes_read < rows * columns // 4 for kernel in finishes)
    assert first.bytes_written > rows * columns or function in (row_norms, both_ways)


def test_nothing_of_the_product_is_stored_if_only_statistics_are_wanted() -> None:
    e = planned(row_norms, 65536, 8192, 512)
    assert sum(kernel.bytes_written for kernel in e.kernels) < 65536 * 8192 // 16
    assert len(e.kernels) == 2


STAYS = [
    (beside, 65536, 8192, 4096),  # a tenth of a long product is more than one read of its result
    (row_norms, 65536, 8192, 4096),
    (largest, 16384, 8192, 4096),
    (layer_norm, 16384, 4096, 4096),
    (layer_norm, 16384, 4096, 256),  # its kernel reads the product anyway, once
    (rms_norm, 65536, 8192, 128),
    (softmax, 4096, 4096, 64),
    (batch_statistics, 65536, 4096, 256),  # three numbers for each state slow the product down by half
    (batch_norm, 65536, 1024, 128),
]


@pytest.mark.parametrize(("function", "rows", "columns", "k"), STAYS)
def test_the_library_where_they_do_not(function: Callable[..., Any], rows: int, columns: int, k: int) -> None:
    e = planned(function, rows, columns, k)
    assert len(products_left(e)) == 1 and len(e.kernels) <= 3
    assert not any(accepted for accepted, _ in answers(e))
    together, apart = times(answers(e)[-1][1])
    assert together > apart


@pytest.mark.parametrize(("function", "columns"), [(row_norms, 64), (row_norms, 128), (log_sum_exp, 128)])
def test_one_kernel_for_whole_rows_where_it_is_faster(function: Callable[..., Any], columns: int) -> None:
    e = planned(function, 65536, columns, 128)
    assert not products_left(e) and len(e.kernels) == 1 and f"[{columns}]: held" in e.kernels[0].schedule
    accepted, reason = answers(e)[0]
    whole = re.search(r", ([\d.]+) us in one kernel$", reason)
    assert not accepted and whole, reason
    together, apart = times(reason)
    assert apart > together > float(whole[1])


def test_states_where_they_are_faster_than_a_sweep() -> None:
    e = planned(log_sum_exp, 16384, 32768, 64)
    assert not products_left(e) and answers(e)[-1][0] and e.kernels[0].name.endswith("_partial")


def test_a_region_that_is_refused_says_why() -> None:
    e = planned(softmax, 4096, 4096, 64)
    assert answers(e)[0] == (False, "a result has more than the reductions leave")


def test_on_a_cpu_nothing_changes() -> None:
    e = planned(beside, 64, 48, 32, target="cpu")
    assert products_left(e) and not answers(e)


# --- kernels that fit ---


@pytest.fixture
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = replace(planning.TILES, without=lambda *_: (math.inf, 0.0), rival=None)
    monkeypatch.setattr(planning, "REDUCED", (tiles, planning.ROWS))


def with_bias(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return activated(x, w, torch.empty(w.shape[0], dtype=x.dtype))


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("function", [beside, row_norms, batch_statistics, both_ways, with_bias, log_sum_exp, arg_max])
def test_kernels_fit(function: Callable[..., Any], target: str, whatever_it_costs: None) -> None:
    """No spills, shared memory that is there, no atomics: the same numbers every time."""
    e = planned(function, 16384, 4096, 512, target=target, built=True)
    assert not products_left(e) and answers(e)[-1][0]
    for kernel in e.kernels:
        assert kernel.registers > 0 and kernel.spilled_bytes == 0, kernel.schedule
        assert kernel.shared_bytes <= find_target(target).shared_bytes, kernel.schedule
        assert "atomic" not in kernel.source


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_kernels_fit(
    target: str, precision: str, whatever_it_costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    e = planned(beside, 8192, 4096, 512, target=target, dtype=torch.float32, built=True)
    assert not products_left(e) and all(kernel.spilled_bytes == 0 for kernel in e.kernels)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_matrices_are_copied_by_hardware(target: str, whatever_it_costs: None) -> None:
    """The products' kernel is the one it is without statistics: programs stay, blocks by descriptors."""
    (first, *_) = planned(beside, 65536, 8192, 256, target=target).kernels
    assert "tl.num_programs(0), flatten=True" in first.source
    assert first.source.count(".load([") == 2 and ".store([" in first.source
