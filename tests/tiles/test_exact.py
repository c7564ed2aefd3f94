"""Comparing floats with floats: what is computed twice has the same bits, on every target and in both graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onepass

pytest.importorskip("triton")
from onepass.runtime import triton_kernels
from onepass.runtime.triton_private import run_stages


@pytest.fixture
def machine_code(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The PTX of every kernel built in this test."""
    found: list[str] = []

    def run_and_keep(*arguments: Any) -> Any:
        built = run_stages(*arguments)
        found.append(built.texts["ptx"])
        return built

    monkeypatch.setattr(triton_kernels, "run_stages", run_and_keep)
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


def test_merging_moments_does_not_depend_on_the_order() -> None:
    """Threads of a GPU merge their states in opposite orders, and all of them go on with what they got."""
    from onepass.ir.source import KernelSource
    from onepass.runtime.triton_interpret import interpreted

    names = ["mean", "m2", "count"]
    lines = ["    at = tl.arange(0, 4096)"]
    lines += [f"    {n}{k} = tl.load(state + {4096 * (3 * k + i)} + at)" for k in (0, 1) for i, n in enumerate(names)]
    for k, (a, b) in enumerate(((0, 1), (1, 0))):
        states = ", ".join(f"{n}{j}" for j in (a, b) for n in names)
        lines += [f"    x, y, z = op_join_welford({states})"]
        lines += [f"    tl.store(out + {4096 * (3 * k + i)} + at, {v})" for i, v in enumerate("xyz")]
    text = "def kernel(out, state):\n" + "\n".join(lines)
    source = KernelSource("join", "triton", text, "kernel", "", 2, 0, False, ("*fp32", "*fp32"))
    state, out = torch.rand(2, 3, 4096), torch.empty(2, 3, 4096)
    state[:, 0] = state[:, 0] * 4 - 2
    state[:, 2] = (state[:, 2] * 7).floor()  # empty ones, too
    state[:, :2] *= state[:, 2:] > 0
    interpreted(source)(0)[0](out.data_ptr(), state.data_ptr(), 1, 0)
    assert torch.equal(out[0], out[1])
    mean, m2, count = state.double().unbind(1)
    total = count.sum(0).clamp(min=1)
    exact = (mean * count).sum(0) / total
    torch.testing.assert_close(out[0, 0].double(), exact, rtol=1e-6, atol=1e-6)
    spread = m2.sum(0) + (count * (mean - exact).square()).sum(0)
    torch.testing.assert_close(out[0, 1].double(), spread, rtol=1e-5, atol=1e-5)
