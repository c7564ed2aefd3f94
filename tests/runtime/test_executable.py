"""Running host programs: values, lifetimes, layouts, errors, threads, fork."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from onepass.errors import LayoutMismatch
from onepass.ir.host_json import MalformedProgram
from onepass.ir.source import (
    Allocate,
    Bind,
    Call,
    Check,
    Constant,
    Copy,
    Free,
    HostProgram,
    Launch,
    Live,
    Ref,
    SizeOf,
    TorchValue,
    WriteBack,
)
from onepass.runtime import torch_private
from onepass.runtime.executable import Executable
from onepass.runtime.kernels import LoadedKernel, build_kernels
from onepass.runtime.toolchain import find_toolchain
from tests.runtime.sample import run_python, scale_kernel, scale_program


def build(*sources: Any) -> list[LoadedKernel]:
    return build_kernels(sources, find_toolchain())


def test_kernels_run_in_order_at_any_size() -> None:
    run = Executable(scale_program(2), build(scale_kernel(2.0), scale_kernel(3.0)))
    for n in (0, 1, 7, 10_000):
        x = torch.randn(n)
        (y,) = run.call([x, n])
        assert torch.equal(y, x * 2 * 3)


def test_the_calling_convention_is_boxed() -> None:
    run = Executable(scale_program(), build(scale_kernel()))
    assert run.call._boxed_call
    args = [torch.ones(3), 3]
    run.call(args)
    assert args == []


def test_inputs_are_freed_at_their_last_use() -> None:
    seen: list[bool] = []
    x = torch.ones(4)
    alive = weakref.ref(x)
    instructions = (Call("x0", "aten.sin.default", (Ref("a0"),), {}), Free(("a0",)), Call("x1", Live("l0"), (), {}))
    host = HostProgram(("a0",), instructions, (Ref("x0"),), (), {"l0": lambda: seen.append(alive() is not None)})
    args = [x]
    del x
    Executable(host, []).call(args)
    assert seen == [False]


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [(1, RuntimeError, "ZeroDivisionError"), (2, IndexError, "index out of range in self")],
)
def test_a_status_becomes_eagers_error(status: int, error: type[Exception], message: str) -> None:
    run = Executable(scale_program(), build(scale_kernel(status=status)))
    run.call([torch.ones(5), 5])
    with pytest.raises(error, match=message):
        run.call([torch.tensor([1.0, -1.0]), 2])


def checked(result_of: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Executable:
    """Calls an operator whose result must have this layout, and returns it."""
    sizes, steps = tuple(map(str, shape)), tuple(map(str, strides))
    instructions = (Call("b0", Live("l0"), (Ref("a0"),), {}), Check("b0", sizes, steps, "float32"))
    return Executable(HostProgram(("a0",), instructions, (Ref("b0"),), (), {"l0": result_of}), [])


def test_results_with_other_strides_are_copied() -> None:
    x = torch.randn(3, 5)
    (y,) = checked(lambda t: t.t().contiguous().t(), (3, 5), (5, 1)).call([x])
    assert y.stride() == (5, 1) and torch.equal(y, x)


def test_results_with_the_right_strides_or_irrelevant_ones_are_kept() -> None:
    x = torch.randn(1, 5)
    odd = x.as_strided((1, 5), (77, 1))
    (y,) = checked(lambda t: odd, (1, 5), (5, 1)).call([x])
    assert y is odd
    (y,) = checked(lambda t: t, (1, 5), (5, 1)).call([x])
    assert y is x


def test_a_result_expected_to_be_expanded() -> None:
    x = torch.randn(3, 1)
    (y,) = checked(lambda t: t.expand(3, 4).contiguous(), (3, 4), (1, 0)).call([x])
    assert y.stride() == (1, 0) and torch.equal(y, x.expand(3, 4))
    with pytest.raises(LayoutMismatch):  # it cannot be written that way
        checked(lambda t: torch.arange(12.0).view(3, 4), (3, 4), (1, 0)).call([x])


@pytest.mark.parametrize("wrong", [torch.zeros(4, 5), torch.zeros(15), torch.zeros(3, 5, dtype=torch.float64)])
def test_results_unlike_their_fake_are_an_error_not_a_bad_read(wrong: torch.Tensor) -> None:
    with pytest.raises(LayoutMismatch):
        checked(lambda t: wrong, (3, 5), (5, 1)).call([torch.zeros(1)])


def test_inputs_with_other_strides_are_read_right_and_written_back() -> None:
    instructions = (
        Check("a0", ("4", "3"), ("3", "1"), None, "w0"),
        Launch(0, ("a0", "a0"), ("12",)),
        WriteBack("w0", "a0"),
    )
    run = Executable(HostProgram(("a0",), instructions, ()), build(scale_kernel()))
    for x in (torch.randn(4, 3), torch.randn(3, 4).t()):
        expected = x * 2
        run.call([x])
        assert torch.equal(x, expected)


def test_views_copies_sizes_literals_and_constants() -> None:
    constant = torch.tensor([10.0, 20.0])
    instructions = (
        Bind("s0", "a0", 1),
        Call("x0", "aten.mul.Tensor", (Ref("a0", ("s0",), ("1",), "s0*2"), Constant(0)), {}),
        Call("x1", "aten.full.default", ([SizeOf("s0-1"), 2], -0.0), {"dtype": TorchValue("dtype", "float64")}),
        Call("x2", "operator.getitem", (Ref("a0"), (slice(None), 0)), {}),
        Copy("x2", "x3"),
    )
    outputs = (Ref("x0"), Ref("x1"), SizeOf("(s0)//(2)"), None, 2.5, float("inf"), Ref("a0"), Ref("a0"))
    run = Executable(HostProgram(("a0", "x3"), instructions, outputs, (constant,)), [])
    x = torch.arange(6.0).view(3, 2)
    mul, full, half, none, number, infinite, same, again = run.call([x, torch.full((3,), 9.0)])
    assert torch.equal(mul, torch.tensor([4.0, 5.0]) * constant)
    assert full.shape == (1, 2) and full.dtype is torch.float64 and torch.signbit(full).all()
    assert (half, none, number, infinite) == (1, None, 2.5, float("inf"))
    assert same is x and again is x
    assert torch.equal(x[:, 0], torch.full((3,), 9.0))


EVIL = "__import__('os').abort()"


@pytest.mark.parametrize(
    "host",
    [
        HostProgram((EVIL,), (), ()),
        HostProgram(("a0",), (Free((EVIL,)),), ()),
        HostProgram(("a0",), (Copy("a0", f"a0.{EVIL}"),), ()),
        HostProgram(("a0",), (Allocate("b0", (EVIL,), ("1",), "float32", "cpu"),), ()),
        HostProgram(("a0",), (Allocate("b0", ("1",), ("1",), EVIL, "cpu"),), ()),
        HostProgram(("a0",), (Call("x0", EVIL, (), {}),), ()),
        HostProgram(("a0",), (Call("x0", "os.system", ("true",), {}),), ()),
        HostProgram(("a0",), (), (SizeOf(EVIL),)),
        HostProgram(("a0",), (), (SizeOf("s0\nimport os"),)),
        HostProgram(("a0",), (), (Ref(EVIL),)),
        HostProgram(("a0",), (), (TorchValue("dtype", "load"),)),
        HostProgram(("a0",), (Launch(0, ("a0",), ()),), ()),
        HostProgram(("a0",), (), (Constant(0),)),
    ],
)
def test_a_program_of_another_form_is_refused(host: HostProgram) -> None:
    with pytest.raises(MalformedProgram):
        Executable(host, [])


def test_text_of_the_user_is_data() -> None:
    text = '\'); raise SystemExit #\n"""'
    host = HostProgram((), (Call("x0", Live("l0"), (text,), {text: text}),), (Ref("x0"), {text: [text]}))
    host.live["l0"] = lambda *a, **k: (a, k)
    got, tree = Executable(host, []).call([])
    assert got == ((text,), {text: text}) and tree == {text: [text]}


