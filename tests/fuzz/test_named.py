"""Programs known to be hard: one storage read and written at shifted places, aliases, reuse, odd layouts, size."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.checking import (
    DEVICE,
    Run,
    backend_callable,
    compare,
    compare_aliasing,
    compare_strides,
    compile_direct,
    compiled,
    execute,
)
from tests.fuzz.program import at_once

Inputs = Callable[[], list[torch.Tensor]]
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="eager on a GPU gives some number, or asserts and is lost")


def grid(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different small numbers everywhere, so that a wrong index shows."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 % 1009).to(torch.float64) / 64).to(dtype).view(shape)


def check(function: Callable[..., Any], inputs: Inputs, gradients: bool = False) -> None:
    """Through the backend alone and through torch.compile: values, mutation, strides, aliasing."""
    eager = execute(function, inputs(), gradients)
    wide = execute(function, [t.double() if t.is_floating_point() else t for t in inputs()], False)
    for run in (compile_direct(function, inputs(), backend_callable()), compiled(function, fullgraph=True)):
        ours = execute(run, inputs(), gradients)
        compare(Run(ours.outputs, ours.inputs), Run(eager.outputs, eager.inputs), wide if not gradients else None)
        compare(Run([], [], ours.gradients), Run([], [], eager.gradients), None)
        compare_strides(ours, eager)
        compare_aliasing(ours, eager)


def shift_add(x: torch.Tensor) -> list[torch.Tensor]:
    x[1:] += at_once(x[:-1])
    return [x]


def shift_add_back(x: torch.Tensor) -> list[torch.Tensor]:
    x[:-1] += at_once(x[1:])
    return [x * 2]


def copy_transposed(x: torch.Tensor) -> list[torch.Tensor]:
    x.copy_(at_once(x.t()))
    return []


def roll_in_place(x: torch.Tensor) -> list[torch.Tensor]:
    x.copy_(x.roll(1, 0))
    return [x + 1]


def flip_in_place(x: torch.Tensor) -> list[torch.Tensor]:
    x.copy_(x.flip(0, 1))
    return []


def swap_halves(x: torch.Tensor) -> list[torch.Tensor]:
    half = x.shape[0] // 2
    kept = x[:half].clone()
    x[:half] = x[half : 2 * half]
    x[half : 2 * half] = kept
    return []


def normalise_in_place(x: torch.Tensor) -> list[torch.Tensor]:
    x.sub_(x.mean(0, keepdim=True)).div_(x.abs().amax(1, keepdim=True) + 1)
    return [x.sum(1)]


def neighbours(x: torch.Tensor) -> list[torch.Tensor]:
    x[1:-1] = (x[:-2] + x[1:-1] + x[2:]) / 4
    return [x.clone()]


IN_PLACE = [
    shift_add,
    shift_add_back,
    copy_transposed,
    roll_in_place,
    flip_in_place,
    swap_halves,
    normalise_in_place,
    neighbours,
]


@pytest.mark.parametrize("size", [2, 7, 64, 257])
@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_storage_read_and_written_at_other_places(function: Callable[..., Any], size: int) -> None:
    check(function, lambda: [grid(size, size)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_shifted_large(dtype: torch.dtype) -> None:
    check(shift_add, lambda: [grid(1100, 2048, dtype=dtype)])


def test_two_inputs_of_one_storage() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        a.mul_(2)
        b.add_(a[0])
        return [a + 1, b]

    def inputs() -> list[torch.Tensor]:
        base = grid(6, 8)
        return [base[:4], base[2:]]

    check(function, inputs)


def test_the_same_input_twice() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        a.add_(1)
        return [b * 2, a]

    def inputs() -> list[torch.Tensor]:
        x = grid(5, 9)
        return [x, x]

    check(function, inputs)


def test_write_to_transposed_alias() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        b.add_(at_once(a))
        return [a.sum(), b]

    def inputs() -> list[torch.Tensor]:
        x = grid(9, 9)
        return [x, x.t()]

    check(function, inputs)


def test_index_add_then_gather_of_the_buffer() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x.index_add_(0, i, y)
        return [x[i], torch.gather(x, 0, i[:, None].expand(-1, x.shape[1]))]

    check(function, lambda: [grid(7, 5), torch.tensor([3, 3, 0, 6, 3]), grid(5, 5)])


def test_gather_then_update_of_the_buffer() -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        taken = x[i]
        x.mul_(3)
        x[i] = taken + 1
        return [taken, x + 0]

    check(function, lambda: [grid(7, 5), torch.tensor([6, 0, 2])])


def test_memory_reused_across_types() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        a = (x * 2).to(torch.bfloat16)
        b = a.sum(0, keepdim=True).to(torch.float64)
        c = (x > 3).to(torch.uint8)
        d = (c + 1).to(torch.int64).cumsum(0)
        e = torch.sort(x + b.float(), 0)[0]
        return [e * d, b, c]

    check(function, lambda: [grid(33, 65)])


def test_expanded_inputs() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [(x + y).tanh(), x.sum(0), (x * 2).t(), x.softmax(1)]

    check(function, lambda: [grid(1, 17).expand(13, 17), grid(13, 1).expand(13, 17)])


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8], ids=str)
def test_misaligned_inputs(offset: int, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x + 1
        x.mul_(2)
        return [y, x.sum(1), x.t().contiguous()]

    check(function, lambda: [grid(offset + 67 * 33, dtype=dtype)[offset:].view(67, 33)])


def test_outputs_that_alias() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        return [y, y.t(), y[1:], x.view(-1), y, x]

    check(function, lambda: [grid(6, 4)])
    check(function, lambda: [grid(6, 4).requires_grad_()], gradients=True)


def test_equal_outputs_keep_their_own_storages_and_views() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a, b = x != y, y != x
        c, d = (x + y).split(2), (y + x).split(2)
        return [b, a.t(), a.flatten(), a, c[1], d[1], d[0], c[0][:, 1:], d[2].t()]

    check(function, lambda: [grid(5, 4), grid(5, 4).flip(0)])


def test_zero_extents() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1, x.sum(0), x.sum(1), x.prod(), x.t(), torch.cat([x, x]), x.softmax(0), x.any(1), x.mean()]

    for shape in [(0, 5), (5, 0), (0, 0)]:
        check(function, lambda shape=shape: [torch.zeros(shape)])


def test_storages_of_no_bytes_are_not_mixed_up() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.nn.functional.rms_norm(x, x.shape[-1:])
        y[::2] *= 0.5
        return [torch.hypot(x + 3, y), y]

    check(function, lambda: [torch.zeros(0, 97, 2)])


def test_special_values() -> None:
    odd = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 3.4e38, 1.0]

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        both = [x + y, x * y, x / y, torch.maximum(x, y), torch.minimum(x, y), torch.fmod(x, y), torch.atan2(x, y)]
        one = [x.exp(), x.log(), x.sqrt(), x.sign(), x.floor(), x.clamp(-1, 1), x.relu(), torch.signbit(x), x.tanh()]
        return [*both, *one, x.amax(1), x.argmax(1), x.max(1)[1], x.sum(1), x.isnan(), x == y, x.softmax(1), x.round()]

    x = torch.tensor(odd)
    check(function, lambda: [x[:, None].expand(9, 9).contiguous(), x[None, :].expand(9, 9).contiguous()])


def test_integer_wrap_around() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            x * x,
            x + x,
            -x,
            x << 3,
            x.sum(0),
            x.prod(0),
            x // 7,
            x % 7,
            x.abs(),
            torch.div(x, 7, rounding_mode="trunc"),
        ]

    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        info = torch.iinfo(dtype)
        check(
            function, lambda d=dtype, i=info: [torch.tensor([[i.max, i.min, 3], [i.max - 1, i.min + 1, 100]], dtype=d)]
        )


def test_dividing_by_a_product_of_sizes() -> None:
    """Inputs that overlap become views of one base; with sizes known at run time its index divides by products."""

    def inputs() -> list[torch.Tensor]:
        x = grid(5, 3, 40).clone()[1:4, 1:2, 1:40:3]
        return [grid(3, 1, 13), x, x.unsqueeze(0)]

    def function(_: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x.fill_(0.75)
        return [x + y]

    ours = execute(compiled(function, dynamic=True), inputs(), False)
    eager = execute(function, inputs(), False)
    compare(ours, eager, None)


def test_denormal_numbers_are_not_zero() -> None:
    small = [1e-45, -1e-45, 3e-41, -3e-41, 1.1e-38, 1e-38, 1.5e-38, 1.0]

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        two = [torch.fmod(x, y), torch.remainder(x, y), torch.div(x, y, rounding_mode="floor"), torch.atan2(x, y)]
        logs = [x.log(), x.log2(), x.log10(), x.rsqrt(), x.lgamma(), x.abs().pow(0.25), x.sqrt(), 1 / x]
        return [*two, x / y, *logs, x.sign(), x != 0, torch.where(x > 0, x, 1.0).log() - x.abs().log()]

    x = torch.tensor(small)
    check(function, lambda: [x[:, None].expand(8, 8).contiguous(), x[None, :].expand(8, 8).contiguous()])


@ON_CPU
def test_integer_division_by_zero_is_eagers_error() -> None:
    run = compiled(lambda x, y: x // y)
    x, zero = torch.ones(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(x, zero)
    assert torch.equal(run(x, x), x)


def test_strides_of_an_index_for_any_size() -> None:
    x = grid(64, 16, 1, 1).transpose(2, 0)
    ours, eager = compiled(lambda x: x[:, [0, 0, 1]], dynamic=True)(x), x[:, [0, 0, 1]]
    assert torch.equal(ours, eager) and ours.stride() == eager.stride()


def test_a_detached_output_beside_its_gradient() -> None:
    """Two outputs of one storage are two tensors: only one of them needs gradients."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        return [y.detach(), y.flatten(0, 1)]

    check(function, lambda: [grid(1, 3, 5).requires_grad_()], gradients=True)


