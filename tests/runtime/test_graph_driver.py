"""What is asked of NVIDIA's driver to capture a graph, with a library of ours in its place."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onepass.ir.target import find_target
from onepass.runtime import graph_driver
from onepass.runtime.driver import Driver
from onepass.runtime.graph_driver import CudaGraphs


class Library:
    """Functions of the driver. `fails`: what they return; results are written where the caller wants them."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.fails: dict[str, int] = {}
        self.missing: set[str] = set()
        self.dependencies = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self.missing:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.called.append(name)
            if name == "cuStreamGetCaptureInfo_v3":
                nodes = graph_driver.ctypes.c_void_p(77)
                arguments[4]._obj.contents = nodes
                arguments[6]._obj.value = self.dependencies
            elif arguments and hasattr(arguments[0], "_obj"):
                arguments[0]._obj.value = 55
            elif name == "cuStreamEndCapture" and name not in self.fails:
                arguments[1]._obj.value = 66
            elif name == "cuGraphMemcpyNodeGetParams":
                arguments[1]._obj.width = 12
            return self.fails.get(name, 0)

        return function


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(graph_driver, "driver", lambda _target: Driver(found, ("a", "b", "c", "d")))
    monkeypatch.setattr(Driver, "address", lambda self, name: getattr(self.library, name) and 1)
    for name in ("MemPool", "device", "stream", "use_mem_pool"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle))
    reserved = iter(range(0, 10_000, 512))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: next(reserved))
    return found


def test_a_capture(library: Library) -> None:
    graphs = CudaGraphs(find_target("sm_90"), 0)
    pool = graphs.pool(3)
    assert graphs.pool(3) is pool and graphs.pool(4) is not pool
    library.called.clear()
    with pool.capture() as capture:
        assert capture.node() == 77
        node, copy = capture.copy(1000, 2000, 12)
    assert (node, copy.width, capture.graph, pool.bytes) == (77, 12, 66, 512)
    assert library.called[0] == "cuStreamBeginCapture_v2" and library.called[-1] == "cuStreamEndCapture"
    assert graphs.instantiate(capture.graph) == 55
    graphs.destroy(capture.graph, 55)
    assert library.called[-2:] == ["cuGraphExecDestroy", "cuGraphDestroy"]


def test_an_error_ends_the_capture(library: Library) -> None:
    pool = CudaGraphs(find_target("sm_90"), 0).pool(3)
    with pytest.raises(ValueError, match="mine"), pool.capture():
        raise ValueError("mine")
    assert library.called[-2:] == ["cuStreamEndCapture", "cuGraphDestroy"]
    library.fails["cuStreamEndCapture"] = 901
    with pytest.raises(OSError, match="cuStreamEndCapture returned 901"), pool.capture():
        pass
    with pytest.raises(ValueError, match="mine"), pool.capture():
        raise ValueError("mine")


def test_a_step_of_several_nodes_is_refused(library: Library) -> None:
    library.dependencies = 2
    pool = CudaGraphs(find_target("sm_90"), 0).pool(3)
    with pytest.raises(OSError, match="2 nodes"), pool.capture() as capture:
        capture.node()


def test_an_older_driver(library: Library) -> None:
    library.missing.add("cuStreamGetCaptureInfo_v3")
    with pytest.raises(OSError, match="the driver has no cuStreamGetCaptureInfo_v3"):
        CudaGraphs(find_target("sm_90"), 0)
