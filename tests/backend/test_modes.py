"""What torch.compile users do: graph breaks, dynamic shapes, layouts, odd tensors, threads, fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import onepass
from tests.checking import BACKEND, backend_callable, compiled


def test_registered_by_name() -> None:
    assert "onepass" in torch._dynamo.list_backends()


def test_jit() -> None:

    @onepass.jit
    def bare(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    @onepass.jit(options={"strict": True}, fullgraph=True)
    def configured(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = torch.randn(5, 5)
    torch.testing.assert_close(bare(x), x.sin() + 1)
    torch.testing.assert_close(configured(x), x.sin() + 1)


def test_graph_breaks() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        if y.sum().item() > 0:  # data-dependent: two graphs
            y = y + 1
        print("", end="")
        return y.softmax(-1)

    for sign in (1.0, -1.0):
        x = torch.full((3, 4), sign)
        torch.testing.assert_close(compiled(function)(x), function(x))


@pytest.mark.parametrize("first", [7, 1])
def test_dynamic_batch_is_one_compilation(first: int) -> None:
    """Ten batch sizes, 1 included, whichever comes first. Dynamo itself is told not to make 1 a case of its own."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, x.shape[-1:]) @ w
        return F.gelu(y).softmax(-1) + x.mean(0, keepdim=True)[:, : w.shape[1]]

    backend_callable()
    counter = CompileCounterWithBackend(BACKEND)
    run = torch.compile(function, backend=counter, dynamic=True)
    w = torch.randn(24, 12)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        for batch in (first, 7, 1, 2, 3, 16, 31, 64, 100, 257, 1000):
            x = torch.randn(batch, 24)
            torch.testing.assert_close(run(x, w), function(x, w), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("first", [7, 1])
def test_jit_compiles_once_for_any_batch(first: int, fullgraph: bool) -> None:
    from onepass.backend import record_compilations

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, x.shape[-1:]) @ w
        return F.gelu(y).softmax(-1) + x.mean(0, keepdim=True)[:, : w.shape[1]]

    run = onepass.jit(function, dynamic=True, fullgraph=fullgraph, options={"strict": True})
    w = torch.randn(24, 12)
    with record_compilations() as records:
        for batch in (first, 7, 1, 2, 3, 16, 31, 64, 100, 257, 1000):
            x = torch.randn(batch, 24)
            torch.testing.assert_close(run(x, w), function(x, w), rtol=1e-5, atol=1e-5)
    assert [r.direction for r in records] == ["inference"]
    assert not torch.fx.experimental._config.backed_size_oblivious


