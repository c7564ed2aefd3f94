"""Issue time: which part of a GPU kernel's instructions belongs to which of its operations, from its machine code.

The disassembler that Triton ships names the generated line of every instruction, and the line names the operation. An
instruction counts as many cycles as the pipe that executes it is taken by a warp, times the planned turns of the loops
that the machine code has around it. No GPU is needed. Memory and matrix products are rows of their own. Where the
assembler unrolled a loop in part, what stands outside of loops is counted too little. Slow paths of the library's
functions, which few threads take, are left out where the code marks them (of sine and cosine it does not).
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..analysis.access import estimate
from ..compilation import Compiled
from ..ir.kernel import Kernel
from ..ir.target import Target
from ..pipeline import schedule_named
from ..runtime.scratch import scratch_folder
from ..runtime.triton_private import find_assembler

MEMORY, PRODUCTS, POSITIONS, STATES = "memory", "products", "positions and loops", "running states"
CONVERSIONS = "conversions"
FOREIGN = -1
SAMPLES = 8  # of the programs of a grid, where turns differ between them
# Cycles that a warp takes a quarter of a multiprocessor, by the first start of the opcode here: compute capability 9.0.
_CYCLES = {
    "F2FP": 2.0, "MUFU": 8.0, "F2F": 8.0, "F2I": 8.0, "I2F": 8.0, "FRND": 8.0, "POPC": 8.0, "SHFL": 4.0, "REDUX": 4.0,
    "DADD": 2.0, "DMUL": 2.0, "DFMA": 2.0, "DSETP": 2.0, "IMAD": 2.0, "IADD3": 2.0, "ISETP": 2.0, "LOP3": 2.0,
    "SHF": 2.0, "LEA": 2.0, "PRMT": 2.0, "SEL": 2.0,
}  # fmt: skip
_MEMORY = ("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "RED", "ATOM", "UTMA", "LD.", "ST.")
_UNITS = ("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA", "QMMA", "DMMA", "WARPGROUP")
_CONVERTING = ("F2FP", "F2F", "I2F", "F2I", "PRMT", "HADD2")  # where the line names no operation of the user's
# On the line of a product also the integer instructions that put operands into the form that its unit takes.
_FORMING = (*_CONVERTING, "LOP3", "IMAD.U32", "SHF")
_NOTHING = ("NOP", "EXIT")  # behind the end, to fill a line of the instruction cache
# Operations of users by the names that kernels give to what they are made of.
_MADE_OF = {"normal": "gelu", "exp2": "exp", "welford": "var_mean"} | dict.fromkeys(
    ("widen", "narrow", "cast"), CONVERSIONS
)
_WIDTHS = {".64": 2, ".128": 4}  # times 32 bits of a lane
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)(.*)$")
_LINE = re.compile(r'//## File "([^"]*)", line (\d+)$')  # without "inlined at": the outermost of several places
_LABEL = re.compile(r"^(\.L_x_\d+):")
_STATES = re.compile(r"(\w+_acc\d|carry|same|old|own|reference|none|safe)\w*$")
_SIZE = re.compile(r"(?:\b(?:min|max)\b|\b[gin]\d+\b|\bblock\d+\b|\d+|//|[-+*%(), ])+")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: where it is, its opcode, the generated line, where it jumps to or its threads meet again.

    The line is 0 before the first that is named, and `FOREIGN` in another file.
    """

    address: int
    opcode: str
    line: int
    target: str = ""


def disassembled(binary: bytes, target: Target) -> str:
    """The machine code as text with lines; empty where no disassembler is at hand."""
    assembler = find_assembler(target)
    tool = Path(assembler.path).with_name("nvdisasm") if assembler is not None else None
    if tool is None or not tool.is_file():
        return ""
    path = scratch_folder() / f"{threading.get_ident()}.cubin"
    path.write_bytes(binary)
    return subprocess.run([str(tool), "-c", "-gi", str(path)], capture_output=True, text=True).stdout


def instructions(text: str, file: str = "") -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and the address that each label stands before. `file`: how the generated file's name starts."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    open_labels: list[str] = []
    line = 0
    for row in text.splitlines():
        if marked := _LINE.search(row.rstrip()):
            line = int(marked[2]) if Path(marked[1]).name.startswith(file) else FOREIGN
        elif label := _LABEL.match(row):
            open_labels.append(label[1])
        elif made := _INSTRUCTION.match(row):
            address = int(made[1], 16)
            labels |= dict.fromkeys(open_labels, address)
            open_labels.clear()
            jump = re.search(r"`\((\.L_x_\d+)\)", made[3]) if made[2].startswith(("BRA", "BSSY")) else None
            found.append(Instruction(address, made[2], line, jump[1] if jump else ""))
    return found, labels


