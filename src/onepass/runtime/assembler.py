"""The assembler inside the triton package: asked what a kernel takes, and given what it would otherwise get wrong.

The one of CUDA 12.8 adds constants to the address of a matrix in shared memory wrongly where one address is used for
two kinds of matrices: the upper half of the sum gets the lower half of the address (keys of 32 and values of 16
elements: wrong sums, or an illegal access, seen on an H200). Adding to the lower half and setting the upper is right.
"""

from __future__ import annotations

import re
import subprocess
import threading

from ..errors import KernelBuildError
from ..ir.target import Target
from .scratch import scratch_folder

PRODUCT = "wgmma.mma_async"
HALF = 1 << 32
_WIDENED = re.compile(r"cvt\.u64\.u32\s+(%rd\d+),")
_CONSTANTS = re.compile(r"(add\.s64|or\.b64)\s+(%rd\d+), (%rd\d+), (-?\d+);")


def repaired(ptx: str) -> str:
    """The text as it can be assembled: a widened address and different upper halves are put together in two steps."""
    if PRODUCT not in ptx:
        return ptx
    uppers: dict[str, set[int]] = {}
    for _, _, base, number in _CONSTANTS.findall(ptx):
        uppers.setdefault(base, set()).update({int(number) // HALF} - {0, -1})
    twice = {base for base in _WIDENED.findall(ptx) if len(uppers.get(base, ())) > 1}

    def apart(found: re.Match[str]) -> str:
        operation, result, base, number = found.groups()
        lower, upper = int(number) % HALF, int(number) // HALF * HALF
        if operation != "add.s64" or base not in twice or upper in (0, -HALF) or lower >= HALF // 2:
            return found.group(0)
        return f"add.s64 \t{result}, {base}, {lower};\n\tor.b64 \t{result}, {result}, {upper};"

    return _CONSTANTS.sub(apart, ptx) if twice else ptx


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
