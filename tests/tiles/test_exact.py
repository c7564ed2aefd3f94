"""Comparing floats with floats: what is computed twice has the same bits, on every target and in both graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onepass

pytest.importorskip("triton")


@pytest.fixture
def machine_code(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The PTX of every kernel built in this test."""
    import triton

    found: list[str] = []
    compile_kernel = triton.compile

    def compile_and_keep(*arguments: Any, **settings: Any) -> Any:
        built = compile_kernel(*arguments, **settings)
        found.append(built.asm["ptx"])
        return built

    monkeypatch.setattr(triton, "compile", compile_and_keep)
    return found


def contracted(text: str) -> bool:
    return "fma.rn.f32" in text or "--fmad" in text


def explain(function: Any, *shapes: tuple[int, ...]) -> Any:
    tensors = [torch.randn(s).requires_grad_() for s in shapes]
    return onepass.explain(function, *tensors, target="sm_90", options={"cache": False})


def test_products_and_sums_are_contracted_where_nothing_is_compared(machine_code: list[str]) -> None:
    explain(lambda x, y: (x * y + x).sin(), (64, 64), (64, 64))
    assert any(contracted(text) for text in machine_code)


def test_the_gradient_of_a_maximum_finds_its_element(machine_code: list[str]) -> None:
    """Forward has no comparison of its own; backward computes the product and the sum again and compares."""
    explanation = explain(lambda x, y: (x * y + x).amax(-1), (64, 64), (64, 64))
    assert {g.direction for g in explanation.graphs} == {"forward", "backward"}
    assert machine_code and not any(contracted(text) for text in machine_code)


def test_a_comparison_of_ones_own(machine_code: list[str]) -> None:
    explain(lambda x, y: ((x * y + x) == (x * y + x).amax()).sum(), (64, 64), (64, 64))
    assert machine_code and not any(contracted(text) for text in machine_code)
