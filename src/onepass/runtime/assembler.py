"""The assembler inside the triton package: asked what a kernel takes, and given what Triton 3.6 orders wrongly.

On Hopper the matrix unit works beside the threads, and `wgmma.fence` orders their registers with it. Triton's compiler
sometimes sets registers of a product after the fence in front of it, where the unit may not see them: the sums are then
wrong. A second fence right before the product is always allowed, and makes them right.
"""

from __future__ import annotations

import re
import subprocess
import threading

from ..errors import KernelBuildError
from ..ir.target import Target
from .scratch import scratch_folder

FENCE, PRODUCT, END = "wgmma.fence.sync.aligned", "wgmma.mma_async", "wgmma.commit_group"
_TARGETS = re.compile(r"(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)")
_REGISTER = re.compile(r"%\w+")
_OPERANDS = re.compile(r"\{([^}]*)\}")


def fenced(ptx: str) -> str:
    """The text with another fence before every product whose registers are set behind the last one."""
    if PRODUCT not in ptx:
        return ptx
    lines: list[str] = []
    written: set[str] | None = None  # since the fence, while products are being started
    for line in ptx.split("\n"):
        text = line.strip()
        if text.startswith(FENCE):
            written = set()
        elif text.startswith(PRODUCT):
            used = {r for group in _OPERANDS.findall(text) for r in _REGISTER.findall(group)}
            if written is not None and used & written:
                lines.insert(_before_inline(lines), f"\t{FENCE};")
            written = set()
        elif text.startswith(END):
            written = None
        elif written is not None and (found := _TARGETS.match(text)) is not None:
            written.update(_REGISTER.findall(found.group(1)))
        lines.append(line)
    return "\n".join(lines)


def _before_inline(lines: list[str]) -> int:
    """In front of the text that the product is written in."""
    return len(lines) - 1 if lines and lines[-1].strip() == "// begin inline asm" else len(lines)


def assemble(ptx: str, target: Target, exact: bool) -> bytes:
    """The machine code of a kernel. `exact`: products and sums are not contracted."""
    binary = scratch_folder() / f"{threading.get_ident()}.cubin"
    said = _run(ptx, target, str(binary), ["--fmad=false"] if exact else [])
    try:
        return binary.read_bytes()
    except OSError as error:
        raise KernelBuildError(f"ptxas for {target.name}", said, "") from error
    finally:
        binary.unlink(missing_ok=True)


def registers_and_spills(ptx: str, target: Target) -> tuple[int, int]:
    """Registers per thread and bytes spilled, as the assembler says."""
    said = _run(ptx, target, "/dev/null", [])
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return int(registers.group(1)) if registers else 0, max((int(s) for s in spilled), default=0)


def _run(ptx: str, target: Target, output: str, flags: list[str]) -> str:
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    capability = int(target.name.removeprefix("sm_"))
    tool = get_ptxas(capability)
    path = str(getattr(tool, "path", tool))
    source = scratch_folder() / f"{threading.get_ident()}.ptx"
    source.write_text(ptx)
    name = f"--gpu-name={sm_arch_from_capability(capability)}"
    return subprocess.run([path, "-v", *flags, name, str(source), "-o", output], capture_output=True, text=True).stderr
