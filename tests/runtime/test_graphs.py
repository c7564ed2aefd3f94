"""Programs as CUDA graphs, on a driver that is not there: what callers see is what they see without graphs."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import onepass  # noqa: F401  (defines the operator that draws seeds)
from onepass.ir.record import CompileRecord
from onepass.ir.source import Allocate, Call, Check, Copy, Free, HostProgram, Instruction, Launch, Ref, WriteBack
from onepass.runtime import recording
from onepass.runtime.clock import Clock
from onepass.runtime.executable import Executable
from onepass.runtime.graph_parts import NotRecordable, take_apart
from onepass.runtime.graphs import MOST_RECORDED, MOST_RECORDINGS, WARM, Graphs

from .graph_fake import FakeDriver, install

N = 4


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


def add_one(out: int, x: int, n: int, programs: int) -> None:
    for k in range(n):
        floats(out, n)[k] = floats(x, n)[k] + 1


def add_number(out: int, x: int, number: int, n: int, programs: int) -> None:
    for k in range(n):
        floats(out, n)[k] = floats(x, n)[k] + number % 1000


def buffer(name: str, size: str = str(N)) -> Allocate:
    return Allocate(name, (size,), ("1",), "float32", "cpu")


def launch(number: int, *buffers: str, size: str = str(N), numbers: tuple[str, ...] = ()) -> Launch:
    return Launch(number, buffers, (size,), "1", "cpu", numbers)


def program(inputs: str, *instructions: Instruction, outputs: tuple[Any, ...]) -> HostProgram:
    return HostProgram(tuple(inputs.split()), instructions, outputs)


def matrix(name: str, rows: int = N, columns: int = N) -> Allocate:
    return Allocate(name, (str(rows), str(columns)), (str(columns), "1"), "float32", "cpu")


# out = (x + 1) + 1, by two kernels
TWO = program(
    "a0", buffer("b0"), launch(0, "b0", "a0"), buffer("b1"), launch(0, "b1", "b0"), Free(("b0",)), outputs=(Ref("b1"),)
)
# out = (x + 1) @ w + 1; the product is seen as well
PRODUCT = program(
    "a0 a1", matrix("b0"), launch(0, "b0", "a0", size="16"), Call("b1", "aten.mm.default", (Ref("b0"), Ref("a1")), {}),
    Check("b1", ("4", "4"), ("4", "1"), "float32"), Free(("b0",)), matrix("b2"), launch(0, "b2", "b1", size="16"),
    outputs=(Ref("b2"), Ref("b1")),
)  # fmt: skip
# out = (x @ y) + 1
OF_INPUTS = program(
    "a0 a1", Call("b1", "aten.mm.default", (Ref("a0"), Ref("a1")), {}), matrix("b2"), launch(0, "b2", "b1", size="16"),
    outputs=(Ref("b2"),),
)  # fmt: skip


class Case:
    """A program with its fake kernels, both ways."""

    def __init__(self, driver: FakeDriver, host: HostProgram, mode: str = "on", **settings: Any) -> None:
        self.driver, self.host = driver, host
        kernels = [driver.kernel(add_one, 2, 1), driver.kernel(add_number, 2, 2)]
        self.executable = Executable(host, kernels)
        self.record = CompileRecord()
        self.graphs = Graphs(self.executable, lambda _device: driver, mode, self.record, **settings)

    def __call__(self, *args: Any) -> Any:
        return self.graphs.call(list(args))

    def warm(self, *args: Any) -> None:
        for _ in range(WARM):
            self(*args)

    @property
    def launches(self) -> int:
        return self.driver.log.count("launch")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def test_outputs_are_kept_and_fed_back(driver: FakeDriver) -> None:
    run, x = Case(driver, TWO), torch.zeros(N)
    run.warm(x)
    kept = [x]
    for _ in range(100):
        kept += run(kept[-1])
    assert [k[0].item() for k in kept] == [2.0 * k for k in range(101)]
    assert run.launches == 100 and len(driver.graphs) == 1
    del kept[10:50]
    assert kept[-1][0] == 200


def test_inputs_move(driver: FakeDriver) -> None:
    run = Case(driver, TWO)
    inputs = [torch.full((N,), float(k)) for k in range(20)]
    for k, x in enumerate(inputs):
        assert run(x)[0].tolist() == [k + 2.0] * N
    assert run.launches == 20 - WARM


def test_library_results_are_new_tensors(driver: FakeDriver) -> None:
    run, w = Case(driver, PRODUCT), torch.randn(N, N)
    kept = []
    for _ in range(8):
        x = torch.randn(N, N)
        kept.append((x, *run(x, w)))
    for x, out, product in kept:
        torch.testing.assert_close(product, (x + 1) @ w)
        torch.testing.assert_close(out, product + 1)
    assert run.launches == 8 - WARM and len({p.data_ptr() for _, _, p in kept}) == 8
    assert "64 bytes copied" in run.record.graph


def test_a_parameter_is_changed_in_place_and_replaced(driver: FakeDriver) -> None:
    run, w = Case(driver, PRODUCT), torch.nn.Parameter(torch.randn(N, N))
    for k in range(12):
        x = torch.randn(N, N)
        if k % 4 == 3:
            w = torch.nn.Parameter(torch.randn(N, N))
        with torch.no_grad():
            w += 1
            torch.testing.assert_close(run(x, w)[1], (x + 1) @ w)
    assert len(driver.graphs) <= 4 and run.launches == 12 - WARM


def test_two_models_in_turn(driver: FakeDriver) -> None:
    run, weights = Case(driver, PRODUCT), [torch.randn(N, N) for _ in range(2)]
    for k in range(20):
        x, w = torch.randn(N, N), weights[k % 2]
        torch.testing.assert_close(run(x, w)[1], (x + 1) @ w)
    assert len(driver.graphs) == 2 and run.launches == 20 - WARM
    assert "128 bytes" not in run.record.graph  # weights are read where they are


def test_inputs_of_the_library_that_keep_moving_are_copied(driver: FakeDriver) -> None:
    run = Case(driver, OF_INPUTS)
    kept = [(torch.randn(N, N), torch.randn(N, N)) for _ in range(20)]
    for x, y in kept:
        torch.testing.assert_close(run(x, y)[0], x @ y + 1)
    assert run.launches >= 14 and len(driver.graphs) <= 2
    assert "128 bytes copied" in run.record.graph


# out = x + seed, with a kernel before; the seed is seen
RANDOM = program(
    "a0",
    Call("b0", "onepass.seed.default", (0,), {}),
    Check("b0", (), (), "int64"),
    buffer("b1"),
    launch(0, "b1", "a0"),
    buffer("b2"),
    launch(1, "b2", "b1", numbers=("b0",)),
    outputs=(Ref("b2"), Ref("b0")),
)


def seeds(count: int) -> list[int]:
    torch.manual_seed(5)
    return [int(torch.ops.onepass.seed(0)) for _ in range(count)]


def random_calls(run: Case, count: int) -> list[int]:
    torch.manual_seed(5)
    found = []
    for _ in range(count):
        out, seed = run(torch.zeros(N))
        assert out[0] == 1 + int(seed) % 1000
        found.append(int(seed))
    return found


def test_random_numbers_advance_as_without(driver: FakeDriver) -> None:
    run = Case(driver, RANDOM)
    assert random_calls(run, 8) == seeds(8) and run.launches == 8 - WARM


@pytest.mark.parametrize("function", ["launch", "set kernel"])
def test_a_launch_that_fails_runs_without_and_draws_no_other_numbers(driver: FakeDriver, function: str) -> None:
    run = Case(driver, RANDOM)
    torch.manual_seed(5)
    run.warm(torch.zeros(N))
    run(torch.zeros(N))
    driver.fails[function] = 2
    out, seed = run(torch.ones(N))
    assert int(seed) == seeds(4)[-1] and out[0] == 2 + int(seed) % 1000
    assert run.record.graph == "none: launching failed with driver error 2"
    assert not driver.graphs  # nothing is kept


def test_a_thread_without_a_context(driver: FakeDriver) -> None:
    run, x = Case(driver, TWO), torch.zeros(N)
    run.warm(x)
    driver.fails["launch"] = 201
    assert run(x)[0][0] == 2 and run.launches == 1 and driver.log[-2:] == ["bind", "launch"]


def test_a_variant_that_is_not_built(driver: FakeDriver) -> None:
    run, storage = Case(driver, TWO), torch.arange(64.0)
    run.warm(storage[:N])
    for start in (0, 1, 2, 0, 3):
        x = storage[start : start + N]
        assert run(x)[0].tolist() == (x + 2).tolist()
    assert run.launches == 5 and driver.log.count("built 2") == 1


@pytest.mark.parametrize("fault", [RuntimeError("broken"), torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_an_error_while_recording(driver: FakeDriver, fault: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise fault

    run, w = Case(driver, PRODUCT), torch.randn(N, N)
    with monkeypatch.context() as patch:
        patch.setattr(recording.Recorder, "finish", fails)
        for _ in range(5):
            x = torch.randn(N, N)
            try:
                torch.testing.assert_close(run(x, w)[1], (x + 1) @ w)
            except KeyboardInterrupt:
                break
    assert driver.capturing is None and not driver.graphs
    stopped = not isinstance(fault, KeyboardInterrupt)
    assert (run.record.graph == f"none: recording failed: {type(fault).__name__}: {fault}") is stopped
    again = Case(driver, PRODUCT)
    for _ in range(4):
        torch.testing.assert_close(again(x, w)[1], (x + 1) @ w)
    assert again.record.graph.startswith("one launch")


@pytest.mark.parametrize("function", ["end", "instantiate"])
def test_a_capture_that_the_driver_refuses(driver: FakeDriver, function: str) -> None:
    driver.fails[function] = 901
    run, x = Case(driver, TWO), torch.zeros(N)
    for _ in range(6):
        assert run(x)[0][0] == 2
    assert "returned 901" in run.record.graph and run.launches == 0


def test_one_failure_is_tried_again(driver: FakeDriver) -> None:
    run, x = Case(driver, TWO), torch.zeros(N)
    run.warm(x)
    driver.fails["end"] = 901
    run(x)
    driver.fails.clear()
    run(x)
    assert run.record.graph.startswith("one launch") and run.launches == 1


SIZED = program("a0 s0", buffer("b0", "s0"), launch(0, "b0", "a0", size="s0"), buffer("b1", "s0"),
                launch(0, "b1", "b0", size="s0"), outputs=(Ref("b1"),))  # fmt: skip


def test_a_graph_for_each_size_and_the_oldest_goes(driver: FakeDriver) -> None:
    run = Case(driver, SIZED)
    for n in range(1, 3 + MOST_RECORDINGS):
        for _ in range(WARM + 2):
            assert run(torch.zeros(n), n)[0].tolist() == [2.0] * n
    assert len(driver.graphs) == MOST_RECORDINGS and driver.log.count("destroy") == 2
    assert run.launches == 2 * (2 + MOST_RECORDINGS)
    before = run.launches
    run(torch.zeros(1), 1)  # warm already: recorded again
    assert run.launches == before + 1


def test_too_many_sizes(driver: FakeDriver) -> None:
    run = Case(driver, SIZED)
    for n in range(1, 4 + MOST_RECORDED):
        for _ in range(WARM + 1):
            run(torch.zeros(n), n)
    assert run.record.graph.startswith("none: sizes and addresses changed") and not driver.graphs
    assert run(torch.zeros(3), 3)[0].tolist() == [2.0] * 3


def test_streams_have_graphs_and_pools_of_their_own(driver: FakeDriver) -> None:
    run, w = Case(driver, PRODUCT), torch.randn(N, N)
    for _ in range(5):
        for stream in (0, 11, 22):
            driver.stream = stream
            x = torch.randn(N, N)
            torch.testing.assert_close(run(x, w)[1], (x + 1) @ w)
    assert len(driver.graphs) == len(driver.pools) == 3 and driver.streams == [0, 11, 22] * (5 - WARM)


def test_graphs_of_one_stream_share_a_pool(driver: FakeDriver) -> None:
    cases, w = [Case(driver, PRODUCT) for _ in range(4)], torch.randn(N, N)
    for _ in range(4):
        for run in cases:
            x = torch.randn(N, N)
            torch.testing.assert_close(run(x, w)[1], (x + 1) @ w)
    assert len(driver.pools) == 1 and len(driver.graphs) == 4


def test_a_users_capture_gets_the_steps(driver: FakeDriver) -> None:
    run, x = Case(driver, TWO), torch.zeros(N)
    run.warm(x)
    run(x)
    driver.log.clear()
    driver.stream = -1  # is being captured
    run(x)
    assert driver.log == ["kernel", "kernel"]


def test_threads(driver: FakeDriver) -> None:
    run, w = Case(driver, PRODUCT), torch.randn(N, N)

    def calls(seed: int) -> bool:
        x = torch.full((N, N), float(seed))
        return all(torch.equal(run(x, w)[1], (x + 1) @ w) for _ in range(20))

    for k in range(4):
        calls(k)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(8)))


def test_a_profile_is_of_the_steps(driver: FakeDriver) -> None:
    run, x = Case(driver, TWO), torch.zeros(N)
    run.warm(x)
    run(x)
    clock = Clock(torch.device("cpu"))
    run.executable.observe(clock)
    run(x)
    assert len(clock.spans()) == 2
    run.executable.observe(None)
    run(x)
    assert len(clock.spans()) == 2 and run.launches == 2


# a0 += 1 in place, by a kernel that expects it contiguous; a1 gets what the kernel made
IN_PLACE = program(
    "a0 a1",
    Check("a0", (str(N),), ("1",), None, "w0"),
    launch(0, "a0", "a0"),
    buffer("b0"),
    launch(0, "b0", "a0"),
    Copy("a1", "b0"),
    WriteBack("w0", "a0"),
    outputs=(),
)


def test_inputs_are_written(driver: FakeDriver) -> None:
    run = Case(driver, IN_PLACE)
    for step in (1, 2):
        for _ in range(5):
            x, y = torch.zeros(N * step)[::step], torch.zeros(2 * N)[::2]
            run(x, y)
            assert x.tolist() == [1.0] * N and y.tolist() == [2.0] * N
    assert run.launches == 10 - WARM


# An input is read by the library, written by a kernel, and read again
READ_TWICE = program(
    "a0",
    Call("b0", "aten.mm.default", (Ref("a0"), Ref("a0")), {}),
    launch(0, "a0", "a0", size="16"),
    Call("b1", "aten.mm.default", (Ref("a0"), Ref("a0")), {}),
    outputs=(Ref("b0"), Ref("b1")),
)


def test_copies_of_inputs_are_made_when_they_are_read(driver: FakeDriver) -> None:
    run = Case(driver, READ_TWICE)
    kept = []
    for _ in range(8):
        kept.append(x := torch.randn(N, N))
        before = x.clone()
        first, second = run(x)
        torch.testing.assert_close(first, before @ before)
        torch.testing.assert_close(second, (before + 1) @ (before + 1))
    assert run.launches >= 4


# Views of one result of the library, and one that is part of a larger storage
VIEWS = program(
    "a0 a1",
    Call("b0", "aten.mm.default", (Ref("a0"), Ref("a1")), {}),
    Call("b1", "aten.t.default", (Ref("b0"),), {}),
    matrix("b2"),
    launch(0, "b2", "b0", size="16"),
    outputs=(Ref("b0"), Ref("b1"), Ref("b0", ("2", "2"), ("4", "1"), "5"), Ref("b2", ("4",), ("1",), "4")),
)


def test_views_of_results(driver: FakeDriver) -> None:
    run, x, w = Case(driver, VIEWS), torch.randn(N, N), torch.randn(N, N)
    for _ in range(5):
        whole, turned, part, row = run(x, w)
        torch.testing.assert_close(whole, x @ w)
        assert torch.equal(turned, whole.t()) and torch.equal(part, whole[1:3, 1:3])
        assert whole.data_ptr() == turned.data_ptr() == part.data_ptr() - 20
        torch.testing.assert_close(row, (x @ w + 1)[1])
    assert run.launches == 5 - WARM


def refused(host: HostProgram, driver: FakeDriver) -> str:
    how = Case(driver, host).record.graph
    assert how.startswith("none: ")
    return how.removeprefix("none: ")


def two_calls(target: str, *args: Any, inputs: str = "a0", **kwargs: Any) -> HostProgram:
    first = Call("b0", target, args, kwargs)
    return program(inputs, first, buffer("b1"), launch(0, "b1", "b0"), outputs=(Ref("b1"),))


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (program("a0", buffer("b0"), launch(0, "b0", "a0"), outputs=(Ref("b0"),)), "one launch or none"),
        (two_calls("aten.bernoulli.default", Ref("a0")), "aten.bernoulli.default draws random numbers"),
        (two_calls("aten.nonzero.default", Ref("a0")), "the host waits for what aten.nonzero.default computes"),
        (two_calls("onepass.uniform.default", Ref("a0")), "may do what a graph does not repeat"),
        (two_calls("aten.add.Tensor", Ref("a0"), Ref("x0"), inputs="a0 x0"), "takes a number of the host"),
        (program("a0", Allocate("b0", ("4",), ("1",), "float32", "cpu"), Launch(0, ("b0", "a0"), ("4",)),
                 outputs=(Ref("b0"),)), "a kernel runs on the CPU"),
        (program("a0", Allocate("b0", ("4",), ("1",), "float32", "meta"), launch(0, "b0", "a0"), outputs=(Ref("b0"),)),
         "tensors are on meta and on cpu"),
    ],
)  # fmt: skip
def test_what_no_graph_repeats(driver: FakeDriver, host: HostProgram, reason: str) -> None:
    assert reason in refused(host, driver)


def test_dropout_of_zero_is_not_random() -> None:
    query = Ref("a0")
    calls = [
        two_calls("aten._scaled_dot_product_efficient_attention.default", query, query, query, None, False, p)
        for p in (0.0, 0.1)
    ]
    take_apart(calls[0])
    with pytest.raises(NotRecordable, match="random"):
        take_apart(calls[1])


def test_a_result_that_is_a_view_of_an_input_runs_without(driver: FakeDriver) -> None:
    host = program("a0", Call("b0", "aten.t.default", (Ref("a0"),), {}), matrix("b1"), launch(0, "b1", "a0", size="16"),
                   outputs=(Ref("b0"), Ref("b1")))  # fmt: skip
    run, x = Case(driver, host), torch.randn(N, N)
    for _ in range(5):
        turned, _ = run(x)
        assert turned.data_ptr() == x.data_ptr()
    assert run.record.graph == "none: a result of the library is a view of an input"


def test_what_the_library_writes_stays_where_it_is(driver: FakeDriver) -> None:
    host = program("a0", Call("b0", "aten.add_.Scalar", (Ref("a0"), 1), {}), buffer("b1"), launch(0, "b1", "a0"),
                   outputs=(Ref("b1"),))  # fmt: skip
    run, x = Case(driver, host), torch.zeros(N)
    for k in range(5):
        assert run(x)[0][0] == k + 2 and x[0] == k + 1
    assert run.launches == 5 - WARM
    kept = []
    for _ in range(5):
        kept.append(torch.zeros(N))
        assert run(kept[-1])[0][0] == 2 and kept[-1][0] == 1
    assert run.record.graph == "none: a call of the library writes 1 inputs that move"


def test_auto_decides_by_times(driver: FakeDriver) -> None:
    x = torch.zeros(N)
    short, long = Case(driver, TWO, "auto", device_us=0.01), Case(driver, TWO, "auto", device_us=1e9)
    for _ in range(5):
        short(x)
        long(x)
    assert short.record.graph.startswith("one launch") and short.launches == 3
    assert long.record.graph.startswith("none: launching takes")


def test_memory_after_many_calls(driver: FakeDriver) -> None:
    run, w = Case(driver, OF_INPUTS), torch.randn(N, N)
    for _ in range(20):
        run(torch.randn(N, N), w)
    before = driver.pools[0].bytes, len(driver.graphs)
    for _ in range(1000):
        run(torch.randn(N, N), w)
    assert (driver.pools[0].bytes, len(driver.graphs)) == before


def test_a_dropped_program_gives_its_graphs_back(driver: FakeDriver) -> None:
    run, x = Case(driver, TWO), torch.zeros(N)
    run.warm(x)
    run(x)
    assert len(driver.executables) == 1
    del run
    gc.collect()
    assert not driver.executables and not driver.graphs
