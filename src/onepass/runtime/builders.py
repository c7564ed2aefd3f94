"""Which builder makes a target's kernels: the C compiler, Triton for a GPU, or Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from ..ir.source import KernelSource
from ..ir.target import Target
from .kernels import Builder, Function
from .prelude import PRELUDE_FOLDER, prelude_digest
from .toolchain import find_toolchain

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
