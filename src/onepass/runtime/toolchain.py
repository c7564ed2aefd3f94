"""The system's C compiler: finding it, naming it for cache keys, building shared objects with it.

`find_toolchain()` starts nothing; neither does `fingerprint()`, so a process that finds its kernels
in the cache never runs the compiler. `compile_c` leaves either the finished file or nothing.

    toolchain = find_toolchain(include=folder_of_prelude)
    toolchain.compile_c(text, Path("kernel.so"))
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from onepass.errors import CompilerNotFound, KernelBuildError
from onepass.ir.source import KernelSource

_CANDIDATES = ("cc", "gcc", "clang")
_BUILD_SECONDS = 600

# No fast-math: eager's values. The two -fno flags only drop errno and floating-point exceptions, which
# nobody reads and which keep loops with libm calls and selections scalar. Eager does not contract a*b+c. gcc would make
# one call of a sine and a cosine of one number, and that function has no vector variant.
_COMMON_FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fno-strict-aliasing", "-fno-semantic-interposition", "-w",
    "-fno-builtin-sin", "-fno-builtin-sinf", "-fno-builtin-cos", "-fno-builtin-cosf",
)  # fmt: skip

# Of x86 processors: what the compiler defines, and after a colon the kernel's name where it is another one.
_INSTRUCTION_SETS = (
    "SSE3:pni SSSE3 SSE4_1 SSE4_2 SSE4A POPCNT MOVBE AVX AVX2 FMA FMA4 XOP F16C BMI:bmi1 BMI2 LZCNT:abm ADX AES "
    "PCLMUL:pclmulqdq VAES VPCLMULQDQ GFNI SHA:sha_ni AVX512F AVX512CD AVX512VL AVX512BW AVX512DQ AVX512IFMA "
    "AVX512VBMI AVX512VBMI2:avx512_vbmi2 AVX512VNNI:avx512_vnni AVX512BITALG:avx512_bitalg "
    "AVX512VPOPCNTDQ:avx512_vpopcntdq AVX512BF16:avx512_bf16 AVX512FP16:avx512_fp16 AVXVNNI:avx_vnni"
)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler (its command may have several words) and the flags kernels are built with."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    include: Path | None = None

    @property
    def path(self) -> Path:
        """The compiler's own file, links followed (past a wrapper such as ccache)."""
        programs = [word for word in self.command if not word.startswith("-")]
        return Path(programs[-1]).resolve()

    @property
    def version(self) -> str:
        """The first line the compiler says of itself. Starts it, once per process."""
        return _version(self.command, _identity(self.path))

    def fingerprint(self) -> str:
        """Equal exactly where a built kernel may be used again: compiler, flags, headers, processor."""
        parts = [*self.command, _identity(self.path), *self.flags, *self.libraries, cpu_features()]
        if self.include is not None:
            parts += [hashlib.sha256(h.read_bytes()).hexdigest() for h in sorted(self.include.glob("*.h"))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def build_command(self, source: str, output: str) -> list[str]:
        """The command line that turns a C file (or "-", standard input) into a shared object."""
        includes = [] if self.include is None else ["-I", str(self.include)]
        return [*self.command, *self.flags, *includes, "-x", "c", source, "-x", "none", "-o", output, *self.libraries]

    def compile_c(self, text: str, output: Path) -> None:
        """Build `text` into the shared object `output`; it appears complete or not at all."""
        output.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent)
        os.close(handle)
        try:
            command = self.build_command("-", temporary)
            message = _run(command, text)
            if message is not None:
                kept = output.with_suffix(".failed.c")
                kept.write_text(text)
                raise KernelBuildError(shlex.join(command), message, str(kept))
            os.replace(temporary, output)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def build(self, source: KernelSource, output: Path) -> None:
        """The kernel as a shared object."""
        self.compile_c(source.text, output)

    def load(self, path: Path, source: KernelSource) -> Callable[..., int]:
        """The kernel's function out of a shared object."""
        return load_c(path, source)

    def made_for(self, processor: str) -> Toolchain:
        """The same for a processor as the compiler names it, "x86-64-v3"; "native" is the one here."""
        flags = (f.replace("=native", f"={processor}") if f.startswith(("-march", "-mcpu")) else f for f in self.flags)
        return replace(self, flags=tuple(flags))

    def instruction_sets(self) -> tuple[str, ...]:
        """What the compiler may use of a processor, in Linux' names; where it does not say, all that is here."""
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return tuple(sorted(instruction_sets()))
        flags = [f for f in self.flags if f.startswith("-m")]
        command = [*self.command, *flags, "-dM", "-E", "-x", "c", "-"]
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise KernelBuildError(shlex.join(command), done.stderr.strip(), "")
        defined = set(re.findall(r"#define __(\w+?)__ 1", done.stdout))
        sets = (word.partition(":") for word in _INSTRUCTION_SETS.split())
        return tuple(name or macro.lower() for macro, _, name in sets if macro in defined)


