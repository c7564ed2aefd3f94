"""The systems compared, and the environment that is the same for all of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .workloads import Prepared, Workload, is_float

SYSTEMS = ("eager", "inductor", "inductor-max", "xla", "hand", "onepass")
LIBRARIES = (
    "sdpa-cudnn",
    "sdpa-flash",
    "flex",
    "cublaslt",
    "cublas",
)  # what a workload asks of them is in libraries.py
CEILING = "cublas"  # the bare matmuls: less work, values of its own
TORCH_SYSTEMS = ("eager", "inductor", "inductor-max", "onepass")

# Freed pages go back to the process, not to the kernel: otherwise page faults of fresh outputs
# dominate every system alike.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(256 << 20)}
# On CPUs one thread per core for every system: left to itself the kernel may wake both threads on one core and
# part them only at its next tick, so that every time is a multiple of 4 ms. It also binds the main thread, the threads
# and processes that it starts, and every process beside this one to the first core: not where compilers run meanwhile.
THREADS = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}


def environment(device: str) -> dict[str, str]:
    """The variables that are the same for all systems. JAX leaves the GPU to the others."""
    threads = THREADS if device == "cpu" else {}
    return {**MALLOC, **threads, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own, so that systems do not share Dynamo's cache entries."""
    if not isinstance(function, FunctionType):
        return function
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip


def compiled(system: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one of torch's systems runs it."""
    if system == "eager":
        return function
    options: dict[str, Any] = {"backend": system}
    if system == "inductor-max":
        options = {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}
    if system == "onepass":
        import onepass  # noqa: F401  (registers the backend when run from the source folder)

        options["options"] = {"strict": True}  # a graph that quietly ran as eager would be no measurement
    result: Callable[..., Any] = torch.compile(_own_copy(function), dynamic=False, **options)
    return result


def cache_variables(folder: str, system: str) -> dict[str, str]:
    """Where a system's caches go, each in a folder of its own."""
    return {
        "ONEPASS_CACHE_DIR": f"{folder}/{system}/onepass",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{system}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/{system}/triton",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/{system}/xla",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@dataclass(frozen=True, slots=True)
class Runner:
    """A workload as a system runs it: `call` is what is timed, `values` gives its outputs as tensors."""

    call: Callable[[], Any]
    values: Callable[[], tuple[Tensor, ...]]


def runner(system: str, prepared: Prepared) -> Runner:
    """The workload as that system runs it; nothing is compiled yet."""
    if system == "xla":
        return _xla_runner(prepared)
    if system == "hand":
        from . import hand

        function = getattr(hand, prepared.workload.hand)
    elif system in LIBRARIES:
        function = prepared.workload.libraries[system](prepared.arguments)
    else:
        function = compiled(system, prepared.workload.function)

    def call() -> tuple[Tensor, ...]:
        return prepared.call(function)

    return Runner(call, call)


def _xla_runner(prepared: Prepared) -> Runner:
    import jax

    from . import jax_functions

    workload, function = prepared.workload, getattr(jax_functions, prepared.workload.jax)
    arguments = [to_jax(a) for a in prepared.arguments]
    if workload.random:
        arguments.insert(0, jax.random.key(0))
    if workload.train:
        wanted = [n for n, a in enumerate(prepared.arguments) if is_float(a)]
        arguments.append(to_jax(prepared.gradient))
        function = _with_backward(function, wanted)
    jitted = jax.jit(function)

    def call() -> Any:
        return jax.block_until_ready(jitted(*arguments))

    def values() -> tuple[Tensor, ...]:
        outputs = call()
        return tuple(torch.from_dlpack(o) for o in (outputs if isinstance(outputs, tuple) else (outputs,)))

    return Runner(call, values)


def _with_backward(function: Callable[..., Any], wanted: list[int]) -> Callable[..., Any]:
    """The function and the gradients of some arguments, in JAX; the output's gradient is the last argument."""
    import jax

    def both(*arguments: Any) -> tuple[Any, ...]:
        *given, gradient = arguments

        def of_wanted(*values: Any) -> Any:
            filled = list(given)
            for position, value in zip(wanted, values, strict=True):
                filled[position] = value
            return function(*filled)

        output, backward = jax.vjp(of_wanted, *(given[n] for n in wanted))
        return output, *backward(gradient)

    return both


def to_jax(value: Any) -> Any:
    import jax

    tensor = value.detach()
    return jax.dlpack.from_dlpack(tensor.int() if tensor.dtype is torch.int64 else tensor)


def missing(system: str, device: str) -> str:
    """Why a system cannot run on this device at all; empty if it can."""
    if system in LIBRARIES:
        return "" if device == "cuda" else "it is a library for GPUs"
    if system == "hand":
        if device != "cuda":
            return "the hand-written kernels need a GPU"
        return "" if importlib.util.find_spec("triton") else "Triton is not installed"
    if system != "xla":
        return ""
    try:
        import jax

        jax.devices("gpu" if device == "cuda" else "cpu")
    except Exception as error:
        return first_line(error)
    return ""


def skipped(system: str, workload: Workload) -> str:
    """Why a system has nothing to run for a workload; empty if it has."""
    if system == "xla" and not workload.jax:
        return "not written in JAX"
    if system == "hand" and not workload.hand:
        return "no kernel written by hand"
    if system in LIBRARIES and system not in workload.libraries:
        return "no call of this library"
    return ""


def first_line(error: BaseException) -> str:
    """An error's class and first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def same_environment(module: str, device: str) -> None:
    """Start `python -m module` again with the settings above, unless they are there already."""
    wanted = environment(device)
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **wanted})


def result_name(device: str) -> str:
    """The stem of the result files: `cpu`, or the chip's name."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")


def facts(device: str) -> dict[str, Any]:
    """Hardware, versions and date, for the result files."""
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": _processor() if device == "cpu" else torch.cuda.get_device_name(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "huge_pages": _first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": _output_line(os.environ.get("CC", "cc"), "--version"),
        "onepass": _output_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "environment": environment(device),
    }
    for package in ("triton", "jax"):
        found[package] = _version(package)
    if device == "cuda":
        found["device_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30)
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _first_line(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return "unknown"


def _output_line(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.splitlines()[0] if result.stdout else "unknown"
