"""A driver of CUDA graphs without a GPU: kernels are Python functions on host memory, graphs are lists of nodes.

It is as strict as a real one: inside a capture nothing runs (results are poisoned), and a graph that is ready to launch
has parameters of its own. Memory of a pool is poisoned before every launch: nothing may survive there between calls.
Calls of torch inside a capture become nodes that run them again on the same tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onepass.runtime import executable, graph_text, graphs, recording
from onepass.runtime.graph_driver import CopyNode
from onepass.runtime.kernels import LoadedKernel
from onepass.runtime.triton_kernels import Launchable, _Kernel, _launcher

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
SET_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
SET_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(CopyNode), ctypes.c_void_p)
GRAPH_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
Body = Callable[..., None]  # takes a kernel's words, then the number of programs
ALLOCATING = (
    "aten.empty",
    "aten.new_empty",
    "aten.view",
    "aten.as_strided",
    "aten.t.",
    "aten.transpose",
    "aten.detach",
)


class KernelParameters(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("arguments", ctypes.POINTER(ctypes.c_void_p)), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    ]  # fmt: skip


@dataclass
class Node:
    """What a graph does in one step: a kernel, a copy, or a call of torch."""

    function: int = 0
    words: list[int] = field(default_factory=list)
    programs: int = 0
    copy: tuple[int, int, int] | None = None
    call: Callable[[], None] | None = None


class FakeDriver:
    """Keeps what it is asked. `fails`: names of functions, and what they return from now on."""

    def __init__(self) -> None:
        self.bodies: dict[int, tuple[Body, int]] = {}
        self.graphs: dict[int, list[Node]] = {}
        self.executables: dict[int, list[Node]] = {}
        self.log: list[str] = []
        self.streams: list[int] = []
        self.fails: dict[str, int] = {}
        self.capturing: FakeCapture | None = None
        self.pools: dict[int, FakePool] = {}
        self.context, self.stream, self._next = 1, 0, 1000
        self.kernel_launch = LAUNCH(self._launch_kernel)
        self._functions = (SET_KERNEL(self._set_kernel), SET_COPY(self._set_copy), GRAPH_LAUNCH(self._launch))
        self.set_kernel, self.set_copy, self.launch = (
            ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._functions
        )

    # kernels

    def kernel(self, body: Body, pointers: int, sizes: int, name: str = "k") -> LoadedKernel:
        """A kernel as the runtime loads it, that runs a Python function."""
        self._next += 1
        self.bodies[self._next] = (body, pointers + sizes)
        first = self._next

        def prepare(variant: int) -> None:
            self.log.append(f"built {variant}")
            structure.function[variant] = first

        structure = _Kernel(
            ctypes.cast(self.kernel_launch, ctypes.c_void_p).value, (ctypes.c_void_p * 3)(first), 128,
            (ctypes.c_uint32 * 3)(), pointers, sizes, 0, 0, None, None, None,
        )  # fmt: skip
        entry = _launcher(pointers, sizes)

        def launch(*arguments: int) -> int:
            return int(entry(ctypes.byref(structure), *arguments))

        def recover(*arguments: int) -> None:
            status = launch(*arguments)
            if status < 0:
                prepare(-status)
                status = launch(*arguments)
            assert not status

        return LoadedKernel(
            name, lambda _device: Launchable(launch, recover, entry, structure, prepare), pointers, sizes, False
        )

    def _launch_kernel(self, function: int, programs: int, *rest: Any) -> int:
        arguments, stream = rest[-2], rest[-3] or 0
        _, count = self.bodies[function]
        node = Node(function, _words(arguments, count), programs)
        if self.capturing is not None and stream == self.capturing.stream:
            self.capturing.nodes.append(node)
        else:
            self.log.append("kernel")
            self._run(node)
        return self.fails.get("kernel", 0)

    def _run(self, node: Node) -> None:
        if node.copy is not None:
            target, source, count = node.copy
            ctypes.memmove(target, source, count)
        elif node.call is not None:
            node.call()
        else:
            body, _ = self.bodies[node.function]
            body(*node.words, node.programs)

    # graphs

    def bind(self) -> None:
        self.log.append("bind")

    def pool(self, stream: int) -> FakePool:
        return self.pools.setdefault(stream, FakePool(self, 7000 + len(self.pools)))

    def instantiate(self, graph: int) -> int:
        if error := self.fails.get("instantiate"):
            raise OSError(f"cuGraphInstantiateWithFlags returned {error}")
        self._next += 1
        self.executables[self._next] = [
            Node(n.function, [*n.words], n.programs, n.copy, n.call) for n in self.graphs[graph]
        ]
        self.log.append("instantiate")
        return self._next

    def destroy(self, graph: int, executable: int) -> None:
        del self.graphs[graph], self.executables[executable]
        self.log.append("destroy")

    def _set_kernel(self, executable: int, node: int, parameters: int) -> int:
        found = KernelParameters.from_address(parameters)
        now = self.executables[executable][node - 1]
        _, count = self.bodies[found.function]
        now.function, now.words, now.programs = found.function, _words(found.arguments, count), found.grid[0]
        self.log.append("set kernel")
        return self.fails.get("set kernel", 0)

    def _set_copy(self, executable: int, node: int, copy: Any, context: int) -> int:
        assert context == self.context
        found = copy.contents
        self.executables[executable][node - 1].copy = (found.target.device, found.source.device, found.width)
        self.log.append("set copy")
        return self.fails.get("set copy", 0)

    def _launch(self, executable: int, stream: int | None) -> int:
        if error := self.fails.get("launch"):
            return self.fails.pop("launch") if error == 201 else error
        self.log.append("launch")
        self.streams.append(stream or 0)
        for pool in self.pools.values():
            pool.poison()
        for node in self.executables[executable]:
            self._run(node)
        return 0


class FakePool:
    """Memory that is kept for ever; `bytes` as torch would reserve."""

    def __init__(self, driver: FakeDriver, stream: int) -> None:
        self._driver, self._stream, self.bytes = driver, stream, 0
        self.tensors: list[torch.Tensor] = []

    def keep(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)
        self.bytes += tensor.untyped_storage().nbytes()

    def poison(self) -> None:
        for tensor in self.tensors:
            ctypes.memset(tensor.untyped_storage().data_ptr(), 0xFF, tensor.untyped_storage().nbytes())

    @contextmanager
    def capture(self) -> Iterator[FakeCapture]:
        driver = self._driver
        assert driver.capturing is None
        before, capture = driver.stream, FakeCapture(self, self._stream)
        driver.capturing, driver.stream = capture, self._stream
        try:
            with _Calls(capture):
                yield capture
            if error := driver.fails.get("end"):
                raise OSError(f"cuStreamEndCapture returned {error}")
            driver._next += 1
            capture.graph = driver._next
            driver.graphs[capture.graph] = capture.nodes
        finally:
            driver.capturing, driver.stream = None, before


class FakeCapture:
    def __init__(self, pool: FakePool, stream: int) -> None:
        self.pool, self.stream, self.graph = pool, stream, 0
        self.nodes: list[Node] = []

    def node(self) -> int:
        return len(self.nodes)

    def copy(self, target: int, source: int, count: int) -> tuple[int, CopyNode]:
        self.nodes.append(Node(copy=(target, source, count)))
        found = CopyNode(width=count)
        found.source.device, found.target.device = source, target
        return self.node(), found


class _Calls(TorchDispatchMode):
    """Calls of torch become nodes."""

    def __init__(self, capture: FakeCapture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [a for a in args if isinstance(a, torch.Tensor)] if function._schema.is_mutable else []
        before = [a.clone() for a in given]
        result = function(*args, **kwargs)
        for tensor, value in zip(given, before, strict=True):
            tensor.copy_(value)
        if str(function).startswith(ALLOCATING):
            self.capture.pool.keep(result)
            return result
        found = [r for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, torch.Tensor)]

        def again() -> None:
            with torch.no_grad():
                now = function(*args, **kwargs)
                now = [r for r in (now if isinstance(now, tuple) else (now,)) if isinstance(r, torch.Tensor)]
                for old, new in zip(found, now, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        self.capture.nodes.append(Node(call=again))
        for tensor in found if not given else ():
            self.capture.pool.keep(tensor)
            ctypes.memset(tensor.untyped_storage().data_ptr(), 0xFF, tensor.untyped_storage().nbytes())
        return result


def _words(arguments: Any, count: int) -> list[int]:
    return [ctypes.c_int64.from_address(arguments[k]).value for k in range(count)]


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The fake driver in the runtime's place: streams are numbers, the CPU's tensors are the device's."""
    driver = FakeDriver()

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        if driver.capturing is None:
            result = torch.empty_strided(shape, strides, dtype=dtype)
            ctypes.memset(result.untyped_storage().data_ptr(), 0xFF, result.untyped_storage().nbytes())
            return result
        return torch.empty_strided(shape, strides, dtype=dtype)  # kept by the pool

    monkeypatch.setattr(executable, "empty_cpu", empty)
    monkeypatch.setattr(recording, "empty_cpu", empty)
    monkeypatch.setattr(graph_text, "is_capturing", lambda: driver.capturing is not None or driver.stream < 0)
    monkeypatch.setattr(graphs, "current_stream", lambda _device: driver.stream, raising=False)
    # On a CPU the generated text has a function of its own in the place of torch's.
    monkeypatch.setattr(
        executable.Writer, "_stream", lambda self, device: _named_stream(self, driver, device), raising=True
    )
    return driver


def _named_stream(writer: Any, driver: FakeDriver, device: str) -> str:
    writer.namespace["current_stream"] = lambda _device: driver.stream
    return f"stream{torch.device(device).index or 0}"


def interpreted(driver: FakeDriver, kernel: LoadedKernel) -> LoadedKernel:
    """A kernel of Triton's interpreter, launched by the driver."""
    launch = kernel.function(0)[0]
    return driver.kernel(lambda *words: launch(*words, 0), kernel.pointers, kernel.symbols, kernel.name)