def test_a_result_and_its_detached_self_are_two_tensors() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        return [y, y.detach(), y]

    first, second, third = compile_direct(function, [grid(3, 5)], backend_callable())(grid(3, 5))
    assert first is third and first is not second and first.data_ptr() == second.data_ptr()


@ON_CPU
def test_bad_index_is_an_index_error() -> None:
    run = compiled(lambda x, i: x[i] + 1)
    x = grid(5, 3)
    with pytest.raises((IndexError, RuntimeError), match="index"):
        run(x, torch.tensor([0, 7]))
    assert torch.equal(run(x, torch.tensor([0, -1])), x[[0, -1]] + 1)


@pytest.mark.rotating
def test_long_chain_compiles_in_seconds() -> None:
    """5,000 operations: nothing in the compiler is quadratic or recursive."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x
        for k in range(2500):
            y = y * 0.999 + (k % 7) * 0.001
        return [y]

    inputs = [grid(4, 8)]
    eager = execute(function, inputs, False)
    wide = execute(function, [inputs[0].double()], False)
    trace = time.monotonic()
    compile_direct(function, inputs, backend_callable("aot_eager"))
    trace = time.monotonic() - trace
    start = time.monotonic()
    run = compile_direct(function, inputs, backend_callable())
    ours = execute(run, inputs, False)
    seconds = time.monotonic() - start - trace
    compare(ours, eager, wide)
    assert seconds < 60, f"{seconds:.0f} s beyond tracing"


def test_doubling_a_hundred_times() -> None:
    """x = x + x: a hundred nodes, 2^100 paths."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(100):
            x = x + x
        return [x]

    check(function, lambda: [torch.full((3, 5), 2.0**-90)])


