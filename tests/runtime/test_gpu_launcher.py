"""What the launcher hands to the driver, with functions of ours in the driver's place."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from onepass.errors import CompilerNotFound
from onepass.ir.target import find_target
from onepass.runtime import launcher as launching
from onepass.runtime.driver import driver as driver_of
from onepass.runtime.triton_kernels import ANY_POINTERS, ANY_SIZES, _Kernel, _launcher, _Matrix

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
    *[ctypes.POINTER(ctypes.c_uint64)] * 2, *[ctypes.POINTER(ctypes.c_uint32)] * 2, *[ctypes.c_int] * 4,
)  # fmt: skip
ALIGNED, PLAIN, GENERAL = 11, 33, 22


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("_", ctypes.c_int), ("flag", ctypes.c_int), ("__", ctypes.c_ubyte * 60)]


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


OVERLAP = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Launch), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)


def word(address: int | None, kind: Any) -> int:
    assert address is not None
    return int(kind.from_address(address).value)


class Driver:
    """Keeps what it is asked; refuses matrices on request."""

    def __init__(self, refuses: bool = False) -> None:
        self.launched: list[tuple[int, int, list[int]]] = []
        self.described: list[tuple[int, list[int], int, list[int]]] = []
        self.count, self.refuses = 0, refuses
        self.launch, self.encode = LAUNCH(self._launch), ENCODE(self._encode)

    def _launch(self, function: int, programs: int, *rest: Any) -> int:
        arguments = rest[-2]
        plain = [word(arguments[k], ctypes.c_uint64) for k in range(self.count)]
        if function in (ALIGNED, PLAIN):
            at = self.count
            plain += [word(arguments[at], ctypes.c_uint64)]
            plain += [word(arguments[at + k], ctypes.c_int32) for k in (1, 2)]
            plain += [word(arguments[at + k], ctypes.c_int64) for k in (3, 4)]
        self.launched.append((function, programs, plain))
        return 0

    def _encode(self, out: int, kind: int, rank: int, address: int, sizes: Any, pitch: Any, block: Any, *_: Any) -> int:
        if self.refuses:
            return 1
        self.described.append((address, [sizes[0], sizes[1]], pitch[0], [block[0], block[1]]))
        ctypes.c_uint64.from_address(out).value = 77
        return 0


class Early(Driver):
    """A driver that launches with attributes."""

    def __init__(self, knows: bool = True) -> None:
        super().__init__()
        self.knows = knows
        self.asked: list[tuple[list[int], int, int, list[int]]] = []
        self.overlap = OVERLAP(self._overlap)

    def _overlap(self, config: Any, function: int, arguments: Any, _: Any) -> int:
        launch = config.contents
        attributes = [(launch.attributes[k].id, launch.attributes[k].flag) for k in range(launch.count)]
        self.asked.append(([*launch.grid, *launch.block], launch.shared, launch.stream, attributes))
        return self._launch(function, launch.grid[0], arguments, None) if self.knows else 1


def launcher(driver: Driver, general: int | None, plain: int | None = None, multiples: int = 0) -> Any:
    driver.count = 3
    matrix = (_Matrix * 1)(_Matrix(1, 9, 3, 2, (ctypes.c_int64 * 2)(100, 64), (ctypes.c_uint32 * 2)(32, 16)))
    kernel = _Kernel(
        ctypes.cast(driver.launch, ctypes.c_void_p).value, (ctypes.c_void_p * 3)(ALIGNED, plain, general), 128,
        (ctypes.c_uint32 * 3)(), 2, 1, 1, multiples,
        ctypes.cast(driver.encode, ctypes.c_void_p).value, matrix,
        ctypes.cast(driver.overlap, ctypes.c_void_p).value if isinstance(driver, Early) else None,
    )  # fmt: skip
    call = _launcher(2, 1)
    return lambda *words: call(ctypes.byref(kernel), *words)


def test_matrices_follow_pointers_and_sizes() -> None:
    driver = Driver()
    assert launcher(driver, None)(1600, 3200, 5, 8, 0) == 0
    assert driver.described == [(3200, [64, 100], 128, [16, 32])]
    assert driver.launched == [(ALIGNED, 8, [1600, 3200, 5, 77, 100, 64, 64, 1])]


@pytest.mark.parametrize(("pointer", "refuses"), [(3202, False), (3200, True)])
def test_what_cannot_be_described_is_read_without(pointer: int, refuses: bool) -> None:
    driver = Driver(refuses)
    assert launcher(driver, None)(1600, pointer, 5, 8, 0) == -ANY_POINTERS
    assert launcher(driver, GENERAL)(1600, pointer, 5, 8, 0) == 0
    assert driver.launched == [(GENERAL, 8, [1600, pointer, 5])]


@pytest.mark.parametrize(
    ("size", "multiples", "function"), [(40, 1, ALIGNED), (44, 1, PLAIN), (44, 0, ALIGNED), (0, 1, ALIGNED)]
)
def test_sizes_that_are_no_multiples(size: int, multiples: int, function: int) -> None:
    driver = Driver()
    expected = 0 if function == ALIGNED else -ANY_SIZES
    assert launcher(driver, None, None, multiples)(1600, 3200, size, 8, 0) == expected
    driver = Driver()
    assert launcher(driver, None, PLAIN, multiples)(1600, 3200, size, 8, 0) == 0
    assert driver.launched == [(function, 8, [1600, 3200, size, 77, 100, 64, 64, 1])]


def test_pointers_go_before_sizes() -> None:
    driver = Driver()
    assert launcher(driver, GENERAL, PLAIN, 1)(1602, 3200, 44, 8, 0) == 0
    assert [f for f, _, _ in driver.launched] == [GENERAL]


def test_a_launcher_that_could_not_be_built_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise CompilerNotFound(["cc"])

    monkeypatch.setattr(launching, "_started", [])
    with monkeypatch.context() as patch:
        patch.setattr(launching, "find_toolchain", missing)
        with pytest.raises(CompilerNotFound):
            launching.launcher()
    assert launching.launcher() is launching.launcher()


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(launching, "_started", [])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(launching, "_build", lambda future: future.set_result("built"))
    assert launching.launcher() == "built"


@pytest.mark.parametrize(("name", "asks"), [("sm_90", ["cuFuncSetAttribute"]), ("gfx942", [])])
def test_much_shared_memory(name: str, asks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """HIP's call is for functions of the program itself; it would refuse those of a module."""
    called: list[str] = []

    class Library:
        def __getattr__(self, function: str) -> Any:
            return lambda *_: called.append(function) or 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    driver_of.__wrapped__(find_target(name)).load(b"", "entry", 49 << 10)
    driver_of.__wrapped__(find_target(name)).load(b"", "entry", 48 << 10)
    assert [c for c in called if "Attribute" in c] == asks and len(called) == 4 + len(asks)


