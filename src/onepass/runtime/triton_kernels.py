"""Tile kernels for GPUs: Triton sources to machine code, machine code to launchable functions.

A built kernel is one file: a line of JSON (entry, shared memory, registers, spills) and the binary. Loading it needs
neither Triton nor its launcher: the driver takes the binary and `gpu_launcher.c` calls it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import KernelBuildError
from ..ir.source import MULTIPLE, KernelSource
from ..ir.target import Target
from .assembler import adds_wrongly, given_up, registers_and_stack, repaired
from .cache import cache_folder, default_cache
from .cubin import cubin_resources
from .driver import ENCODE, OVERLAP, driver
from .kernels import Builder, build_kernels
from .launcher import launcher
from .prelude import load_module, prelude_digest
from .scratch import scratch_folder
from .triton_private import Edits, Staged, find_assembler, gpu_target, run_stages, triton_version

EVEN, ANY_SIZES, ANY_POINTERS = range(3)  # the launcher's variants, by what they take
WRONG_CONTEXT = 201
# Of the memory of matrix units on sm_100; Triton's launcher is what refuses a kernel that asks for more.
MOST_COLUMNS, COLUMN_BYTES = 512, 512
_PLACE = re.compile(r"^(!\d+) = (distinct )?!DILocation\((.*?)(?:, inlinedAt: (!\d+))?\)$", re.MULTILINE)
_DRIVER_TYPES = {8: 10, 9: 8, 10: 9}  # Triton's numbers of element types that differ from the driver's


class GpuBuilder(Builder, Protocol):
    """A builder of kernels for a GPU."""

    target: Target


class TritonBuilder:
    """Builds and loads the kernels of one GPU target."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def fingerprint(self) -> str:
        return f"triton {triton_version()} {self.target.name} {prelude_digest()}"

    def build(self, source: KernelSource, output: Path) -> None:
        output.write_bytes(build_binary(source, self.target))

    def load(self, path: Path, source: KernelSource) -> TileKernel:
        return TileKernel(read_binary(path.read_bytes()), source, self, path.is_relative_to(cache_folder()))


class TileKernel:
    """A built kernel. Called with a device's number: what launches it there, and what to do when that fails.

    `kept`: it is in the cache, and so are its variants.
    """

    def __init__(self, built: Built, source: KernelSource, builder: GpuBuilder, kept: bool) -> None:
        self.built = built
        self._on_device = functools.cache(functools.partial(_on_device, built, source, builder, kept))

    def __call__(self, device: int) -> Launchable:
        return self._on_device(device)


@dataclass(frozen=True, slots=True)
class Built:
    """Machine code and what its compiler said of it."""

    entry: str
    shared: int
    threads: int
    registers: int
    spills: int
    binary: bytes
    maps: tuple[dict[str, Any], ...] = ()  # how each matrix is described: element type, its bytes, block, swizzle


def read_binary(data: bytes) -> Built:
    """The file `build` left."""
    head, _, binary = data.partition(b"\n")
    try:
        facts = json.loads(head)
        return Built(**{**facts, "maps": tuple(facts.get("maps", ()))}, binary=binary)
    except (ValueError, TypeError) as error:
        raise OSError(f"not a built kernel: {error}") from error


def build_binary(source: KernelSource, target: Target) -> bytes:
    """Compile with Triton for a target that need not be here."""
    from triton.compiler import ASTSource

    try:
        function = _load_module(source).__dict__[source.entry]
        attributes = {(k,): [["tt.divisibility", 16]] for k in range(source.pointers)} if source.aligned else {}
        attributes |= {(source.pointers + k,): [["tt.divisibility", MULTIPLE]] for k in source.multiples}
        signature = dict(zip(function.arg_names, source.signature, strict=True))
        ast = ASTSource(fn=function, signature=signature, constexprs={}, attrs=attributes)
        options: dict[str, Any] = {"num_warps": source.warps, "num_stages": max(1, source.stages)}
        options["enable_fp_fusion"] = not source.exact
        if source.asserts:
            options |= {"debug": True, "sanitize_overflow": False}
        if source.denormals:  # else library functions may take denormal numbers for zero
            options["enable_reflect_ftz"] = False
        wrong = not target.name.startswith("gfx") and adds_wrongly(find_assembler(target))
        edited = functools.partial(_edited, wrong=wrong, streams=source.streams)
        edits: Edits = {"llir": lines_of_callers, "ptx": edited}
        compiled = run_stages(ast, gpu_target(target), options, edits, _hardware(target))
    except Exception as error:
        path = scratch_folder() / f"{source.key}.failed.py"
        path.write_text(source.text)
        problem = f"{type(error).__name__}: {error}"
        raise KernelBuildError(f"triton.compile for {target.name}", problem, str(path)) from error
    facts = compiled.facts
    _refuse_others(compiled, source)
    if wrong and not compiled.edited and repaired(compiled.texts["ptx"]) != compiled.texts["ptx"]:
        raise KernelBuildError(f"triton.compile for {target.name}", "its assembler may add addresses wrongly", "")
    binary, registers, spills = _machine_code(compiled.texts, target)
    spills += COLUMN_BYTES * max(0, (facts.get("tmem_size") or 0) - MOST_COLUMNS)  # nothing of it would run
    head = {
        "entry": facts["name"], "shared": facts["shared"], "threads": target.warp * facts["num_warps"],
        "registers": registers, "spills": spills, "maps": _maps(facts, len(source.matrices)),
    }  # fmt: skip
    return packed(head, binary)


