"""Odd rows without gaps are walked as one axis on chips that load vectors; values stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onepass

pytest.importorskip("triton")


def affine(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return torch.relu(x * row + column)


def inputs(rows: int, columns: int, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)
    return x, torch.randn(columns), torch.randn(rows, 1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(37, 41), (5, 4097), (1, 7), (3, 1), (1001, 3)])
def test_values(rows: int, columns: int, transposed: bool) -> None:
    given = inputs(rows, columns, transposed)
    options = {"target": "triton-interpret", "cache": False, "strict": True}
    assert torch.equal(torch.compile(affine, backend="onepass", options=options)(*given), affine(*given))


def schedule_of(*given: Tensor) -> str:
    torch._dynamo.reset()  # or strides that differ from the last call's are symbols
    return onepass.explain(affine, *given, target="sm_90", options={"cache": False}).graphs[0].kernels[0].schedule


def test_odd_rows_are_one_axis() -> None:
    assert schedule_of(*inputs(1001, 4097)).startswith("c0c1[4101097]")
    assert schedule_of(*inputs(1001, 4097, transposed=True)).startswith("c1c0[4101097]")


def test_rows_that_start_on_vectors_stay_rows() -> None:
    assert schedule_of(*inputs(1001, 4096)).startswith("c0[1001]")


def test_rows_with_gaps_stay_rows() -> None:
    x, row, column = inputs(1001, 4100)
    assert schedule_of(x[:, 1:4098], row[:4097], column).startswith("c0[1001]")
