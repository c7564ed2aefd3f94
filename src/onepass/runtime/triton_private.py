"""What onepass takes from Triton beyond its public interface, in one place: stages, assembler, interpreter.

`TESTED` are the versions whose stages are known. In any other, or where a part of them is missing, `triton.compile`
compiles: it builds more slowly (it makes a key of the whole package and of every function a kernel calls, and writes
each stage to a cache of its own), edits no text, and takes mathematics from its library.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import KernelBuildError
from ..ir.target import Target
from .threads import fork_safe_lock

TESTED = ((3, 6), (3, 9))  # the first and the last
# CPython 3.11 fails where two threads make syntax trees at once; reading a function is Python's work from end to end.
_reading = fork_safe_lock()


@functools.cache
def triton_version() -> str:
    """The version of the package, which is not imported for that."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError as error:
        raise KernelBuildError("import triton", "Triton is not installed; pip install triton", "") from error


def gpu_target(target: Target) -> Any:
    """A target as Triton names it."""
    from triton.backends.compiler import GPUTarget

    if target.name.startswith("gfx"):
        return GPUTarget("hip", target.name, target.warp)
    return GPUTarget("cuda", int(target.name.removeprefix("sm_")), target.warp)


# --- stages: from a function to machine code ---


@dataclass(frozen=True, slots=True)
class Staged:
    """What the stages gave as text or bytes, by the stage's name, and what they said of the kernel."""

    texts: Mapping[str, Any]
    facts: Mapping[str, Any]
    edited: bool = True  # by the edits that were asked for


Edits = Mapping[str, Callable[[str], str]]  # of the text of a stage, before the next


@dataclass(frozen=True, slots=True)
class _Stages:
    """What a backend does with one function."""

    options: Any
    functions: Any
    modules: dict[str, Any]
    context: Any
    each: dict[str, Callable[[Any, dict[str, Any]], Any]]


def run_stages(function: Any, target: Any, options: dict[str, Any], edits: Edits, instead: Mapping[str, Any]) -> Staged:
    """Compile an `ASTSource` for a `GPUTarget`. `instead`: modules in the place of others, by the others' names."""
    found = _stages(function, target, options)
    if found is None:
        return _by_triton(function, target, options)
    facts: dict[str, Any] = {"target": target, **vars(found.options)}
    with _reading:
        module = function.make_ir(target, found.options, found.functions, {**found.modules, **instead}, found.context)
    texts: dict[str, Any] = {}
    for name, stage in found.each.items():
        module = stage(module, facts)
        if isinstance(module, str) and name in edits:
            module = edits[name](module)
        if isinstance(module, str | bytes):
            texts[name] = module
    return Staged(texts, facts)