def load_c(path: Path, source: KernelSource) -> Callable[..., int]:
    """The function of a shared object."""
    function: Any = getattr(ctypes.CDLL(str(path)), source.entry)
    function.argtypes = [ctypes.c_void_p] * source.pointers + [ctypes.c_int64] * (source.symbols + 1)
    function.restype = ctypes.c_int if source.raises else None
    loaded: Callable[..., int] = function
    return loaded


def _run(command: list[str], text: str) -> str | None:
    """None when the build succeeded, else what the compiler said."""
    plain = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=plain, timeout=_BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not finished after {_BUILD_SECONDS} seconds"
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def find_toolchain(include: Path | None = None) -> Toolchain:
    """The compiler named by CC, else the first of cc, gcc and clang on PATH."""
    chosen = os.environ.get("CC", "").strip()
    tried = [chosen] if chosen else list(_CANDIDATES)
    for candidate in tried:
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return _describe(tuple(shutil.which(word) or word for word in words), include)
    raise CompilerNotFound(tried)


def _describe(command: tuple[str, ...], include: Path | None) -> Toolchain:
    machine = platform.machine().lower()
    is_x86 = machine in ("x86_64", "amd64")
    clang = _is_clang(command)
    flags = [*_COMMON_FLAGS, "-march=native" if is_x86 else "-mcpu=native"]
    # A kernel that streams wants whole cache lines: measured 1.3-2x over 256-bit for exp, erf, tanh in cache.
    flags += ["-mprefer-vector-width=512"] if is_x86 else []
    # clang's OpenMP would bring a second thread pool beside torch's libgomp: it gets SIMD only.
    # gcc's elimination of partial redundancies turns long chains of selections into jumps, which keep loops scalar.
    flags += ["-fopenmp-simd"] if clang else ["-fopenmp", "-fno-tree-pre"]
    libraries = ["-Wl,--as-needed"] if platform.system() == "Linux" else []
    if not clang:
        libraries += torch_openmp()
        libraries += ["-lmvec"] if is_x86 and platform.libc_ver()[0] == "glibc" else []
    return Toolchain(command, tuple(flags), (*libraries, "-lm"), include)


def _is_clang(command: tuple[str, ...]) -> bool:
    """By name, links followed: asking the compiler would start it."""
    return any("clang" in Path(word).resolve().name for word in command) or platform.system() == "Darwin"


def torch_openmp() -> list[str]:
    """The libgomp torch ships, if any: linking against that very file keeps one OpenMP runtime per process."""
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec else ():
        for place in (Path(folder) / "lib", Path(folder).with_name("torch.libs")):
            if found := sorted(place.glob("libgomp*.so*")):
                return [str(found[0])]
    return []


def _identity(path: Path) -> str:
    """Names a file's content without reading it."""
    try:
        stat = path.stat()
    except OSError:
        return f"{path}:missing"
    return f"{path}:{stat.st_mtime_ns}:{stat.st_size}"


@functools.cache
def _version(command: tuple[str, ...], identity: str) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()[0] if done.stdout else f"unknown ({identity})"


def instruction_sets() -> set[str]:
    """Of this machine's processor, as Linux names them."""
    return {w for line in cpu_features().splitlines() if line.startswith(("flags", "Features")) for w in line.split()}


@functools.cache
def cpu_features() -> str:
    """The processor's model and instruction sets: what -march=native depends on."""
    wanted = ("model name", "cpu family", "model\t", "stepping", "flags", "Features", "CPU part", "CPU implementer")
    try:
        with open("/proc/cpuinfo") as info:  # the first processor's block stands for all
            return "\n".join(line.strip() for line in takewhile(str.strip, info) if line.startswith(wanted))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