def lines_of_callers(text: str) -> str:
    """LLVM's text with every place inside a function that was inlined as the kernel's line that called the function.

    Triton 3.6 leaves out of its PTX where a function was inlined, so that the machine code would name the lines of the
    prelude and of Triton's library, for all callers the same ones.
    """
    places = {number: (inside, at) for number, _, inside, at in _PLACE.findall(text)}

    def outermost(found: re.Match[str]) -> str:
        number, how, inside, at = found.groups("")
        while at:
            inside, at = places[at]
        return f"{number} = {how}!DILocation({inside})"

    return _PLACE.sub(outermost, text)


def _edited(ptx: str, wrong: bool, streams: bool) -> str:
    """The text as the assembler gets it. `wrong`: it may get sums wrong."""
    ptx = repaired(ptx) if wrong else ptx
    return given_up(ptx) if streams else ptx


def _refuse_others(compiled: Staged, source: KernelSource) -> None:
    """KernelBuildError for what `gpu_launcher.c` does not know: beside its own arguments a kernel gets two words, 0."""
    passed = source.pointers + source.symbols + 5 * len(source.matrices) + 2
    entry = re.search(r"\.entry\s+\w+\(([^)]*)\)", compiled.texts.get("ptx", ""))
    taken = entry[1].count(".param") if entry else passed
    memory = sum(compiled.facts.get(f"{name}_scratch_size") or 0 for name in ("global", "profile"))
    if taken != passed or memory:
        reason = f"{taken} arguments and {memory} bytes of memory, {passed} and none are passed"
        raise KernelBuildError(f"triton.compile of Triton {triton_version()}", reason, "")


def _maps(facts: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """What Triton decided about its descriptors, in the driver's numbers."""
    found = list(facts.get("tensordesc_meta") or [])
    if len(found) != count or None in found:
        raise KernelBuildError("triton.compile", f"{count} matrices, {len(found)} descriptors", "")
    maps = [{n: m[n] for n in ("swizzle", "elem_size", "elem_type", "block_size")} for m in found]
    return [{**m, "elem_type": _DRIVER_TYPES.get(m["elem_type"], m["elem_type"])} for m in maps]


def packed(head: dict[str, Any], binary: bytes) -> bytes:
    """One file: what is known of the kernel in a line, then its code."""
    return json.dumps(head).encode() + b"\n" + bytes(binary)


def _hardware(target: Target) -> dict[str, Any]:
    """What the prelude's `hardware` is on a target, if it is not what it is on every one."""
    if target.name.startswith("gfx"):
        return {}
    return {"onepass.codegen.triton_hardware": importlib.import_module("onepass.codegen.triton_nvidia")}


def _load_module(source: KernelSource) -> Any:
    """The source as a module: Triton reads a function's text from its file."""
    path = scratch_folder() / f"{source.key}_{threading.get_ident()}.py"
    path.write_text(source.text)
    return load_module(path, f"onepass_kernel_{source.key}")


def _machine_code(texts: Mapping[str, Any], target: Target) -> tuple[bytes, int, int]:
    """The binary, its registers per thread and the bytes it spills."""
    if target.name.startswith("gfx"):
        text = texts["amdgcn"]
        vector = re.search(r"\.vgpr_count:\s+(\d+)", text)
        spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
        return texts["hsaco"], int(vector.group(1)) if vector else 0, 4 * int(spilled.group(1)) if spilled else 0
    binary, ptx = texts["cubin"], texts["ptx"]
    try:
        registers, stack = cubin_resources(binary)
    except ValueError:
        registers, _, spills = registers_and_stack(ptx, target)
        return binary, registers, spills
    if not stack:
        return binary, registers, 0
    # Only the assembler tells spills from other uses of the stack; it takes as long again as building did. Triton may
    # have asked it for more than we do: then what is on this stack and not on that one is spilled.
    _, others, spills = registers_and_stack(ptx, target)
    return binary, registers, spills or max(0, stack - others)


# --- launching ---


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("pointer", ctypes.c_int32), ("type", ctypes.c_int32), ("swizzle", ctypes.c_int32), ("bytes", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 2), ("block", ctypes.c_uint32 * 2),
    ]  # fmt: skip


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("launch", ctypes.c_void_p), ("function", ctypes.c_void_p * 3),
        ("threads", ctypes.c_uint32), ("shared", ctypes.c_uint32 * 3),
        ("pointers", ctypes.c_int32), ("sizes", ctypes.c_int32), ("matrices", ctypes.c_int32),
        ("multiples", ctypes.c_uint64), ("encode", ctypes.c_void_p), ("matrix", ctypes.POINTER(_Matrix)),
        ("overlap", ctypes.c_void_p),
    ]  # fmt: skip


