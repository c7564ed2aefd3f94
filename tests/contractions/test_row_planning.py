"""Rows of a product at real sizes: who multiplies, why, and kernels that fit chips that are not here."""

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
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
import onepass.planner.contractions as contractions
from onepass.ir.target import find_target
from tests.chips import CHIPS
from tests.contractions.judging import FREE, explained, products_left
from tests.unbuilt import unbuilt

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _whole_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loops over chunks of rows, which would take the library's products in."""
    monkeypatch.setattr("onepass.backend._loops", lambda *_: None)


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x @ w.t(), (w.shape[0],))


def residual_layer_norm(x: Tensor, w: Tensor) -> Tensor:
    residual = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype)
    return F.layer_norm(x @ w.t() + residual, (w.shape[0],))


def softmax(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).softmax(-1)


def log_sum_exp(x: Tensor, w: Tensor) -> Tensor:
    return torch.logsumexp(x @ w.t(), -1)


def arg_max(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).argmax(-1)


def contrast(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.t() / 0.07, torch.arange(x.shape[0]))


def cross_entropy(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.t(), torch.zeros(x.shape[0], dtype=torch.int64), reduction="none")


def planned(
    function: Callable[..., Any],
    *sizes: int,
    target: str = "sm_90",
    dtype: torch.dtype = torch.bfloat16,
    built: bool = False,
) -> onepass.Explanation:
    """A program of matrices without contents: rows x k, columns x k."""
    rows, columns, k = sizes
    with FakeTensorMode():
        x, w = (torch.empty(n, k, dtype=dtype) for n in (rows, columns))
        return explained(function, x, w, target=target, built=built)


def answers(e: onepass.Explanation, *kinds: str) -> list[tuple[bool, str]]:
    """Whether rows are reduced by the product's kernel, and why; `kinds`: other ways than to own whole rows."""
    return [(d.accepted, d.reason) for g in e.graphs for d in g.decisions if d.kind in ("rows", *kinds)]


# --- who multiplies ---

PAYS = [
    (layer_norm, 65536, 128, 128),
    (residual_layer_norm, 65536, 256, 128),
    (softmax, 65536, 64, 256),
    (log_sum_exp, 16384, 32768, 128),
    (arg_max, 65536, 256, 32),
    (contrast, 16384, 16384, 128),
    (cross_entropy, 16384, 16384, 128),
]


@pytest.mark.parametrize(("function", "rows", "columns", "k"), PAYS)
def test_one_kernel_where_it_pays(function: Callable[..., Any], rows: int, columns: int, k: int) -> None:
    e = planned(function, rows, columns, k)
    found = answers(e, "tiles")
    assert not products_left(e) and any(accepted for accepted, _ in found), found


STAYS = [
    (layer_norm, 65536, 256, 1024),  # measured: 0.24 ms, 0.14 with the library
    (arg_max, 65536, 512, 64),
    (layer_norm, 65536, 256, 4096),
    (log_sum_exp, 8192, 128256, 4096),
    (cross_entropy, 8192, 32768, 4096),
]
ALONE = [
    (residual_layer_norm, 65536, 512, 1024),  # measured: no gain as one kernel
    (softmax, 64, 256, 4096),  # four programs could not read the matrix in time
]


@pytest.mark.parametrize(("function", "rows", "columns", "k"), STAYS)
def test_the_library_where_it_does_not(function: Callable[..., Any], rows: int, columns: int, k: int) -> None:
    assert len(products_left(dearer(function, rows, columns, k))) == 1


@pytest.mark.parametrize(("function", "rows", "columns", "k"), ALONE)
def test_reductions_are_another_kernel(function: Callable[..., Any], rows: int, columns: int, k: int) -> None:
    """Whoever multiplies: the library, or a kernel of the product with point-wise work or shared-out sums."""
    e = dearer(function, rows, columns, k)
    assert len(e.kernels) > 1 or products_left(e)


def dearer(function: Callable[..., Any], *sizes: int) -> onepass.Explanation:
    """A plan that does not reduce rows in the product's kernel; the reason has both times."""
    e = planned(function, *sizes)
    assert not any(accepted for accepted, _ in answers(e, "tiles"))
    numbers = re.match(
        r"predicted ([\d.]+) us in one kernel, ([\d.]+) us by the library and one more", answers(e)[0][1]
    )
    assert numbers and float(numbers[1]) > float(numbers[2]), answers(e)
    return e


def test_long_sums_do_not_sweep_columns() -> None:
    """Measured with columns swept in one kernel: 1.26 ms, 0.85 with the library. States of tiles are priced lower."""
    e = planned(log_sum_exp, 16384, 32768, 256)
    assert not any(accepted for accepted, _ in answers(e))
    assert not any("32768]: swept" in kernel.schedule for kernel in e.kernels if not products_left(e))


