"""A builder whose kernels come ready in an exported file: it writes machine code down and compiles nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import KernelBuildError
from ..ir.source import KernelSource
from ..ir.target import Target
from .kernels import Function
from .toolchain import load_c

LAUNCHER = "launcher"  # the member that launches kernels on GPUs


class ShippedBuilder:
    """The builder of a file's kernels. `binaries`: by the key of each source; `checksum`: of the file."""

    def __init__(self, target: Target, binaries: Mapping[str, bytes], checksum: str) -> None:
        self.target = target
        self._binaries, self._checksum = binaries, checksum

    def fingerprint(self) -> str:
        return f"shipped {self._checksum}"

    def build(self, source: KernelSource, output: Path) -> None:
        if source.key not in self._binaries:
            raise KernelBuildError("reading an exported program", f"it has no kernel {source.name}", source.key)
        output.write_bytes(self._binaries[source.key])

    def load(self, path: Path, source: KernelSource) -> Function:
        if self.target.language == "c":
            return load_c(path, source)
        from .triton_kernels import TileKernel, read_binary

        return TileKernel(read_binary(path.read_bytes()), source, self, False)
