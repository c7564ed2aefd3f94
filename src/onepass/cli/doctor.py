"""`onepass doctor`: everything compilation needs, tried for real, with a fix beside each problem."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import OnepassError
from ..progress import Progress

_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 11)
_PROBE = """
#include <math.h>
#include <omp.h>
#if defined(__x86_64__) && defined(__GLIBC__)
extern float expf(float) __attribute__((simd("notinbranch")));
#endif
int threads(void) { int n = 1;
  #pragma omp parallel
  #pragma omp single
  n = omp_get_num_threads();
  return n; }
void exps(float *out, const float *in, int n) {
  #pragma omp simd
  for (int i = 0; i < n; i++) out[i] = expf(in[i]); }
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `fix` is empty where there is nothing to mend."""

    text: str
    fix: str = ""


def run_doctor(show: Callable[[str], None] = print) -> int:
    """Print one line per check; the exit status is 1 if one found a problem."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": _python, "torch": _torch, "backend": _backend, "C compiler": _compiler, "vector math": _vector_math,
        "OpenMP": _openmp, "cache": _cache, "a kernel": _kernel, "GPU": _gpu,
    }  # fmt: skip
    problems = 0
    with Progress(sys.stderr, len(checks)) as progress:
        for name, check in checks.items():
            progress.step(name)
            finding = _tried(check)
            progress.clear()
            show(f"{'problem' if finding.fix else 'ok':<8} {name:<12} {finding.text}")
            if finding.fix:
                problems += 1
                show(f"{'':<8} {'fix':<12} {finding.fix}")
    return 1 if problems else 0


def _tried(check: Callable[[], Finding]) -> Finding:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check()
    except OnepassError as error:
        return Finding(str(error).splitlines()[0], "as the message says; programs run as eager until then")
    except Exception as error:
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Finding(text, "ONEPASS_DEBUG=1 onepass doctor shows more; please report it")


def _python() -> Finding:
    return _new_enough("Python", platform.python_version(), sys.version_info[:2], _OLDEST_PYTHON)


def _torch() -> Finding:
    numbers = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    return _new_enough("torch", f"{torch.__version__}, {torch.get_num_threads()} threads", numbers, _OLDEST_TORCH)


def _new_enough(name: str, text: str, found: tuple[int, ...], oldest: tuple[int, ...]) -> Finding:
    return Finding(text, "" if found >= oldest else f"install {name} {'.'.join(map(str, oldest))} or newer")


def _backend() -> Finding:
    if "onepass" in torch.compiler.list_backends():
        return Finding("torch.compile(f, backend='onepass') is known")
    return Finding("torch does not know backend 'onepass'", "install the package (pip install -e .) or import onepass")


def _compiler() -> Finding:
    from ..runtime.toolchain import find_toolchain

    toolchain = find_toolchain()
    return Finding(f"{toolchain.version} ({toolchain.path})")


def _built_probe(folder: str) -> Path:
    from ..runtime.toolchain import find_toolchain

    output = Path(folder) / "probe.so"
    find_toolchain().compile_c(_PROBE, output)
    return output


def _vector_math() -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        built = _built_probe(folder)
        vectorised = b"_ZGV" in built.read_bytes()
        library = ctypes.CDLL(str(built))
        values = torch.linspace(-80, 80, 1001)
        results = torch.empty_like(values)
        library.exps(*(ctypes.c_void_p(t.data_ptr()) for t in (results, values)), values.numel())
        exact = torch.exp(values.double())
        error = ((results.double() - exact) / exact).abs().max().item()
    if not error < 1e-6:
        return Finding(f"exp is wrong by {error:.2g}", "the C library's vector math is damaged; update the C library")
    return Finding("the C library's vector functions are used" if vectorised else "not here: scalar functions are used")


def _openmp() -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = ctypes.CDLL(str(_built_probe(folder)))
        except OSError as error:
            return Finding(str(error), "install the compiler's OpenMP runtime (libgomp)")
        threads = library.threads()
        runtimes = _openmp_runtimes()
    fix = "two OpenMP runtimes share the cores; unset LD_PRELOAD, or use the compiler torch was built with"
    text = f"{threads} threads, {', '.join(sorted(runtimes)) or 'runtime linked in'}"
    return Finding(text, fix if len(runtimes) > 1 else "")


def _openmp_runtimes() -> set[str]:
    try:
        lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    except OSError:
        return set()
    files = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return {Path(f).name for f in files if re.search(r"/lib(gomp|omp|iomp5)[-.]", f)}


def _cache() -> Finding:
    from ..explain.text import byte_text
    from ..runtime.cache import cache_folder, default_cache

    folder, cache = cache_folder(), default_cache()
    fix = "set ONEPASS_CACHE_DIR to a folder of your own; without it kernels are built in every process"
    if not cache.usable:
        return Finding(f"{folder} is not usable", fix)
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(f"{folder} cannot be written ({error.strerror})", fix)
    return Finding(f"{folder}, {byte_text(cache.size())} used, {byte_text(free)} free")


def _gpu() -> Finding:
    """The GPU, if there is one: its target, Triton, and a kernel run on it."""
    if not torch.cuda.is_available():
        return Finding("none here; `onepass explain --target sm_90` plans for one all the same")
    name = torch.cuda.get_device_name()
    if importlib.util.find_spec("triton") is None:
        return Finding(f"{name}, but no Triton", "pip install triton; until then tensors on the GPU run as eager")
    probed = _kernel("cuda")
    return Finding(f"{name}: {probed.text}", probed.fix)


def _kernel(device: str = "cpu") -> Finding:
    from ..backend import make_backend, record_compilations

    def probe(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.sin(x) * 2 + 1, -1)

    x = torch.linspace(-3, 3, 64 * 257, device=device).reshape(64, 257)
    with record_compilations() as records:
        compiled = torch.compile(probe, backend=make_backend({"strict": True, "cache": False}))
        error = (compiled(x) - probe(x)).abs().max().item()
    kernels = sum(len(record.kernels) for record in records)
    if not error < 1e-6:
        return Finding(f"a test kernel is wrong by {error:.2g}", "please report this, with the lines above")
    if not kernels:
        return Finding("the test program ran as eager: no kernel was made", "see the problems above")
    return Finding(f"built, run and checked (softmax of sin: {kernels} kernel, largest difference {error:.1g})")
