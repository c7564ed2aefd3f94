"""Tiles of a product leave states of its reductions: right values whatever the numbers, sizes and types."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onepass.planner.contraction_states as planning
from onepass.backend import record_compilations
from tests.contractions.judging import interpreted, judge
from tests.contractions.row_spellings import matrices
from tests.contractions.state_spellings import STATES, both_ways

pytest.importorskip("triton")
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """These sizes are for an interpreter: what can leave states does. What pays is `test_state_planning.py`."""
    monkeypatch.setattr(planning, "_apart", lambda *_: (math.inf, 0.0))
    monkeypatch.setattr(planning, "row_time", lambda *_: math.inf)


def together(function: Callable[..., object], *arguments: Tensor) -> None:
    """The values are right, no product is left to the library, and tiles leave states."""
    with record_compilations() as records:
        judge(interpreted(function), function, *arguments)
    assert any(d.kind == "tiles" and d.accepted for r in records for d in r.decisions)
    assert not [e.op for r in records for e in r.externs]
    assert any(kernel.name.endswith("_finish") for r in records for kernel in r.kernels)


@pytest.mark.parametrize("name", STATES)
def test_values(name: str) -> None:
    function, arguments = STATES[name]
    together(function, *arguments())
