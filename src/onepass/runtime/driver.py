"""The GPU's driver, by ctypes: loading machine code and finding what launches it."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from ..ir.target import Target

_CUDA = ("libcuda.so.1", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel")
_HIP = ("libamdhip64.so", "hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel")
ENCODE, OVERLAP = "cuTensorMapEncodeTiled", "cuLaunchKernelEx"  # describes matrices; launches with attributes
_SHARED_SIZE = 8  # the attribute: how much shared memory a launch may ask for
_FREE_SHARED = 48 << 10  # available without asking; HIP gives all there is, and its call takes no function of a module


@dataclass(frozen=True, slots=True)
class Driver:
    """One vendor's driver."""

    library: Any
    names: tuple[str, ...]

    def address(self, name: str = "") -> int:
        """Where a function of the driver is; without a name the one that launches kernels."""
        return ctypes.cast(getattr(self.library, name or self.names[3]), ctypes.c_void_p).value or 0

    def bind(self, device: int) -> None:
        """Make the device's context this thread's; a thread that only launches has none."""
        if self.names is _HIP:
            return  # HIP does so by itself
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
        self.call("cuCtxSetCurrent", context)

    def load(self, binary: bytes, entry: str, shared: int) -> int:
        """The function `entry` of a binary, loaded on the current device."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call(self.names[1], ctypes.byref(module), binary)
        self.call(self.names[2], ctypes.byref(function), module, entry.encode())
        if shared > _FREE_SHARED and self.names is _CUDA:
            self.call("cuFuncSetAttribute", function, ctypes.c_int(_SHARED_SIZE), ctypes.c_int(shared))
        return function.value or 0

    def call(self, name: str, *arguments: Any) -> None:
        """A function of the driver; OSError where it returns an error."""
        status = getattr(self.library, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")


@functools.cache
def driver(target: Target) -> Driver:
    """The driver that runs a target's kernels."""
    names = _HIP if target.name.startswith("gfx") else _CUDA
    return Driver(ctypes.CDLL(names[0]), names)
