"""Programs as CUDA graphs, on a driver that is not there: what callers see is what they see without graphs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from onepass.ir.record import CompileRecord
from onepass.ir.source import Allocate, Call, Check, Free, HostProgram, Instruction, Launch, Ref
from onepass.runtime.executable import Executable
from onepass.runtime.graphs import WARM, Graphs

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
