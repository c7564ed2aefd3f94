"""Kernel sources to callable functions: from memory, from the cache, else built in parallel.

A kernel is known by its source's key and the toolchain's fingerprint. Identical ones are built and loaded
once per process, whatever graph or thread asks; the compiler is not started when all are found.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import KernelBuildError
from ..ir.source import KernelSource
from .cache import Cache
from .scratch import scratch_folder
from .threads import fork_safe_lock

Progress = Callable[[int, int, str], None]  # (built so far, to build, name of the last one)
Function = Callable[..., Any]


class Builder(Protocol):
    """What turns one language's sources into functions."""

    def fingerprint(self) -> str:
        """Equal exactly where a built kernel may be used again."""

    def build(self, source: KernelSource, output: Path) -> None:
        """Leave the built kernel in a file, or raise `KernelBuildError` and leave nothing."""

    def load(self, path: Path, source: KernelSource) -> Function:
        """The function of a built kernel; OSError or AttributeError where the file is no good."""


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A function in memory: `function(*addresses, *sizes, threads)`, which releases the GIL.

    A tile kernel's is `function(device)`, which gives `launch(*addresses, *sizes, programs, stream)` and what to
    call with the same arguments where that returns an error.
    """

    name: str
    function: Function
    pointers: int
    symbols: int
    raises: bool
    entry: str = ""  # what it is called by profilers: its operations, the same in every layer


_lock = fork_safe_lock()
_functions: dict[str, Future[Function]] = {}  # by artifact key; pending while someone builds it


def build_kernels(
    sources: Sequence[KernelSource], builder: Builder, cache: Cache | None = None, progress: Progress | None = None
) -> list[LoadedKernel]:
    """The kernels in order. Raises `KernelBuildError` for one the compiler rejects."""
    kernels: list[LoadedKernel] = []
    for built in build_each(sources, builder, cache, progress):
        if isinstance(built, BaseException):
            raise built
        kernels.append(built)
    return kernels


def build_each(
    sources: Sequence[KernelSource], builder: Builder, cache: Cache | None = None, progress: Progress | None = None
) -> list[LoadedKernel | BaseException]:
    """The kernels in order, an error in the place of one that could not be built."""
    fingerprint = builder.fingerprint()
    keys = [artifact_key(s, fingerprint) for s in sources]
    futures, mine = _claim(keys, sources)
    try:
        for key, source in mine.items():
            if (function := _load_cached(key, source, builder, cache)) is not None:
                futures[key].set_result(function)
        if missing := {key: source for key, source in mine.items() if not futures[key].done()}:
            _build_all(missing, futures, builder, cache, progress)
    finally:
        for key in mine:  # nobody may wait for or inherit a claim that an error left open
            if not futures[key].done():
                _fail(key, futures[key], RuntimeError("the build was interrupted"))
    return [
        futures[k].exception() or LoadedKernel(s.name, futures[k].result(), s.pointers, s.symbols, s.raises, s.entry)
        for k, s in zip(keys, sources, strict=True)
    ]


def artifact_key(source: KernelSource, fingerprint: str) -> str:
    """Names the built file: the same key gives the same machine code."""
    signature = (source.key, source.entry, str(source.pointers), str(source.symbols), str(source.raises), fingerprint)
    return hashlib.sha256("\0".join(signature).encode()).hexdigest()


def _claim(
    keys: Sequence[str], sources: Sequence[KernelSource]
) -> tuple[dict[str, Future[Function]], dict[str, KernelSource]]:
    """The future of every key, and those keys nobody was working on: they are ours now."""
    futures: dict[str, Future[Function]] = {}
    mine: dict[str, KernelSource] = {}
    with _lock:
        for key, source in zip(keys, sources, strict=True):
            if key not in _functions:
                _functions[key] = Future()
                mine[key] = source
            futures[key] = _functions[key]
    return futures, mine


def _fail(key: str, future: Future[Function], error: BaseException) -> None:
    with _lock:
        if _functions.get(key) is future:
            del _functions[key]
    future.set_exception(error)


def _build_all(
    missing: dict[str, KernelSource],
    futures: dict[str, Future[Function]],
    builder: Builder,
    cache: Cache | None,
    progress: Progress | None,
) -> None:
    with ThreadPoolExecutor(min(len(missing), processors()), "onepass-build") as pool:
        running = {pool.submit(_build, k, s, builder, cache): (k, s) for k, s in missing.items()}
        for done, work in enumerate(as_completed(running), 1):
            key, source = running[work]
            error = work.exception()
            if error is None:
                futures[key].set_result(work.result())
            else:
                _fail(key, futures[key], error)
            if progress is not None:
                progress(done, len(missing), source.name)


def processors() -> int:
    """How many kernels are built at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _build(key: str, source: KernelSource, builder: Builder, cache: Cache | None) -> Function:
    built = scratch_folder() / f"{key}.so"
    builder.build(source, built)
    stored = cache.add_kernel(key, built) if cache is not None else None
    try:
        function = builder.load(stored or built, source)
    except (OSError, AttributeError) as error:
        raise KernelBuildError("loading the result", str(error), str(built)) from error
    if stored is not None:
        built.unlink(missing_ok=True)
    return function


def _load_cached(key: str, source: KernelSource, builder: Builder, cache: Cache | None) -> Function | None:
    path = cache.kernel(key) if cache is not None else None
    if cache is None or path is None:
        return None
    try:
        return builder.load(path, source)
    except (OSError, AttributeError):
        cache.discard("kernels", key)
        return None


def _after_fork() -> None:
    # The threads that were building do not exist in the child: what they promised is void.
    for key in [k for k, f in _functions.items() if not f.done()]:
        del _functions[key]


os.register_at_fork(after_in_child=_after_fork)
