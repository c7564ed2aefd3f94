"""What the runtime asks of a GPU's driver about CUDA graphs: capture, find nodes, make a graph ready to launch.

One narrow interface, so that tests can put another driver in its place. A capture runs on a stream of its own, and what
torch allocates meanwhile comes from a pool of its own: nothing else in the process is part of it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from ..ir.target import Target
from .driver import Driver, driver

_NOT_BLOCKING = 1  # a stream that does not wait for the default stream
_THREAD_LOCAL = 1  # a capture that other threads do not disturb
_LAUNCH, _SET_KERNEL, _SET_COPY = (
    "cuGraphLaunch", "cuGraphExecKernelNodeSetParams_v2", "cuGraphExecMemcpyNodeSetParams",
)  # fmt: skip
NEEDED = (_LAUNCH, _SET_KERNEL, _SET_COPY, "cuStreamGetCaptureInfo_v3", "cuGraphMemcpyNodeGetParams")


class CopyEnd(ctypes.Structure):
    """One end of a copy, as the driver describes it."""

    _fields_ = [
        ("x", ctypes.c_uint64), ("y", ctypes.c_uint64), ("z", ctypes.c_uint64), ("level", ctypes.c_uint64),
        ("kind", ctypes.c_int), ("host", ctypes.c_void_p), ("device", ctypes.c_uint64), ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p), ("pitch", ctypes.c_uint64), ("height", ctypes.c_uint64),
    ]  # fmt: skip


class CopyNode(ctypes.Structure):
    """A copy in a graph."""

    _fields_ = [
        ("source", CopyEnd), ("target", CopyEnd),
        ("width", ctypes.c_uint64), ("height", ctypes.c_uint64), ("depth", ctypes.c_uint64),
    ]  # fmt: skip


class Pool(Protocol):
    """Memory for what a recorded program keeps to itself; those of one stream share it, for they never run at once."""

    bytes: int

    def capture(self) -> AbstractContextManager[Capture]:
        """What torch and kernels do on the current stream inside the context is captured; then `graph` is there."""


class Capture(Protocol):
    """A capture under way, or ended."""

    graph: int

    def node(self) -> int:
        """The node that was captured last."""

    def copy(self, target: int, source: int, count: int) -> tuple[int, CopyNode]:
        """Copy bytes: the node, and how the driver describes it."""


class GraphDriver(Protocol):
    """What records graphs on one device."""

    context: int
    set_kernel: int  # addresses of the driver's functions, for `gpu_launcher.c`
    set_copy: int
    launch: int

    def bind(self) -> None:
        """Make the device's context this thread's."""

    def pool(self, stream: int) -> Pool:
        """The pool of a stream."""

    def instantiate(self, graph: int) -> int:
        """A graph that can be launched."""

    def destroy(self, graph: int, executable: int) -> None:
        """Give both back; what runs is ended first."""


class CudaGraphs:
    """The driver of NVIDIA's GPUs."""

    def __init__(self, target: Target, device: int) -> None:
        self.driver, self.device = driver(target), device
        for name in NEEDED:
            if not hasattr(self.driver.library, name):
                raise OSError(f"the driver has no {name}")
        self.set_kernel, self.set_copy = self.driver.address(_SET_KERNEL), self.driver.address(_SET_COPY)
        self.launch = self.driver.address(_LAUNCH)
        self.bind()
        context = ctypes.c_void_p()
        self.driver.call("cuCtxGetCurrent", ctypes.byref(context))
        self.context = context.value or 0
        # For ever: the library keeps workspaces of a capture's stream in its pool.
        self._pools: dict[int, Pool] = {}

    def bind(self) -> None:
        self.driver.bind(self.device)

    def pool(self, stream: int) -> Pool:
        if stream not in self._pools:
            self._pools[stream] = CudaPool(self.driver, self.device)
        return self._pools[stream]

    def instantiate(self, graph: int) -> int:
        executable = ctypes.c_void_p()
        self.driver.call(
            "cuGraphInstantiateWithFlags", ctypes.byref(executable), ctypes.c_void_p(graph), ctypes.c_uint64(0)
        )
        return executable.value or 0

    def destroy(self, graph: int, executable: int) -> None:
        if executable:
            self.driver.library.cuGraphExecDestroy(ctypes.c_void_p(executable))
        if graph:
            self.driver.library.cuGraphDestroy(ctypes.c_void_p(graph))


class CudaPool:
    """A pool of torch's allocator, and a stream that nobody else has: torch's own streams may be a user's, too."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device, self.bytes = driver, device, 0
        with torch.cuda.device(device):
            self._memory = torch.cuda.MemPool()
        handle = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(handle), ctypes.c_uint(_NOT_BLOCKING))
        self._stream = torch.cuda.ExternalStream(handle.value or 0, device=device)

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        capture = CudaCapture(self._driver, self._stream.cuda_stream)
        reserved = torch.cuda.memory_reserved(self._device)
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._memory, self._device):
            capture.begin()
            try:
                yield capture
            except BaseException:
                capture.abandon()
                raise
            capture.end()
        self.bytes += max(0, torch.cuda.memory_reserved(self._device) - reserved)


class CudaCapture:
    """A capture on a stream."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._stream, self.graph = driver, ctypes.c_void_p(stream), 0

    def begin(self) -> None:
        """Start."""
        self._driver.call("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_THREAD_LOCAL))

    def end(self) -> None:
        """End it; OSError where something in it could not be captured."""
        graph = ctypes.c_void_p()
        self._driver.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self.graph = graph.value or 0

    def abandon(self) -> None:
        """End it, and forget what was captured."""
        graph = ctypes.c_void_p()
        self._driver.library.cuStreamEndCapture(self._stream, ctypes.byref(graph))
        if graph.value:
            self._driver.library.cuGraphDestroy(graph)

    def node(self) -> int:
        state, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
        graph, nodes, edges = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
        self._driver.call(
            "cuStreamGetCaptureInfo_v3", self._stream, ctypes.byref(state), ctypes.byref(number), ctypes.byref(graph),
            ctypes.byref(nodes), ctypes.byref(edges), ctypes.byref(count),
        )  # fmt: skip
        if count.value != 1:
            raise OSError(f"{count.value} nodes were captured last, where one was expected")
        return nodes[0] or 0

    def copy(self, target: int, source: int, count: int) -> tuple[int, CopyNode]:
        ends = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(count))
        self._driver.call("cuMemcpyDtoDAsync_v2", *ends, self._stream)
        node, found = self.node(), CopyNode()
        self._driver.call("cuGraphMemcpyNodeGetParams", ctypes.c_void_p(node), ctypes.byref(found))
        return node, found


@functools.cache
def graph_driver(target: Target, device: int) -> GraphDriver:
    """What records graphs on a device; OSError where its driver is too old."""
    return CudaGraphs(target, device)