def _described(built: Built, source: KernelSource) -> Any:
    """The matrices of a kernel as the launcher takes them."""
    found = (_Matrix * max(1, len(source.matrices)))()
    for k, (matrix, how) in enumerate(zip(source.matrices, built.maps, strict=True)):
        found[k] = _Matrix(
            matrix.pointer, how["elem_type"], how["swizzle"], how["elem_size"],
            (ctypes.c_int64 * 2)(matrix.rows, matrix.columns), (ctypes.c_uint32 * 2)(*how["block_size"]),
        )  # fmt: skip
    return found


class Launchable(NamedTuple):
    """What launches a kernel on a device, and what to call with the same arguments where that returned an error.

    `launch` hands its arguments to `entry`, after `structure`: the kernel as `gpu_launcher.c` knows it. `prepare`
    builds a variant of it.
    """

    launch: Callable[..., int]
    recover: Callable[..., None]
    entry: Callable[..., int]
    structure: _Kernel
    prepare: Callable[[int], None]


def _on_device(built: Built, source: KernelSource, builder: GpuBuilder, kept: bool, device: int) -> Launchable:
    """A kernel on a device."""
    gpu = driver(builder.target)
    with torch.cuda.device(device):
        gpu.bind(device)
        function = gpu.load(built.binary, built.entry, built.shared)
    matrices = _described(built, source)
    kernel = _Kernel(
        gpu.address(), (ctypes.c_void_p * 3)(function), built.threads, (ctypes.c_uint32 * 3)(built.shared),
        source.pointers, source.symbols, len(source.matrices), sum(1 << k for k in source.multiples),
        gpu.address(ENCODE) if source.matrices else None, matrices,
        gpu.address(OVERLAP) if source.overlaps else None,
    )  # fmt: skip
    entry = _launcher(source.pointers, source.symbols)
    launch = functools.partial(entry, ctypes.byref(kernel))
    lock = threading.Lock()

    def prepare(variant: int) -> None:
        (found,) = build_kernels([variant_of(source, variant)], builder, default_cache() if kept else None)
        other: Built = found.function.built  # type: ignore[attr-defined]
        kernel.shared[variant] = other.shared
        kernel.function[variant] = gpu.load(other.binary, other.entry, other.shared)

    def recover(*arguments: int) -> None:
        with lock, torch.cuda.device(device):
            status = launch(*arguments)
            if status in (WRONG_CONTEXT, -ANY_SIZES, -ANY_POINTERS):  # a thread that only launches has no context
                gpu.bind(device)
                status = launch(*arguments)
            if status in (-ANY_SIZES, -ANY_POINTERS):
                prepare(-status)
                status = launch(*arguments)
        if status:
            raise RuntimeError(f"onepass: launching {source.name} failed with driver error {status}")

    return Launchable(launch, recover, entry, kernel, prepare)


def variants_of(source: KernelSource) -> list[KernelSource]:
    """The same kernel for arguments of every kind."""
    others = (ANY_SIZES, ANY_POINTERS) if source.multiples else (ANY_POINTERS,)
    return [source, *(variant_of(source, variant) for variant in others)]


def variant_of(source: KernelSource, variant: int) -> KernelSource:
    """The same kernel, which assumes less of its arguments."""
    other = replace(source, key=f"{source.key}_{variant}", multiples=())
    if variant != ANY_POINTERS:
        return other
    arguments = source.signature[: source.pointers + source.symbols]
    return replace(other, text=source.general or source.text, matrices=(), signature=arguments, aligned=False)


def _launcher(pointers: int, sizes: int) -> Callable[..., int]:
    function: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int64] * (pointers + sizes + 2))(
        ctypes.cast(launcher().onepass_launch, ctypes.c_void_p).value or 0
    )
    launch: Callable[..., int] = function
    return launch