def test_long_rows_that_wait_for_their_reductions_stay() -> None:
    e = planned(softmax, 4096, 4096, 64)
    assert answers(e)[0] == (False, "a row of 4096 waits for its reductions, but only 512 fit a program")


@pytest.mark.parametrize(
    ("rows", "columns", "k", "library"),
    [(65536, 128, 32, False), (16384, 32768, 128, True), (16384, 32768, 4096, True)],
)
def test_scores_that_backward_wants(rows: int, columns: int, k: int, library: bool) -> None:
    """They are stored in any case: by the kernel that reduces them where that pays, and never read again."""
    with FakeTensorMode():
        x, w = (torch.empty(n, k, dtype=torch.bfloat16, requires_grad=True) for n in (rows, columns))
        with unbuilt():
            e = onepass.explain(cross_entropy, x, w, target="sm_90", options=FREE)
    (forward,) = (g for g in e.graphs if g.direction == "forward")
    assert [x.op for x in forward.externs] == (["aten.mm.default"] if library else [])
    assert (sum(kernel.bytes_read for kernel in forward.kernels) > rows * columns) == library


def test_what_the_next_kernel_does_anyway_is_not_a_tail() -> None:
    """The cast in front of a statistic is not stored by the product's kernel: float32 scores are twice as long."""
    e = planned(log_sum_exp, 8192, 128256, 4096)
    assert len(e.kernels) == 1 and len(products_left(e)) == 1


def test_a_residual_around_other_layers_waits_for_them() -> None:
    """What reads a product's rows, but also what is made of them by other products, is not in its kernel."""

    def blocks(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(2):
            x = x + F.rms_norm(x, (128,)) @ w[:128, :128]
            x = x + F.gelu(F.rms_norm(x, (128,)) @ w[:128]) @ w[:128].t()
        return x

    with FakeTensorMode(), torch.no_grad():
        x, w = torch.empty(4096, 128, dtype=torch.bfloat16), torch.empty(512, 512, dtype=torch.bfloat16)
        e = explained(blocks, x, w)
    assert any(accepted for accepted, _ in answers(e))


def test_on_a_cpu_nothing_changes() -> None:
    e = explained(layer_norm, torch.randn(64, 32), torch.randn(48, 32), target="cpu")
    assert products_left(e) and not answers(e)


# --- kernels that fit ---

HELD = [(layer_norm, 64), (residual_layer_norm, 128), (residual_layer_norm, 256), (softmax, 512)]
SWEPT = [(log_sum_exp, 64), (arg_max, 128), (cross_entropy, 256), (log_sum_exp, 512), (arg_max, 4096)]


@pytest.fixture
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = replace(contractions.ROWS, without=lambda *_: (math.inf, 0.0))
    monkeypatch.setattr(contractions, "REDUCED", (rows,))


def fits(e: onepass.Explanation, target: str) -> None:
    """No product of the library, no spills, shared memory that is there, nothing of rows x columns."""
    assert not products_left(e)
    for kernel in e.kernels:
        assert kernel.registers > 0 and kernel.spilled_bytes == 0, kernel.schedule
        assert kernel.shared_bytes <= find_target(target).shared_bytes, kernel.schedule


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize(("function", "columns"), HELD)
def test_held_rows_fit(function: Callable[..., Any], columns: int, target: str, whatever_it_costs: None) -> None:
    e = planned(function, 16384, columns, 1024, target=target, built=True)
    fits(e, target)
    assert len(e.kernels) == 1 and ": held" in e.kernels[0].schedule


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize(("function", "k"), SWEPT)
def test_swept_rows_fit(function: Callable[..., Any], k: int, target: str, whatever_it_costs: None) -> None:
    e = planned(function, 8192, 32768, k, target=target, built=True)
    fits(e, target)
    assert "swept by" in e.kernels[0].schedule
    assert sum(kernel.bytes_written for kernel in e.kernels) < 8192 * 32768 // 16  # states of rows: no logits


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_rows_fit(
    target: str, precision: str, whatever_it_costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    for function, columns, k in ((layer_norm, 128, 512), (log_sum_exp, 32768, 64)):
        fits(planned(function, 8192, columns, k, target=target, dtype=torch.float32, built=True), target)


def test_rows_in_batches_are_as_fast_as_rows() -> None:
    """A batch of sequences is one matrix where it lies in memory as one: its product is not dearer."""
    with FakeTensorMode(), torch.no_grad():
        x, w = torch.empty(8, 2048, 2048, dtype=torch.bfloat16), torch.empty(8192, 2048, dtype=torch.bfloat16)
        e = explained(lambda x, w: F.gelu(F.linear(x, w), approximate="tanh"), x, w)
    assert not products_left(e), [d.reason for d in e.rejected]
