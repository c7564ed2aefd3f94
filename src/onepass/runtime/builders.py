"""Which builder makes a target's kernels: the C compiler, Triton for a GPU, or Triton's interpreter."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from ..ir.source import KernelSource
from ..ir.target import Target
from .kernels import Builder, Function
from .toolchain import PRELUDE_FOLDER, find_toolchain

INTERPRETED = "triton-interpret"


def builder_for(target: Target) -> Builder:
    """The builder of a target's kernels. Starts and imports nothing that a warm process does without."""
    if target.language == "c":
        return find_toolchain(PRELUDE_FOLDER)
    if target.name == INTERPRETED:
        return InterpretedBuilder()
    from .triton_kernels import TritonBuilder

    return TritonBuilder(target)


class InterpretedBuilder:
    """Kernels that Triton's interpreter runs: building is writing the text down."""

    def fingerprint(self) -> str:
        return prelude_digest()

    def build(self, source: KernelSource, output: Path) -> None:
        output.write_text(source.text)

    def load(self, path: Path, source: KernelSource) -> Function:
        from .triton_interpret import interpreted

        return interpreted(source)


@functools.cache
def prelude_digest() -> str:
    """Changes with what generated Triton calls, and with how machine code is made of it."""
    called = [PRELUDE_FOLDER / f"triton_{name}.py" for name in ("prelude", "hardware", "nvidia")]
    made_by = [Path(__file__).with_name(f"{name}.py") for name in ("triton_kernels", "triton_private", "assembler")]
    files = (*called, *made_by)
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
