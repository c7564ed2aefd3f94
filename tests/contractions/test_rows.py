"""Rows of a product, reduced inside its kernel: right values, one kernel where that is meant, else as before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.backend import record_compilations
from tests.contractions.judging import explained, interpreted, judge, products_left
from tests.contractions.row_spellings import HELD, OTHERS, SWEPT, matrices

pytest.importorskip("triton")
INFINITY, NAN = float("inf"), float("nan")
PROGRAMS = {**{f"held {n}": p for n, p in HELD.items()}, **{f"swept {n}": p for n, p in SWEPT.items()}}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_product_is_left_to_the_library(name: str) -> None:
    function, arguments = PROGRAMS[name]
    e = explained(function, *arguments())
    assert not products_left(e), [d.reason for d in e.rejected]
    assert any(d.kind == "rows" and d.accepted for g in e.graphs for d in g.decisions)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str) -> None:
    function, arguments = PROGRAMS[name]
    with record_compilations() as records:
        judge(interpreted(function), function, *arguments())
    assert any(d.kind == "rows" and d.accepted for r in records for d in r.decisions)
    assert not [e.op for r in records for e in r.externs]


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    function, arguments = OTHERS[name]
    judge(interpreted(function), function, *arguments())
