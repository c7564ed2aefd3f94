"""The assembler inside the triton package: asked what a kernel takes, and given what it would otherwise get wrong.

The one of CUDA 12.8 (of Triton 3.6) adds constants to the address of a matrix in shared memory wrongly where one
address is used for two kinds of matrices: the upper half of the sum gets the lower half of the address (keys of 32 and
values of 16 elements: wrong sums, or an illegal access, seen on an H200). Adding to the lower half and setting the
upper is right. Those of CUDA 12.9 and 13.4 were given such sums and showed no such code.

Triton gives the hardware's copies no word on what the chip's cache should do with them; `given_up` adds it.
"""

from __future__ import annotations

import re
import subprocess
import threading

from ..ir.target import Target
from .scratch import scratch_folder
from .triton_private import Assembler, find_assembler

RIGHT = (12, 9)  # the first version that was seen to add such addresses rightly
PRODUCT = "wgmma.mma_async"
HALF = 1 << 32
_WIDENED = re.compile(r"cvt\.u64\.u32\s+(%rd\d+),")
_COPIED = re.compile(r"(cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global\S*::bytes)( [^;]*);")
_DECLARED = re.compile(r"\{\n(?:\s*\.reg [^\n]*\n)+")  # the registers of a function
_CONSTANTS = re.compile(r"(add\.s64|or\.b64)\s+(%rd\d+), (%rd\d+), (-?\d+);")


def adds_wrongly(assembler: Assembler | None) -> bool:
    """Whether an assembler may get sums wrong: an old one, or one of which nothing is known."""
    return assembler is None or assembler.version[:2] < RIGHT


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


def given_up(ptx: str) -> str:
    """The text with all copies by hardware marked: what they read is the first that the chip's cache gives up."""
    marked, copies = _COPIED.subn(r"\1.L2::cache_hint\2, %never;", ptx)
    policy = "\t.reg .b64 %never;\n\tcreatepolicy.fractional.L2::evict_first.b64 %never, 1.0;\n"
    return _DECLARED.sub(lambda found: found.group(0) + policy, marked, count=1) if copies else marked


def registers_and_stack(ptx: str, target: Target) -> tuple[int, int, int]:
    """Registers per thread, bytes of stack and bytes spilled to it, as the assembler says; 0 where it is not known."""
    assembler = find_assembler(target)
    if assembler is None:
        return 0, 0, 0
    source = scratch_folder() / f"{threading.get_ident()}.ptx"
    source.write_text(ptx)
    command = [assembler.path, "-v", f"--gpu-name={assembler.architecture}", str(source), "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    numbers = (r"Used (\d+) registers", r"(\d+) bytes stack", r"(\d+) bytes spill (?:stores|loads)")
    registers, stack, spilled = (max(map(int, re.findall(n, said)), default=0) for n in numbers)
    return registers, stack, spilled