def test_the_source_shows_the_program() -> None:
    source = Executable(scale_program(), build(scale_kernel())).source
    assert source == (
        "def call(args):\n"
        "    if is_profiling(): return profiled(args)\n"
        "    a0, s0, = args\n"
        "    args.clear()\n"
        "    threads = thread_count()\n"
        "    b0 = empty_cpu((s0,), (1,), float32)\n"
        "    k0(b0.data_ptr(), a0.data_ptr(), s0, threads)  # scale_2.0\n"
        "    return (b0,)\n"
    )


def test_calls_from_several_threads() -> None:
    run = Executable(scale_program(3), build(scale_kernel(2.0), scale_kernel(3.0), scale_kernel(5.0)))
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = torch.full((20_000 + seed,), float(seed))
        for _ in range(30):
            (y,) = run.call([x, x.numel()])
            if not torch.equal(y, x * 30):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


FORK = """
import os, signal, torch
from onepass.runtime.executable import Executable
from onepass.runtime.kernels import build_kernels
from onepass.runtime.toolchain import find_toolchain
from tests.runtime.sample import scale_kernel, scale_program

torch.set_num_threads(2)
run = Executable(scale_program(), build_kernels([scale_kernel()], find_toolchain()))
x = torch.randn(100_000)
assert torch.equal(run.call([x, x.numel()])[0], x * 2)  # the thread pool exists now
twice, sevenfold = (x * 2).numpy(), (x * 7).numpy()  # eager itself would hang in the child
child = os.fork()
if child == 0:
    signal.alarm(30)
    good = (run.call([x, x.numel()])[0].numpy() == twice).all()
    fresh = Executable(scale_program(), build_kernels([scale_kernel(7.0)], find_toolchain()))
    good = good and (fresh.call([x, x.numel()])[0].numpy() == sevenfold).all()
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0, "the child hung or was wrong"
assert torch.equal(run.call([x, x.numel()])[0], x * 2)
print("fine")
"""


