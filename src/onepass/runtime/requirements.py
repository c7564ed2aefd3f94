"""What an exported program needs of the machine it runs on, and whether it is there.

Noted at export, checked at load, before any code of the file is mapped.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import IncompatibleFile, UnknownTarget
from ..ir import draws as draws  # defines operators that programs call
from ..ir.callables import resolve_callable
from .device import current_chip
from .toolchain import instruction_sets, torch_openmp

FORMAT = 1
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Requirements:
    """`operators`: the schema of each that is called. `glibc`, `cuda`: the oldest versions."""

    target: str
    system: str
    machine: str
    instructions: tuple[str, ...]  # of a CPU
    openmp: str  # torch's library of threads, which kernels use
    operators: dict[str, str]
    glibc: tuple[int, int] = (0, 0)
    cuda: tuple[int, int] = (0, 0)  # of the GPU's driver

    def to_json(self) -> Any:
        """Plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> Requirements:
        """Raises TypeError or ValueError where the data are no requirements."""
        pairs = {name: tuple(map(int, data[name])) for name in ("glibc", "cuda")}
        return Requirements(**{**data, **pairs, "instructions": tuple(map(str, data["instructions"]))})

    def check(self, path: str) -> None:
        """`IncompatibleFile` for the first thing that is missing here."""
        self._check_machine(path)
        self._check_operators(path)
        if self.target != "cpu":
            self._check_chip(path)

    def _check_machine(self, path: str) -> None:
        here = machine_here()
        if here != (self.system, self.machine):
            fix = "Export it on such a machine."
            raise IncompatibleFile(path, f"{self.system} on {self.machine}", " on ".join(here), fix)
        if missing := sorted(set(self.instructions) - instruction_sets()):
            fix = 'Export it with march="x86-64-v3", or what both processors have.'
            raise IncompatibleFile(path, f"a processor with {', '.join(missing)}", "one without", fix)
        found = tuple(int(n) for n in re.findall(r"\d+", platform.libc_ver()[1])[:2])
        if self.glibc > found:
            fix = "Export it on a system as old as this one."
            raise IncompatibleFile(path, f"glibc {_dotted(self.glibc)}", _dotted(found) or "another C library", fix)
        own = Path(next(iter(torch_openmp()), "")).name
        if self.openmp and self.openmp != own:
            needed = f"a torch that comes with {self.openmp}"
            fix = "Install the same build of torch, or export the program with this one."
            raise IncompatibleFile(path, needed, f"one with {own or 'none'}", fix)

    def _check_operators(self, path: str) -> None:
        for name, schema in self.operators.items():
            try:
                found = schema_of(name)
            except LookupError:
                found = "none of that name"
            if found != schema:
                fix = f"This is torch {torch.__version__}; use the torch that exported it, or export it again."
                own = name.split(".")[0]
                if own not in ("aten", "prims", "onepass"):
                    fix = f"Load the library that defines {own} first: torch.ops.load_library(...)."
                raise IncompatibleFile(path, f"the operator {name}: {schema}", found, fix)

    def _check_chip(self, path: str) -> None:
        if (here := _chip_here()) != self.target:
            fix = f"Run it on such a chip, or export it for this one: onepass.export(..., target={here or 'cpu'!r})."
            raise IncompatibleFile(path, f"a GPU of the kind {self.target}", here or "none", fix)
        if self.cuda > (0, 0) and (own := _driver_version()) < (self.cuda[0], 0):
            fix = "Update the GPU's driver."
            raise IncompatibleFile(path, f"a driver for CUDA {self.cuda[0]}", f"one for {_dotted(own)}", fix)


def machine_here() -> tuple[str, str]:
    """The system and the kind of processor."""
    return platform.system(), platform.machine()


def needed_openmp(binaries: Iterable[bytes]) -> str:
    """The library of threads that torch ships, if one of the binaries uses it."""
    name = Path(next(iter(torch_openmp()), "")).name
    return name if any(name.encode() in binary for binary in binaries) else ""


def _chip_here() -> str:
    """The target of the current GPU; nothing where there is none."""
    if not torch.cuda.is_available():
        return ""
    try:
        return current_chip().name
    except UnknownTarget:
        return str(torch.cuda.get_device_name())


def _driver_version() -> tuple[int, int]:
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def glibc_of(binaries: Iterable[bytes]) -> tuple[int, int]:
    """The newest version of the C library whose functions the binaries call."""
    found = (m for binary in binaries for m in _GLIBC.finditer(binary))
    return max(((int(m[1]), int(m[2])) for m in found), default=(0, 0))


def schema_of(name: str) -> str:
    """What an operator takes and gives; LookupError where there is none."""
    return str(getattr(resolve_callable(name), "_schema", ""))