@pytest.mark.parametrize("first", [7, 1])
def test_jit_trains_any_batch_with_one_compilation(first: int) -> None:
    from onepass.backend import record_compilations

    model = torch.nn.Sequential(torch.nn.LayerNorm(24), torch.nn.Linear(24, 12), torch.nn.GELU())
    run = onepass.jit(model, dynamic=True, options={"strict": True})
    with record_compilations() as records:
        for batch in (first, 7, 1, 2, 3, 16, 31, 64, 100, 257, 1000):
            x = torch.randn(batch, 24, requires_grad=True)
            inputs = (x, *model.parameters())
            ours, expected = run(x), model(x)
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
            gradients = torch.autograd.grad(expected.square().sum(), inputs)
            for mine, theirs in zip(torch.autograd.grad(ours.square().sum(), inputs), gradients, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert [r.direction for r in records] == ["forward", "backward"]


def by_a_row(x: torch.Tensor) -> torch.Tensor:
    return x * torch.ones(5, 16, device=x.device)


def unless_one(x: torch.Tensor) -> torch.Tensor:
    y = x * 2 if x.shape[0] > 1 else x + 1
    torch._dynamo.graph_break()
    return F.scaled_dot_product_attention(*[y.view(1, 1, *y.shape)] * 3, is_causal=x.shape[0] > 1)


@pytest.mark.parametrize("lengths", [(1, 5, 1, 5), (5, 1, 5, 1)])
@pytest.mark.parametrize(
    "function", [lambda x: x.squeeze(0) * 2, lambda x: x.expand(5, 16) * 2, by_a_row, unless_one,
                 lambda x: x.cos() + x.reshape(-1, 16)[:1].squeeze(0)],
)  # fmt: skip
def test_jit_for_any_size_knows_that_size_one_is_broadcast_and_squeezed(function: Any, lengths: Any) -> None:
    """Torch, told to trace for any size, takes it for another than 1 and guards nothing."""

    run = onepass.jit(function, dynamic=True, options={"strict": True})
    for length in lengths:
        x = torch.randn(length, 16)
        torch.testing.assert_close(run(x), function(x))


def test_jit_for_any_size_broadcasts_an_input() -> None:

    run = onepass.jit(lambda x, y: (x * y).relu(), dynamic=True, options={"strict": True})
    for rows in ((2, 1), (3, 1), (1, 1), (2, 2), (1, 3)):
        x, y = (torch.randn(n, 8, requires_grad=True) for n in rows)
        torch.testing.assert_close(run(x, y), (x * y).relu())
        ours, expected = (torch.autograd.grad(f.square().sum(), (x, y)) for f in (run(x, y), (x * y).relu()))
        torch.testing.assert_close(ours, expected)


def test_jit_for_any_size_is_otherwise_as_torch_compile() -> None:

    @onepass.jit(dynamic=True)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = torch.randn(5, 5)
    torch.testing.assert_close(decorated(x), x.sin() + 1)
    assert decorated.__name__ == "decorated"
    module = onepass.jit(torch.nn.Linear(5, 5), dynamic=True)
    assert isinstance(module, torch.nn.Module)
    torch.testing.assert_close(module(x), module._orig_mod(x))
    off = onepass.jit(lambda x: x.sin(), dynamic=True, disable=True)
    torch.testing.assert_close(off(x), x.sin())
    with pytest.raises(TypeError, match="fulgraph"):
        onepass.jit(lambda x: x, dynamic=True, fulgraph=True)
    with pytest.raises(RuntimeError, match="mode or options"):
        onepass.jit(lambda x: x, dynamic=True, mode="default", options={"strict": True})

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        onepass.jit(breaks, dynamic=True, fullgraph=True)(x)
    with pytest.raises(ZeroDivisionError):
        onepass.jit(lambda x: 1 // 0, dynamic=True)(x)
    assert not torch.fx.experimental._config.backed_size_oblivious


def test_dynamic_batch_with_dynamos_own_rules() -> None:
    """By default dynamo makes size 1 a graph of its own; every other size shares one."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + x.mean(0)).softmax(-1)

    backend_callable()
    counter = CompileCounterWithBackend(BACKEND)
    run = torch.compile(function, backend=counter, dynamic=True)
    for batch in (7, 2, 3, 16, 31, 64, 100, 257, 1000):
        x = torch.randn(batch, 24)
        torch.testing.assert_close(run(x), function(x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
    x = torch.randn(1, 24)
    torch.testing.assert_close(run(x), function(x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


def test_dynamic_training() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (F.silu(x) * w).softmax(-1).square().sum()

    run = compiled(function, dynamic=True)
    for batch in (5, 8, 33):
        x = torch.randn(batch, 17, requires_grad=True)
        w = torch.randn(17, requires_grad=True)
        expected = torch.autograd.grad(function(x, w), (x, w))
        for mine, theirs in zip(torch.autograd.grad(run(x, w), (x, w)), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


DYNAMIC = {
    "reshape": lambda x: x.reshape(-1).view(x.shape[1], -1) + 1,
    "cat": lambda x: torch.cat([x, x * 2], 0),
    "pad": lambda x: F.pad(x, (1, 2)),
    "flip and roll": lambda x: x.flip(0).roll(2, 1),
    "column sum": lambda x: x.sum(0),
    "var": lambda x: torch.var_mean(x, 0),
    "argmax": lambda x: x.argmax(0),
    "transpose": lambda x: (x.t() * 2).contiguous(),
    "arange": lambda x: x + torch.arange(x.shape[0])[:, None],
    "tril": lambda x: x.tril(1),
    "slices": lambda x: x[1:-1] + x[2:],
    "chunk": lambda x: torch.cat(x.chunk(3, 0)[::-1]),
    "size as a value": lambda x: x * x.shape[0] / x.numel(),
    "stack": lambda x: torch.stack([x, x.exp()], 1).amax(0),
    "in place": lambda x: x.clone().mul_(2).add_(x.shape[0]),
    "gather": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)],
    "full sum": lambda x: x.sum(),
    "repeat": lambda x: x.repeat(2, 1),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_operations(name: str) -> None:
    function = DYNAMIC[name]
    run = compiled(function, dynamic=True)
    for rows, columns in ((6, 5), (9, 4), (17, 33)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(run(x), function(x), rtol=1e-5, atol=1e-5)


def test_channels_last_is_kept() -> None:
    x = torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last)
    out = compiled(lambda x: F.relu(x * 2 + 1))(x)
    assert out.stride() == F.relu(x).stride()
    weight, bias = torch.randn(8), torch.randn(8)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, weight, bias, training=True)

    assert compiled(norm)(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(compiled(norm)(x), norm(x), rtol=1e-4, atol=1e-5)


def test_complex_tensors() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spectrum = torch.fft.rfft(x * 2)
        return (spectrum * spectrum.conj()).real + 1, torch.view_as_real(spectrum).abs()

    x = torch.randn(4, 16)
    for mine, theirs in zip(compiled(function)(x), function(x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_tensor_subclass() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).relu()

    x = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    ours, theirs = compiled(function)(x), function(x)
    assert isinstance(ours, TwoTensor)
    torch.testing.assert_close(ours.a, theirs.a)
    torch.testing.assert_close(ours.b, theirs.b)


def test_parameters_shared_between_graphs() -> None:
    linear = torch.nn.Linear(4, 4)
    run = compiled(lambda x: linear(linear(x)).relu())
    x = torch.randn(3, 4)
    torch.testing.assert_close(run(x), linear(linear(x)).relu())


def test_numbers_and_containers() -> None:
    def function(x: torch.Tensor, scale: float, parts: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
        return {"scaled": x * scale, "sum": sum(parts["all"]), "n": 3, "none": None, "nested": [(x + 1,)]}

    x = torch.randn(3)
    ours = compiled(function)(x, 2.5, {"all": [x, x * 2]})
    theirs = function(x, 2.5, {"all": [x, x * 2]})
    torch.testing.assert_close(ours["scaled"], theirs["scaled"])
    torch.testing.assert_close(ours["sum"], theirs["sum"])
    assert ours["n"] == 3 and ours["none"] is None
    torch.testing.assert_close(ours["nested"][0][0], x + 1)


def test_higher_order_operators() -> None:
    x = torch.randn(5)
    squares = compiled(torch.func.vmap(lambda v: v * v + 1))
    torch.testing.assert_close(squares(x), x * x + 1)
    gradient = compiled(torch.func.grad(lambda v: v.sin().sum()))
    torch.testing.assert_close(gradient(x), x.cos())
    branch = compiled(lambda x: torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,)))
    torch.testing.assert_close(branch(x.abs()), x.abs().sin())
    torch.testing.assert_close(branch(-x.abs()), (-x.abs()).cos())


def test_custom_operator_runs_as_it_is() -> None:
    @torch.library.custom_op("onepass_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    x = torch.randn(4, 4)
    torch.testing.assert_close(compiled(lambda x: twice(x + 1).relu())(x), ((x + 1) * 2).relu())


def test_mutating_custom_operator_keeps_its_place() -> None:
    @torch.library.custom_op("onepass_tests::bump", mutates_args={"x"})
    def bump(x: torch.Tensor) -> None:
        x += 1

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        bump(y)
        z = y * 3
        bump(y)
        return z + y

    x = torch.randn(4, 4)
    torch.testing.assert_close(compiled(function)(x), function(x))


def test_double_backward_is_refused_as_elsewhere() -> None:
    x = torch.randn(4, requires_grad=True)
    (first,) = torch.autograd.grad(compiled(lambda x: (x**3).sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|twice"):
        torch.autograd.grad(first.sum(), x)


def test_hooks_and_retained_graph() -> None:
    x = torch.randn(6, requires_grad=True)
    out = compiled(lambda x: (x.sin() * x).sum())(x)
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    second = torch.autograd.grad(out, x)[0]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, x.cos() * x + x.sin())


def test_only_some_inputs_need_gradients() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    compiled(lambda x, y: ((x + 1) * y).tanh().sum())(x, y).backward()
    torch.testing.assert_close(y.grad, (1 - ((x + 1) * y).tanh() ** 2) * (x + 1))


def in_threads(function: Callable[[int], None], count: int = 6) -> None:
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_calls_from_several_threads() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).softmax(-1).sum(0)

    run = compiled(function)
    run(torch.randn(64, 128))

    def work(number: int) -> None:
        for k in range(20):
            x = torch.full((64, 128), float(number + k)) + torch.arange(128)
            torch.testing.assert_close(run(x), function(x))

    in_threads(work)


def test_compilation_in_several_threads() -> None:
    def work(number: int) -> None:
        x = torch.randn(number + 3, 8)
        torch.testing.assert_close(compiled(lambda x: x.cos() * (number + 1))(x), x.cos() * (number + 1))

    in_threads(work, 3)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    run = compiled(lambda x: (x.exp().sum(), x.sum(0), x.amax(1), x.t().contiguous()))
    x = torch.randn(513, 1027)
    try:
        torch.set_num_threads(threads)
        for mine, theirs in zip(run(x), (x.exp().sum(), x.sum(0), x.amax(1), x.t()), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_use_after_fork() -> None:
    run = compiled(lambda x: (x * 2).softmax(-1).sum(0))
    x = torch.randn(700, 900)
    expected = run(x)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = 0 if torch.allclose(run(x), expected) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.testing.assert_close(run(x), expected)


def test_deterministic() -> None:
    """No atomics: the same call gives the same bits."""
    run = compiled(lambda x: (x.sum(), x.sum(0), x.softmax(0), x.var(1)))
    x = torch.randn(1500, 1300)
    first = run(x)
    for _ in range(3):
        for a, b in zip(first, run(x), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("training", [False, True])
def test_a_number_written_in_a_function_is_a_new_tensor_at_every_call(training: bool) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        table = torch.tensor([1.0, 2.0])
        return [table, table.view(2, 1), torch.tensor([3, 4]).detach(), torch.tensor(5), x * table]

    run, x = compiled(function), torch.ones(3, 2, requires_grad=training)
    first = run(x)
    assert first[0].data_ptr() == first[1].data_ptr()
    for made in first[:4]:
        made.mul_(7)
    for mine, theirs in zip(run(x), function(x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("target", ["auto", "triton-interpret"])
def test_reductions_of_no_rows_where_sizes_change(target: str) -> None:
    """A kernel that visits nothing still writes what a sum of nothing is."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.mean(), (x > 0).all(), x.sum(0), torch.softmax(x, 1).sum(0)

    if target != "auto":
        pytest.importorskip("triton")
    run = onepass.jit(function, dynamic=True, options={"strict": True, "target": target, "cache": False})
    for rows in (5, 0, 3):
        x = torch.randn(rows, 7)
        torch.testing.assert_close(run(x), function(x), equal_nan=True)
