"""A program recorded as a CUDA graph: what is captured, and what each call changes before it launches the graph.

A `Recorder` captures the steps and remembers every kernel of ours and every copy with the node it became, and which of
its words a caller gives anew (`slots`). A `Recording` launches the graph with a list of such words. Results of library
calls stay in the pool; a copy at the end of the graph puts them into new tensors.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from .graph_driver import Capture, CopyNode, GraphDriver, Pool
from .graph_parts import NotRecordable
from .launcher import launcher
from .torch_private import empty_cpu, empty_cuda
from .triton_kernels import WRONG_CONTEXT, Launchable, _Kernel

FIXED = -1  # in the place of a slot: a word that stays


class _Patch(ctypes.Structure):
    _fields_ = [("word", ctypes.c_int32), ("slot", ctypes.c_int32)]


class _Node(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.POINTER(_Kernel)), ("node", ctypes.c_void_p), ("words", ctypes.POINTER(ctypes.c_uint64)),
        ("patch", ctypes.POINTER(_Patch)), ("programs", ctypes.c_int64), ("copy", ctypes.POINTER(CopyNode)),
        ("patches", ctypes.c_int32), ("stale", ctypes.c_int32),
    ]  # fmt: skip


class _Recording(ctypes.Structure):
    _fields_ = [
        ("graph", ctypes.c_void_p), ("context", ctypes.c_void_p), ("set_kernel", ctypes.c_void_p),
        ("set_copy", ctypes.c_void_p), ("launch", ctypes.c_void_p), ("nodes", ctypes.POINTER(_Node)),
        ("count", ctypes.c_int32),
    ]  # fmt: skip


@dataclass(slots=True)
class Step:
    """A node whose words may change: of a kernel (`launchable`, and `kernel` as it is in the graph) or of a copy."""

    node: int
    words: tuple[int, ...]
    slots: tuple[int, ...]
    programs: int = 0
    launchable: Launchable | None = None
    kernel: _Kernel | None = None
    copy: CopyNode | None = None

    def as_node(self) -> _Node:
        """For `gpu_launcher.c`."""
        patches = [_Patch(k, slot) for k, slot in enumerate(self.slots) if slot != FIXED]
        words = (ctypes.c_uint64 * max(1, len(self.words)))(*(w & (1 << 64) - 1 for w in self.words))
        return _Node(
            ctypes.pointer(self.kernel) if self.kernel is not None else None, self.node, words,
            (_Patch * max(1, len(patches)))(*patches), self.programs,
            ctypes.pointer(self.copy) if self.copy is not None else None, len(patches), 0,
        )  # fmt: skip


@dataclass(slots=True)
class Storage:
    """Memory that callers see after a call, made anew by each: as much as a tensor of this shape takes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> torch.Tensor:
        """A new tensor."""
        make = empty_cuda if self.device.type == "cuda" else empty_cpu
        return make(self.shape, self.strides, self.dtype)


@dataclass(slots=True)
class Result:
    """A result of the library as callers see it: part of a storage, or a tensor of the host that is always the same."""

    storage: int
    view: tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype] | None = None  # None: all of it
    same: Any = None

    def of(self, storages: Sequence[torch.Tensor]) -> Any:
        """The result of one call."""
        if self.storage < 0:
            return self.same.clone() if isinstance(self.same, torch.Tensor) else self.same
        if self.view is None:
            return storages[self.storage]
        shape, strides, offset, dtype = self.view
        return storages[self.storage].view(dtype).as_strided(shape, strides, offset)


