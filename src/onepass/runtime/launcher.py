"""What launches kernels on GPUs: `gpu_launcher.c`, compiled once in every process, beside whatever else it does."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from .scratch import scratch_folder
from .threads import fork_safe_lock
from .toolchain import find_toolchain

LAUNCHER = Path(__file__).with_name("gpu_launcher.c")
_lock = fork_safe_lock()
_started: list[Future[Any]] = []


def start_launcher() -> Future[Any]:
    """The library, soon: whoever knows that kernels will be launched may ask early."""
    with _lock:
        if not _started or (_started[0].done() and _started[0].exception() is not None):
            _started[:] = [Future()]
            try:
                threading.Thread(target=_build, args=(_started[0],), daemon=True).start()
            except RuntimeError:  # no more threads to be had
                _build(_started[0])
        return _started[0]


def launcher() -> Any:
    """The library. Raises `CompilerNotFound` or `KernelBuildError` where it cannot be built."""
    return start_launcher().result()


def provide_launcher(built: bytes) -> None:
    """Use a library that is already compiled, if none has been asked for yet."""
    with _lock:
        if not _started:
            output = scratch_folder() / "gpu_launcher.so"
            output.write_bytes(built)
            _started[:] = [Future()]
            _started[0].set_result(ctypes.CDLL(str(output)))


def build_launcher(output: Path) -> None:
    """Compile it for any processor of this machine's kind."""
    toolchain = find_toolchain()
    plain = replace(toolchain, flags=tuple(f for f in toolchain.flags if not f.startswith("-m")))
    plain.compile_c(LAUNCHER.read_text(), output)


def _build(future: Future[Any]) -> None:
    try:
        output = scratch_folder() / "gpu_launcher.so"
        find_toolchain().compile_c(LAUNCHER.read_text(), output)
        future.set_result(ctypes.CDLL(str(output)))
    except BaseException as error:
        future.set_exception(error)


def _after_fork() -> None:
    """The thread is the parent's; what it has finished is ours too."""
    if _started and not _started[0].done():
        _started.clear()


os.register_at_fork(after_in_child=_after_fork)