def _stages(function: Any, target: Any, options: dict[str, Any]) -> _Stages | None:
    """The stages, or None where this version's are not known."""
    version = tuple(int(n) for n in re.findall(r"\d+", triton_version())[:2])
    if not TESTED[0] <= version <= TESTED[1]:
        return None
    try:
        from triton._C.libtriton import ir
        from triton.compiler.compiler import make_backend

        backend = make_backend(target)
        parsed = backend.parse_options({**options, **function.parse_options()})
        each: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
        backend.add_stages(each, parsed, function.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(parsed)
        return _Stages(parsed, functions, dict(backend.get_module_map()), context, each)
    except (ImportError, AttributeError):
        return None


def _by_triton(function: Any, target: Any, options: dict[str, Any]) -> Staged:
    import triton

    with _reading:
        compiled: Any = triton.compile(function, target=target, options=options)
    return Staged(compiled.asm, compiled.metadata._asdict(), edited=False)


# --- the assembler inside the package ---


@dataclass(frozen=True, slots=True)
class Assembler:
    """NVIDIA's assembler; `version` is CUDA's, empty where nothing is known of it."""

    path: str
    architecture: str
    version: tuple[int, ...] = ()


def find_assembler(target: Target) -> Assembler | None:
    """The assembler of a target's kernels, where Triton says which it is."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

        capability = int(target.name.removeprefix("sm_"))
        tool = get_ptxas(capability)
        version = tuple(int(n) for n in re.findall(r"\d+", str(getattr(tool, "version", ""))))
        return Assembler(str(getattr(tool, "path", tool)), sm_arch_from_capability(capability), version)
    except (ImportError, AttributeError, TypeError):
        return None


# --- the interpreter ---


class Interpreter:
    """Runs undecorated kernels; written for Triton 3.6."""

    def __init__(self) -> None:
        import triton.language as tl
        from triton.runtime import interpreter

        self.language: Any = tl
        self._interpreter: Any = interpreter
        builder = interpreter.interpreter_builder
        names = [n for n in dir(builder) if n.startswith(("create_fcmp", "create_icmp"))]
        self._repaired = {n: self._boolean(getattr(builder, n)) for n in names}
        self._repaired["cast_impl"] = self._cast(builder.cast_impl)
        self._repaired["create_dot"] = self._dot

    def _boolean(self, compare: Callable[..., Any]) -> Callable[..., Any]:
        """A comparison whose result says that it is bool; the interpreter's own keeps the operands' type."""

        def compared(left: Any, right: Any) -> Any:
            return self._interpreter.TensorHandle(np.asarray(compare(left, right).data, dtype=bool), self.language.int1)

        return compared

    def _cast(self, cast: Callable[..., Any]) -> Callable[..., Any]:
        """A cast that rounds to bfloat16 as hardware does; the interpreter's own cuts off."""
        tl = self.language

        def converted(source: Any, kind: Any) -> Any:
            if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
                narrow = torch.tensor(np.asarray(source.data)).to(torch.bfloat16)
                data = narrow.view(torch.int16).numpy().view(np.uint16)
                return self._interpreter.TensorHandle(data, kind.scalar)
            return cast(source, kind)

        return converted

    def _dot(self, left: Any, right: Any, start: Any, *_: Any) -> Any:
        """A matrix product in 32 bits; the interpreter's own multiplies the bits of bfloat16 and of bytes."""
        sides = [self._wide(side) for side in (left, right)]
        total = np.matmul(*sides, dtype=np.asarray(start.data).dtype) + start.data
        return self._interpreter.TensorHandle(total, start.dtype.scalar)

    def _wide(self, side: Any) -> Any:
        """The numbers of an operand whose type numpy does not have, in float32."""
        data, tl = np.asarray(side.data), self.language
        if side.dtype.scalar == tl.bfloat16:
            return torch.tensor(data.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()
        if side.dtype.scalar == tl.float8e4nv:
            return torch.tensor(data.view(np.uint8)).view(torch.float8_e4m3fn).to(torch.float32).numpy()
        return data

    def data(self, tensor: Any) -> Any:
        """The numpy array of a tile."""
        return np.asarray(tensor.handle.data)

    def tensor(self, array: Any, dtype: Any, single: bool = False) -> Any:
        """A tile of an array, or a `single` number."""
        tl = self.language
        kind = dtype if single else tl.block_type(dtype, list(array.shape))
        return tl.core.tensor(self._interpreter.TensorHandle(np.asarray(array), dtype), kind)

    def pointer(self, address: int, element: str) -> Any:
        """A pointer argument."""
        tl = self.language
        kind = tl.str_to_ty(element, None)
        return tl.core.tensor(self._interpreter.TensorHandle(np.array([address], dtype=np.uint64), kind), kind)

    def number(self, value: int, kind: str) -> Any:
        """A size argument."""
        dtype = self.language.str_to_ty(kind, None)
        return self.tensor(np.array([value], dtype=np.int64 if kind == "i64" else np.int32), dtype, single=True)

    def run(
        self,
        kernel: Callable[..., Any],
        arguments: Sequence[Any],
        programs: int,
        reduce: Callable[..., Any],
        scan: Callable[..., Any],
    ) -> None:
        """Every program of a one-dimensional grid, with `reduce` for tl.reduce and `scan` for tl.associative_scan."""
        builder, tl = self._interpreter.interpreter_builder, self.language
        scope = self._interpreter._patch_lang(kernel)
        index, kept = tl.core.tensor.__index__, (tl.reduce, tl.associative_scan)
        tl.core.tensor.__index__ = lambda tensor: int(self.data(tensor).item())
        tl.reduce, tl.associative_scan = reduce, scan
        vars(builder).update(self._repaired)
        try:
            builder.set_grid_dim(programs, 1, 1)
            with np.errstate(all="ignore"):
                for program in range(programs):
                    builder.set_grid_idx(program, 0, 0)
                    kernel(*arguments)
        finally:
            tl.core.tensor.__index__, (tl.reduce, tl.associative_scan) = index, kept
            for name in self._repaired:
                delattr(builder, name)
            scope.restore()