def test_no_programs_launch_nothing() -> None:
    driver = Driver()
    assert launcher(driver, None)(1600, 3200, 5, 0, 0) == 0
    assert not driver.launched


def test_many_arguments() -> None:
    """Programs that join hundreds of tensors: all of them arrive, nothing is written beside them."""
    driver = Driver()
    driver.count, count = 1001, 1000
    kernel = _Kernel(
        ctypes.cast(driver.launch, ctypes.c_void_p).value, (ctypes.c_void_p * 3)(ALIGNED, None, GENERAL), 128,
        (ctypes.c_uint32 * 3)(), count, 1, 0, 0, None, None, None,
    )  # fmt: skip
    words = [16 * k + 1 for k in range(count)]
    assert _launcher(count, 1)(ctypes.byref(kernel), *words, 5, 8, 0) == 0
    assert driver.launched == [(GENERAL, 8, [*words, 5])]


def test_more_programs_than_a_grid_has() -> None:
    driver = Driver()
    launch = launcher(driver, None)
    assert launch(1600, 3200, 5, (1 << 32) + 8, 0) == launch(1600, 3200, 5, 1 << 31, 0) == 1
    assert not driver.launched and launch(1600, 3200, 5, (1 << 31) - 1, 0) == 0


def test_a_kernel_that_waits_by_itself_may_be_started_early() -> None:
    driver = Early()
    assert launcher(driver, None)(1600, 3200, 5, 8, 4096) == 0
    assert driver.asked == [([8, 1, 1, 128, 1, 1], 0, 4096, [(6, 1)])]
    assert driver.launched == [(ALIGNED, 8, [1600, 3200, 5, 77, 100, 64, 64, 1])]


def test_a_driver_that_cannot_start_early_starts_as_always() -> None:
    driver = Early(knows=False)
    assert launcher(driver, None)(1600, 3200, 5, 8, 0) == 0
    assert len(driver.asked) == 1
    assert driver.launched == [(ALIGNED, 8, [1600, 3200, 5, 77, 100, 64, 64, 1])]
