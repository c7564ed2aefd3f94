"""The interpreter beside a compiled program: the first kernel that differs is named; values of lines are printed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.errors import InvalidOption, KernelMismatch
from onepass.explain import checking


def two_kernels(x: Tensor, w: Tensor) -> Tensor:
    y = torch.sin(x) * 2
    return torch.softmax(y @ w, -1)


def line(offset: int) -> str:
    return f"test_checking.py:{two_kernels.__code__.co_firstlineno + offset}"


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="onepass", options={"strict": True, **options})


def test_the_first_kernel_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(8, 4), torch.randn(4, 4)
    expected = two_kernels(x, w)
    torch.testing.assert_close(compiled(two_kernels, debug=5)(x, w), expected)
    original = checking.run_program

    def wrong(program: Any, args: Any) -> list[Any]:
        results = original(program, args)
        results[1][3, 1] += 1  # what the first kernel stores; the result of the second one is left as it is
        return results

    monkeypatch.setattr(checking, "run_program", wrong)
    torch._dynamo.reset()
    with pytest.raises(KernelMismatch) as raised:
        compiled(two_kernels, debug=5)(x, w)
    assert "aten.sin" in str(raised.value) and "[3, 1]" in str(raised.value) and "softmax" not in str(raised.value)


def test_values_of_lines_are_printed_and_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    x, w = torch.ones(8, 4), torch.eye(4)
    watched = compiled(two_kernels, watch=f"{line(1)}, nothing.py:1")
    torch.testing.assert_close(watched(x, w), two_kernels(x, w))
    printed = capsys.readouterr().err.splitlines()
    assert [text.split("  ")[1].split(" ")[0] for text in printed] == ["sin", "mul"]  # of a value that is never stored
    assert line(1) in printed[0] and "float32[8, 4] from 0.841471 to 0.841471: 0.841471, " in printed[0]
    watched(x.fill_(float("nan")), w)
    assert "32 NaN" in capsys.readouterr().err


def test_random_numbers_stay_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    found = []
    for options in ({}, {"watch": "test_checking.py:1-999"}):
        torch.manual_seed(3)
        found.append(compiled(dropped, **options)(torch.ones(64)))
    assert torch.equal(*found) and "uniform" in capsys.readouterr().err


def test_lines_must_be_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOption, match=r"model\.py:12"):
        onepass.jit(two_kernels, watch="forward")
    monkeypatch.setenv("ONEPASS_WATCH", "model")
    with pytest.raises(InvalidOption):
        onepass.jit(two_kernels)