def issue_shares(text: str, source: str, kernel: Kernel | None = None, file: str = "") -> dict[str, float]:
    """The part of all cycles that each operation's instructions take, the largest first.

    Empty where instructions name lines of another file without their caller's: nobody knows then whose they are.
    """
    code, labels = instructions(text, file)
    if any(i.line == FOREIGN for i in code):
        return {}
    jumps = [(i, labels[i.target]) for i in code if i.target in labels]
    loops = [(to, i.address) for i, to in jumps if to < i.address]
    slow = [(i.address, to) for i, to in jumps if i.opcode.startswith("BSSY")]
    lines = source.splitlines()
    nests = _nests(lines, kernel)
    cycles: dict[str, float] = {}
    for i in code:
        if i.opcode.startswith(_NOTHING) or any(start < i.address < end for start, end in slow):
            continue
        depth = len({start for start, end in loops if start <= i.address <= end})
        times = 1.0
        for turns in nests.get(i.line, ())[:depth]:
            times *= turns
        name = _name(i.opcode, lines[i.line - 1] if 0 < i.line <= len(lines) else "")
        cycles[name] = cycles.get(name, 0.0) + times * _cycles(i.opcode)
    whole = sum(cycles.values()) or 1.0
    return {name: c / whole for name, c in sorted(cycles.items(), key=lambda pair: -pair[1])}


def _cycles(opcode: str) -> float:
    if shape := re.match(r"[HIQ]GMMA\.\d+x(\d+)x", opcode):
        return int(shape[1]) / 2
    if opcode.startswith(("HMMA", "IMMA", "QMMA")):
        return 4.0
    if opcode.startswith(_MEMORY):
        return 4.0 * next((n for width, n in _WIDTHS.items() if width in opcode), 1)
    return next((c for start, c in _CYCLES.items() if opcode.startswith(start)), 1.0)


def _name(opcode: str, line: str) -> str:
    """The operation of an instruction: by its kind, else by what its line computes."""
    if opcode.startswith(_MEMORY):
        return MEMORY
    if opcode.startswith(_UNITS):
        return PRODUCTS
    if "random" in line:
        return "random"
    if "tl.dot(" in line:
        return CONVERSIONS if opcode.startswith(_FORMING) else STATES
    made = re.match(r"\s*(\w+) = (.*)$", line)
    if made is None or re.search(r"\b(tl\.arange|program_id|tl\.load|\.load)\b", made[2]):
        return CONVERSIONS if opcode.startswith(_CONVERTING) else POSITIONS
    if _STATES.match(made[1]):
        return STATES
    stem = re.sub(r"_?\d+$", "", made[1])
    if re.match(r"(lane|turn|zero|tc|g$|guard|lane_in|program)", stem):
        return POSITIONS
    return _MADE_OF.get(stem.split("_")[0], stem.removesuffix("_16"))


def _nests(lines: Sequence[str], kernel: Kernel | None) -> dict[int, tuple[float, ...]]:
    """The turns of the loops around each line, outermost first."""
    found: dict[int, tuple[float, ...]] = {}
    open_loops: list[tuple[int, float]] = []  # indentation and turns
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        while open_loops and indent <= open_loops[-1][0]:
            open_loops.pop()
        if loop := re.match(r"\s*for \w+ in (?:tl\.)?range\((.*)\):", line):
            open_loops.append((indent, _turns(loop[1], kernel)))
        found[number] = tuple(turns for _, turns in open_loops)
    return found


def _turns(bounds: str, kernel: Kernel | None) -> float:
    """The steps of a loop, in the mean over the programs of a grid; 1 where they depend on data."""
    ends = [p.strip() for p in re.split(r",(?![^(]*\))", bounds) if "=" not in p]
    if not all(_SIZE.fullmatch(p) for p in ends):
        return 1.0
    total = 0.0
    for k in range(SAMPLES):
        names: dict[str, object] = {"min": min, "max": max, "__builtins__": {}}
        names |= dict.fromkeys(re.findall(r"\b(?:[in]|block)\d+\b", bounds), 0)
        if kernel is not None:
            names |= {a.axis.name: int((k + 0.5) * estimate(a.extent) / SAMPLES) for a in kernel.grid}
            names |= {f"n{n}": estimate(s.poly()) for n, s in enumerate(kernel.symbols)}
        try:
            places = [int(eval(p, names)) for p in ends]
        except (NameError, ZeroDivisionError, SyntaxError):
            return 1.0
        low, high, step = [*([0] if len(places) == 1 else []), *places, 1][:3]
        total += max(0, -(-(high - low) // max(1, step)))
    return max(1.0, total / SAMPLES)


def note_issue(compiled: Sequence[Compiled]) -> None:
    """Write the shares of every kernel into its record, where its machine code can be read."""
    for c in compiled:
        for name, shares in _of_graph(c):
            for k in c.record.kernels:
                if k.name == name:
                    k.issue = shares


def _of_graph(c: Compiled) -> Iterator[tuple[str, dict[str, float]]]:
    if c.made is None:
        return
    planned = c.made.planned
    kernels = {k.name: k for n in planned.names for k in schedule_named(planned, n, c.made.choices.get(n)).kernels}
    built = {s.text: (s.key, k) for s, k in zip(c.made.entry.kernels, c.made.kernels, strict=True)}
    known: dict[str, dict[str, float]] = {}
    for record in c.record.kernels:
        key, loaded = built.get(record.source, ("", None))
        code = getattr(loaded.function, "built", None) if loaded is not None else None
        if code is None or not planned.target.name.startswith("sm_"):
            continue
        if record.source not in known:
            text = disassembled(code.binary, planned.target)
            known[record.source] = issue_shares(text, record.source, kernels.get(record.name), key)
        yield record.name, known[record.source]