class Recorder:
    """Records one call. A context: what happens inside it is captured. `device`: of its kernels and tensors."""

    def __init__(self, driver: GraphDriver, pool: Pool, device: torch.device, slots: int) -> None:
        self.driver, self.pool, self.device, self.slots = driver, pool, device, slots
        self.steps: list[Step] = []
        self.static: list[int] = []  # addresses that tables hold
        self.storages: list[Storage] = []
        self.results: list[Result] = []
        self.copied_bytes = self.calls = 0
        self._inputs: set[int] = set()
        self._inside = ExitStack()
        self.capture: Capture

    def __enter__(self) -> Recorder:
        self.driver.bind()
        self.capture = self._inside.enter_context(self.pool.capture())
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)

    def launch(self, function: Any, slots: tuple[int, ...], *arguments: int) -> None:
        """Launch a kernel of ours: its words, programs and stream."""
        if not isinstance(function, Launchable):
            raise NotRecordable("a kernel cannot be launched by a graph")
        *words, programs, _ = arguments
        if programs <= 0:
            return
        kernel = _Kernel.from_buffer_copy(function.structure)
        kernel.overlap = None  # a kernel of a graph starts when the one before has ended
        if status := function.entry(ctypes.byref(kernel), *arguments):
            raise RuntimeError(f"a kernel could not be captured: status {status}")
        self.steps.append(Step(self.capture.node(), tuple(words), slots, programs, function, kernel))

    def given(self, *tensors: torch.Tensor) -> None:
        """What calls of the library read where it lies."""
        for tensor in tensors:
            self._check(tensor)
            self._inputs.add(tensor.untyped_storage().data_ptr())

    def copied(self, tensor: torch.Tensor, slot: int) -> torch.Tensor:
        """A copy of an input for calls of the library, made by the graph."""
        self._check(tensor)
        result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self._inputs.add(result.untyped_storage().data_ptr())
        count = result.untyped_storage().nbytes()
        if tensor.numel():
            self._copy(result.data_ptr(), tensor.data_ptr(), count, (FIXED, slot))
        return result

    def called(self, result: Any) -> Any:
        """What a call of the library made."""
        self.calls += 1
        if isinstance(result, torch.Tensor):
            self._check(result)
        return result

    def finish(self, results: Sequence[Any]) -> None:
        """Copy what callers see out of the pool, each storage once."""
        numbers: dict[int, int] = {}
        for value in results:
            if not isinstance(value, torch.Tensor) or value.device != self.device:
                self.results.append(Result(-1, same=value))
                continue
            address = value.untyped_storage().data_ptr()
            if address in self._inputs and value.numel():
                raise NotRecordable("a result of the library is a view of an input")
            if address not in numbers or not value.numel():
                numbers[address] = self._new_storage(value)
            self.results.append(self._seen(value, numbers[address]))

    def _new_storage(self, value: torch.Tensor) -> int:
        count = value.untyped_storage().nbytes()
        whole = value.storage_offset() == 0 and _span(value) * value.element_size() == count
        storage = Storage(tuple(value.shape), value.stride(), value.dtype, value.device)
        if not whole:
            storage = Storage((count,), (1,), torch.uint8, value.device)
        self.storages.append(storage)
        if value.numel():
            slot = self.slots + len(self.storages) - 1
            self._copy(storage.made().data_ptr(), value.untyped_storage().data_ptr(), count, (slot, FIXED))
        return len(self.storages) - 1

    def _seen(self, value: torch.Tensor, number: int) -> Result:
        storage = self.storages[number]
        view = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype)
        same = (storage.shape, storage.strides, 0, storage.dtype) == view
        return Result(number, None if same else view)

    def _copy(self, target: int, source: int, count: int, slots: tuple[int, int]) -> None:
        node, copy = self.capture.copy(target, source, count)
        self.copied_bytes += count
        self.steps.append(Step(node, (target, source), slots, copy=copy))

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.device != self.device:
            raise NotRecordable(f"a call of the library takes or makes a tensor on {tensor.device}")


def _span(value: torch.Tensor) -> int:
    """Elements from the first to the last."""
    if not value.numel():
        return 0
    steps: list[int] = [(n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)]
    return 1 + sum(steps)


@dataclass(eq=False)
class Recording:
    """A recorded program, ready to be launched."""

    recorder: Recorder
    static: list[int] = field(init=False)

    def __post_init__(self) -> None:
        r = self.recorder
        self.static, self.steps = r.static, [s for s in r.steps if any(x != FIXED for x in s.slots)]
        self._driver, self._pool, self._graph = r.driver, r.pool, r.capture.graph
        self._executable = r.driver.instantiate(self._graph)
        self._kept = [s.as_node() for s in self.steps]
        self._nodes = (_Node * max(1, len(self.steps)))(*self._kept)
        self._structure = _Recording(
            self._executable, r.driver.context, r.driver.set_kernel, r.driver.set_copy, r.driver.launch, self._nodes,
            len(self.steps),
        )  # fmt: skip
        self._address = ctypes.addressof(self._structure)
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        entry = ctypes.cast(launcher().onepass_replay, ctypes.c_void_p).value or 0
        self._launch: Callable[[int, int, int], int] = prototype(entry)
        self._lock = threading.Lock()  # between setting words and launching

    def made(self) -> list[torch.Tensor]:
        """New storages for what the library computes."""
        return [s.made() for s in self.recorder.storages]

    def results(self, storages: list[torch.Tensor]) -> list[Any]:
        """The library's results in these storages."""
        return [r.of(storages) for r in self.recorder.results]

    def replay(self, words: tuple[int, ...], stream: int) -> int:
        """Launch with these words in the slots; the driver's error where nothing was launched."""
        given = array("q", words)
        with self._lock:
            status: int = self._launch(self._address, given.buffer_info()[0], stream)
            return self._recovered(status, given, stream) if status else 0

    def _recovered(self, status: int, given: array[int], stream: int) -> int:
        if status == WRONG_CONTEXT:  # a thread that only launches has no context
            self._driver.bind()
            status = self._launch(self._address, given.buffer_info()[0], stream)
        for _ in range(2 * len(self.steps)):
            if status >= 0:
                break
            number, variant = divmod(-status, 4)
            step = self.steps[number]
            assert step.launchable is not None and step.kernel is not None
            if not step.launchable.structure.function[variant]:
                step.launchable.prepare(variant)
            step.kernel.function[variant] = step.launchable.structure.function[variant]
            step.kernel.shared[variant] = step.launchable.structure.shared[variant]
            status = self._launch(self._address, given.buffer_info()[0], stream)
        return status

    def __del__(self) -> None:
        if executable := getattr(self, "_executable", 0):
            self._driver.destroy(self._graph, executable)
