"""Integer arithmetic of every width, signed and unsigned: eager's values from C and from tiles, and machine code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import onepass
from tests.checking import compiled

pytest.importorskip("triton")
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OPERATIONS: dict[str, list[Operation]] = {
    "pow": [torch.pow, lambda x, y: torch.pow(3, y), lambda x, y: torch.pow(x, 0), lambda x, y: torch.pow(x, 5)],
    "divide": [
        lambda x, y: x // y,
        lambda x, y: x % y,
        lambda x, y: x // 7,
        lambda x, y: x % 7,
        lambda x, y: 100 // y,
        lambda x, y: 100 % y,
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: torch.fmod(x, y),
        lambda x, y: torch.fmod(x, 7),
    ],
    "shift": [
        lambda x, y: x << (y & 15),
        lambda x, y: x >> (y & 15),
        lambda x, y: x << 3,
        lambda x, y: x >> 3,
        lambda x, y: x << y,
        lambda x, y: x >> y,
    ],
    "one": [torch.abs, torch.sign, torch.neg, torch.bitwise_not, torch.signbit, torch.sgn],
    "clamp": [
        lambda x, y: x.clamp(3, 100),
        lambda x, y: x.clamp(min=y),
        lambda x, y: x.clamp(max=y),
        lambda x, y: x.clamp(y, x),
        lambda x, y: x.clamp(-1, 5),
        torch.maximum,
        torch.minimum,
        torch.fmax,
        torch.fmin,
    ],
    "bits": [torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor],
    "compare": [torch.lt, torch.ge, torch.eq, lambda x, y: x > 0, lambda x, y: x < -1, lambda x, y: x == -1],
    "arithmetic": [
        torch.add,
        torch.sub,
        torch.mul,
        lambda x, y: 5 - x,
        lambda x, y: torch.add(x, y, alpha=3),
        lambda x, y: x + -1,
        lambda x, y: x * -3,
    ],
    "floats": [torch.div, lambda x, y: x.float(), lambda x, y: x.double(), lambda x, y: x.bfloat16()],
    "convert": [lambda x, y, t=t: x.to(t) for t in (*SIGNED, *UNSIGNED)],
    "reduce": [
        lambda x, y: x.sum(),
        lambda x, y: x.prod(),
        lambda x, y: x.amax(),
        lambda x, y: x.amin(),
        lambda x, y: x.argmax(),
        lambda x, y: x.cumsum(0),
        lambda x, y: x.sum(dtype=x.dtype),
    ],
    "choose": [lambda x, y: torch.where(x > y, x, y), lambda x, y: torch.where(x > y, x, -1)],
}
ONE_OPERAND = {"one"}
ALWAYS = [torch.int8, torch.int64, torch.uint8]
TYPES = [pytest.param(t, marks=() if t in ALWAYS else pytest.mark.rotating) for t in (*SIGNED, *UNSIGNED)]


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every byte, small numbers, and the extremes of the type; no division that stops a processor."""
    x = torch.arange(-128, 128).repeat_interleave(9)
    y = torch.tensor([5, 1, 2, 3, 7, 8, 63, 100, 127]).repeat(256)
    if dtype in SIGNED:
        y[1::9], y[4::9] = -1, -7
    x[::5] = torch.iinfo(dtype).max if dtype is not torch.uint64 else -1
    x[2::9] = torch.iinfo(dtype).min
    return x.to(dtype), y.to(dtype)


def those_of_eager(name: str, dtype: torch.dtype) -> list[Operation]:
    """The operations that eager has for the type."""
    found, (x, y) = [], operands(dtype)
    for operation in OPERATIONS[name]:
        call = (lambda x, y, f=operation: f(x)) if name in ONE_OPERAND else operation
        try:
            call(x, y)
        except (RuntimeError, TypeError):  # not implemented, or a number that the type has not
            continue
        found.append(call)
    return found


@pytest.mark.parametrize("target", ["cpu", "triton-interpret"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_are_eagers(name: str, dtype: torch.dtype, target: str) -> None:
    (x, y), operations = operands(dtype), those_of_eager(name, dtype)

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [operation(x, y) for operation in operations]

    torch._dynamo.reset()
    found = compiled(function, options={"strict": True, "target": target})(x, y)
    for k, (mine, expected) in enumerate(zip(found, function(x, y), strict=True)):
        torch.testing.assert_close(mine, expected, equal_nan=True, msg=lambda m, k=k: f"operation {k}: {m}")


@pytest.mark.parametrize("dtype", ALWAYS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_machine_code(name: str, dtype: torch.dtype) -> None:
    operations = those_of_eager(name, dtype)
    options = {"strict": True, "cache": False}
    explained = onepass.explain(
        lambda x, y: [f(x, y) for f in operations], *operands(dtype), target="sm_90", options=options
    )
    kernels = explained.graphs[0].kernels
    assert kernels and all(kernel.registers > 0 for kernel in kernels)
