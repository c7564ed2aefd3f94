"""What a schedule leaves to no emitter: names, options of the compiler, sides of comparisons."""

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
from onepass import pipeline
from onepass.ir.dtypes import DType
from onepass.ir.expr import const
from onepass.ir.kernel import Kernel, Let, Loop, Tile, Var, walk
from onepass.ir.poly import Axis, Poly
from onepass.planner.chooser import Chooser
from onepass.schedule.sides import separate_sides

FREE = {"strict": True, "cache": False, "tune": "off"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that were scheduled in this test."""
    found: list[Kernel] = []
    for name in ("emit_c", "emit_triton"):
        real = getattr(pipeline, name)

        def emit(kernel: Kernel, *rest: Any, real: Callable[..., Any] = real) -> Any:
            found.append(kernel)
            return real(kernel, *rest)

        monkeypatch.setattr(pipeline, name, emit)
    return found


def explained(function: Callable[..., Any], *shapes: tuple[int, ...], target: str = "cpu", **how: Any) -> Any:
    with FakeTensorMode(), torch.no_grad():
        return onepass.explain(function, *(torch.empty(s, **how) for s in shapes), target=target, options=FREE)


NAMES: dict[str, tuple[Callable[..., Any], int, str]] = {
    "softmax": (lambda x: torch.softmax(x * 1.301, -1), 1, "onepass_max_exp_sum_div"),
    "arithmetic alone": (lambda x, y: (x + y) * 1.302, 2, "onepass_add_mul"),
    "nothing": (lambda x: x.t().contiguous(), 1, "onepass_copy"),
    "dropout": (lambda x: F.dropout(x * 1.303, 0.25), 1, "onepass_random"),
    "long": (
        lambda x: x.sin().cos().tanh().erf().exp().log1p().sqrt().asinh().atan().sinh().expm1(),
        1,
        "onepass_sin_cos_tanh_erf_exp_log1p_sqrt_asinh_atan_sinh",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    function, inputs, entry = NAMES[name]
    (kernel,) = explained(function, *[(64, 96)] * inputs).kernels
    assert re.search(rf"\bint {entry}\(", kernel.source)


def test_equal_layers_have_one_kernel_and_one_name(kernels: list[Kernel]) -> None:
    def layers(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.sort(x.tanh().cosh(), -1)[0]  # the library sorts: the layers stay apart
        return x

    e = explained(layers, (64, 96))
    assert len(e.kernels) == 3 and len({k.source for k in e.kernels}) == 1
    assert [k.entry for k in kernels] == ["onepass_tanh_cosh"]  # it is written once


DENORMALS: dict[str, tuple[Callable[..., Any], torch.dtype, bool]] = {
    "log2": (lambda x: torch.log2(x * 1.305), torch.float32, True),
    "remainder": (lambda x: torch.remainder(x, 1.306), torch.float32, True),
    "of integers": (lambda x: torch.remainder(x, 7), torch.int32, False),
    "exp": (lambda x: torch.exp(x * 1.307), torch.float32, False),
}


@pytest.mark.parametrize("name", DENORMALS)
def test_denormals(name: str, kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    triton_kernels = pytest.importorskip("onepass.runtime.triton_kernels")
    function, dtype, needed = DENORMALS[name]
    given: list[dict[str, Any]] = []
    real = triton_kernels.run_stages

    def run(ast: Any, target: Any, options: dict[str, Any], *rest: Any) -> Any:
        given.append(options)
        return real(ast, target, options, *rest)

    monkeypatch.setattr(triton_kernels, "run_stages", run)
    monkeypatch.setattr("onepass.runtime.kernels._functions", {})
    explained(function, (64, 96), target="sm_90", dtype=dtype)
    assert [k.denormals for k in kernels] == [needed]
    assert [o.get("enable_reflect_ftz", True) for o in given] == [not needed]


def test_an_index_from_data_is_asserted(kernels: list[Kernel]) -> None:
    pytest.importorskip("triton")
    with FakeTensorMode():
        arguments = torch.empty(100, 32), torch.empty(64, dtype=torch.int64)
        onepass.explain(lambda w, i: w[i] + 1.308, *arguments, target="sm_90", options=FREE)
    assert [k.asserts for k in kernels] == [True]


@pytest.mark.parametrize(("target", "streams"), [("sm_90", True), ("sm_100", False)])
def test_copies_are_given_up_where_that_was_measured(
    target: str, streams: bool, kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(Chooser, "apart", lambda *_: math.inf)  # whatever the library takes
    linear = lambda x, w: F.gelu(F.linear(x, w)) * 1.309  # noqa: E731
    explained(linear, (16, 8192), (16384, 8192), target=target, dtype=torch.bfloat16)
    assert kernels[0].descriptors and kernels[0].streams == streams


def test_only_innermost_sweeps_run_ahead(kernels: list[Kernel]) -> None:
    pytest.importorskip("triton")
    explained(lambda x: torch.softmax(x * 1.310, -1), (64, 500_000), target="sm_90")
    loops = [(s, kernel) for kernel in kernels for s in walk(kernel.body) if isinstance(s, Loop)]
    assert loops
    for s, kernel in loops:
        inner = any(isinstance(x, Loop) for x in walk(s.body))
        assert s.stages == (0 if inner or s.extent is Poly.ONE or kernel.resident else kernel.stages)


ROWS, COLUMNS, STEP = Axis("r", Poly.of(16)), Axis("c", Poly.of(32)), Axis("i", Poly.of(8))


def arranged(*args: Any) -> tuple[Any, ...]:
    """A comparison inside a sweep, of two tile axes."""
    compare = Let(Var("inside", DType.BOOL), "ge", args)
    loop = Loop(STEP, STEP.extent, "sweep", (Tile(COLUMNS, 32), compare))
    (_, found) = separate_sides((Tile(ROWS, 16), loop))
    assert isinstance(found, Loop) and isinstance(found.body[1], Let)
    assert replace(found.body[1], args=args) == compare
    return found.body[1].args


def test_rows_and_columns_are_compared_each_on_its_side() -> None:
    column = COLUMNS.poly() + STEP.poly() * 32
    assert arranged(ROWS.poly() - column, const(0, DType.I64)) == (ROWS.poly(), column)
    assert arranged(ROWS.poly() - column, Poly.of(-5)) == (ROWS.poly() + 5, column)
    assert arranged(ROWS.poly(), column) == (ROWS.poly(), column)


def test_a_product_of_rows_and_columns_stays() -> None:
    product = ROWS.poly() * COLUMNS.poly()
    assert arranged(product, Poly.of(3)) == (product, Poly.of(3))