def test_use_after_fork() -> None:
    assert run_python(FORK) == "fine\n"


def test_set_num_threads_is_honoured() -> None:
    seen: list[int] = []
    kernel = LoadedKernel("spy", lambda *args: seen.append(args[-1]) or 0, 2, 1, False)
    run = Executable(scale_program(), [kernel])
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            run.call([torch.ones(2), 2])
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


def test_a_profiler_sees_the_graph_and_kernels_by_their_operations() -> None:
    """Equal kernels have one name, whatever their layer; without a profiler there are no ranges."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).sort(-1).values
        return x

    run, x = torch.compile(function, backend="onepass"), torch.randn(8, 16)
    expected = run(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert torch.equal(run(x), expected)
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("onepass")}
    graph, (name, count) = counts.pop("onepass graph"), *counts.items()
    assert (graph, count) == (1, 3) and name.startswith("onepass_") and "rsqrt" in name


def test_bindings_take_what_operators_take() -> None:
    """Every argument of the schema by position, and the rest by name: the values and gradients are the operator's."""
    x, w, b = torch.randn(2, 4, 5, 5), torch.randn(3, 2, 3, 3, requires_grad=True), torch.randn(6, requires_grad=True)
    a, m = torch.randn(3, 4), torch.randn(2, 3, 4)
    cases: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "convolution": ((x[:, :2], w, b[:3], [2, 1], [1, 0], [1, 2], False, [0, 0], 1), {}),
        "mm": ((a, a.t()), {}),
        "bmm": ((m, m.mT), {}),
        "addmm": ((torch.randn(3), a, a.t()), {"beta": 0.5, "alpha": 2}),
        "baddbmm": ((torch.randn(2, 3, 3), m, m.mT), {"alpha": 0.25}),
        "embedding": ((torch.randn(7, 3, requires_grad=True), torch.tensor([[1, 6], [0, 1]]), 1, False, False), {}),
    }
    assert cases.keys() == torch_private._BOUND
    for name, (args, kwargs) in cases.items():
        operator = getattr(torch.ops.aten, name).default
        bound = torch_private.direct(operator)
        assert bound is not operator and bound is not operator._op
        leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
        results = []
        for call in (operator, bound):
            made = call(*args, **kwargs)
            results.append([made, *torch.autograd.grad(made.sum(), leaves)] if leaves else [made])
        torch.testing.assert_close(*results)
    assert torch_private.direct(torch.ops.aten.sort.default) is torch.ops.aten.sort.default._op