def test_wide_graph() -> None:
    """Two hundred outputs of one input."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * float(k) for k in range(200)]

    check(function, lambda: [grid(3, 3)])


def test_many_inputs() -> None:
    def function(*xs: torch.Tensor) -> list[torch.Tensor]:
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return [total, torch.cat(xs), torch.stack(xs).amax(0)]

    check(function, lambda: [grid(2, 3) + k for k in range(150)])


def test_xlogy_of_mixed_types() -> None:
    """A number without dimensions does not decide the type, and nothing times the logarithm of nothing is nothing."""

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        both = [torch.xlogy(a, b) for a in (x, x[1], x.half()[1], y) for b in (x, y, x[2], y[2], x.double()[2])]
        return [*both, torch.special.xlog1py(x.half()[1], y), torch.xlogy(x * 0, -x), torch.xlogy(x * 0, x * torch.nan)]

    check(function, lambda: [torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0, 1, 2])])


def test_a_log_of_a_sigmoid_is_laid_out_as_eagers() -> None:
    def inputs() -> list[torch.Tensor]:
        last = grid(4, 7, 33, 1).to(memory_format=torch.channels_last)
        return [last, grid(4, 7, 3, 5).to(memory_format=torch.channels_last).bfloat16(), grid(4, 7, 5).transpose(0, 1)]

    check(lambda *xs: [torch.nn.functional.logsigmoid(x) for x in xs], inputs)
