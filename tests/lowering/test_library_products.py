"""Products of float32 matrices on a CPU where oneDNN multiplies with wider vectors than MKL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import onepass
from onepass.backend import record_compilations
from onepass.ir import target
from onepass.ir.program import Extern

from .tracing import Traced

LINEAR = "mkldnn::_linear_pointwise"
SIDE = 131  # 128 rows of it are enough work


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(sum(shape)))


def products(traced: Traced) -> list[str]:
    """The names of the operations that multiply."""
    return [s.target._schema.name for s in traced.program.statements if isinstance(s, Extern)]


LEFT, RIGHT, BIAS = numbers(128, SIDE), numbers(SIDE, SIDE), numbers(SIDE)
# name -> (function, its operands, whether oneDNN multiplies)
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], bool]] = {
    "plain": (torch.mm, (LEFT, RIGHT), True),
    "transposed": (torch.mm, (LEFT, numbers(SIDE, SIDE).t()), True),
    "bias": (torch.addmm, (BIAS, LEFT, RIGHT), True),
    "linear": (torch.nn.functional.linear, (numbers(2, 64, SIDE), RIGHT, BIAS), True),
    "part of a matrix": (lambda x, y: torch.mm(x, y[7:]), (LEFT, numbers(SIDE + 7, SIDE)), True),
    "part of a row": (lambda x, y: torch.mm(x, y[:, 7:]), (LEFT, numbers(SIDE, SIDE + 7)), False),
    "columns on the left": (torch.mm, (numbers(SIDE, 128).t(), RIGHT), True),
    "columns on the left, few on the right": (torch.mm, (numbers(SIDE, 128).t(), numbers(SIDE, 127)), False),
    "many columns on the left": (torch.mm, (numbers(SIDE, 1 << 14).t(), numbers(SIDE, 131)), False),
    "a bias for each element": (torch.addmm, (LEFT, LEFT, RIGHT), False),
    "a scaled bias": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5), (BIAS, LEFT, RIGHT), False),
    "every second bias": (lambda b, x, y: torch.addmm(b[::2], x, y), (numbers(2 * SIDE), LEFT, RIGHT), False),
    "little work": (torch.mm, (numbers(127, 128), numbers(128, 128)), False),
    "few rows": (torch.mm, (numbers(3, 1024), numbers(1024, 1024)), False),
    "no depth": (torch.mm, (numbers(2048, 0), numbers(0, 2048)), False),
    "float64": (torch.mm, (LEFT.double(), RIGHT.double()), False),
    "bfloat16": (torch.mm, (LEFT.bfloat16(), RIGHT.bfloat16()), False),
}


@pytest.mark.parametrize("name", CASES)
def test_dense_matrices_with_enough_work_go_to_onednn(name: str) -> None:
    function, operands, expected = CASES[name]
    traced = Traced(lambda *xs: [function(*xs)], wide_products=True)
    (result,) = traced(*operands)
    assert products(traced) == [LINEAR] if expected else LINEAR not in products(traced)
    assert expected == any("oneDNN" in e.why for e in traced.program.externs())
    torch.testing.assert_close(result, function(*operands))
    exact = function(*(x.double() for x in operands))
    assert result.stride() == function(*operands).stride()
    if result.dtype is torch.float32 and result.numel():
        assert (result - exact).abs().max() <= 1e-6 * exact.abs().max() * SIDE**0.5


def test_elsewhere_mkl_multiplies() -> None:
    traced = Traced(lambda x, y: [torch.mm(x, y)])
    traced(LEFT, RIGHT)
    assert products(traced) == ["aten::mm"]


def test_gradients() -> None:
    x, y, b = (t.clone().requires_grad_() for t in (LEFT, RIGHT, BIAS))
    traced = Traced(lambda b, x, y: [torch.addmm(b, x, y)], wide_products=True)
    (result,) = traced(b, x, y)
    got = torch.autograd.grad(result.square().sum(), (b, x, y))
    wide = [t.detach().double().requires_grad_() for t in (b, x, y)]
    exact = torch.autograd.grad(torch.addmm(*wide).square().sum(), wide)
    for mine, right in zip(got, exact, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("precision", ["fused", "eager"])
def test_one_program_serves_every_number_of_rows(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none; the second compilation finds the first one's program in the cache."""
    known = target.targets()
    monkeypatch.setattr(target, "targets", lambda: {**known, "cpu": replace(known["cpu"], wide_products=True)})
    operands: dict[str, Any] = {"strict": True, "precision": precision, "target": "cpu"}
    for _ in range(2):
        torch._dynamo.reset()
        with record_compilations() as records:
            run = onepass.jit(lambda x, y, b: torch.relu(torch.addmm(b, x, y)), dynamic=True, options=operands)
            for rows in (128, 5, 77, 0):
                x = numbers(rows, SIDE)
                torch._dynamo.maybe_mark_dynamic(x, 0)
                torch.testing.assert_close(run(x, RIGHT, BIAS), torch.relu(torch.addmm(BIAS, x, RIGHT)))
        assert records
