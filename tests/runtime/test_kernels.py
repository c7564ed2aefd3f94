"""Building and loading kernels: once each, in parallel, from the cache, and through faults."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from onepass.errors import KernelBuildError
from onepass.ir.source import KernelSource
from onepass.runtime import kernels as kernels_module
from onepass.runtime.cache import Cache, CacheWarning
from onepass.runtime.kernels import LoadedKernel, artifact_key, build_kernels
from onepass.runtime.toolchain import Toolchain, find_toolchain
from tests.runtime.sample import logging_compiler, run_python, scale_kernel, start_python


@pytest.fixture(autouse=True)
def _nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "_functions", {})


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CC is a compiler that notes its starts; this is the file."""
    command, log = logging_compiler(tmp_path)
    monkeypatch.setenv("CC", command)
    return log


def starts(log: Path) -> int:
    return len(log.read_text().splitlines())


def scaled(kernel: LoadedKernel, value: float) -> float:
    x, out = (ctypes.c_float * 1)(value), (ctypes.c_float * 1)()
    kernel.function(ctypes.addressof(out), ctypes.addressof(x), 1, 1)
    return float(out[0])


def test_identical_kernels_are_built_once(cache: Cache, compiler: Path) -> None:
    sources = [scale_kernel(2.0), scale_kernel(3.0), scale_kernel(2.0)]
    a, b, c = build_kernels(sources, find_toolchain(), cache)
    assert (scaled(a, 5), scaled(b, 5), scaled(c, 5)) == (10, 15, 10)
    assert a.function is c.function
    assert starts(compiler) == 2
    build_kernels(sources, find_toolchain(), None)  # in memory by now
    assert starts(compiler) == 2


SECOND = """
import sys
from pathlib import Path
from onepass.runtime.cache import Cache
from onepass.runtime.kernels import build_kernels
from onepass.runtime.toolchain import find_toolchain
from tests.runtime.sample import scale_kernel
from tests.runtime.test_kernels import scaled
kernels = build_kernels([scale_kernel(2.0), scale_kernel(3.0)], find_toolchain(), Cache(Path(sys.argv[1])))
print([scaled(k, 1.0) for k in kernels])
"""


def test_a_second_process_starts_no_compiler(cache: Cache, compiler: Path) -> None:
    build_kernels([scale_kernel(2.0)], find_toolchain(), cache)
    assert starts(compiler) == 1
    assert run_python(SECOND, str(cache.root)) == "[2.0, 3.0]\n"
    assert starts(compiler) == 2  # it noticed the one that was missing, and only that
    assert run_python(SECOND, str(cache.root)) == "[2.0, 3.0]\n"
    assert starts(compiler) == 2


@pytest.mark.rotating
def test_several_processes_build_the_same(cache: Cache) -> None:
    processes = [start_python(SECOND, str(cache.root)) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "[2.0, 3.0]\n"), err
    assert cache.count()["kernels"] == 2


def kernel_files(cache: Cache) -> list[Path]:
    return sorted((cache.root / "kernels").glob("*.so"))


@pytest.mark.parametrize("damage", [lambda b: b[:200], lambda b: b"", lambda b: b[:300] + b"\xcc" + b[301:]])
def test_a_damaged_kernel_is_built_again(
    cache: Cache, compiler: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_kernels([scale_kernel(2.0)], find_toolchain(), cache)
    (path,) = kernel_files(cache)
    whole = path.read_bytes()
    # A new file: the one in memory is mapped, and changing that would be this test's own crash.
    path.unlink()
    path.write_bytes(damage(whole))
    path.chmod(0o600)
    monkeypatch.setattr(kernels_module, "_functions", {})
    (kernel,) = build_kernels([scale_kernel(2.0)], find_toolchain(), cache)
    assert scaled(kernel, 4) == 8 and starts(compiler) == 2
    assert cache.kernel(path.stem) == path


def test_a_whole_file_that_is_no_kernel_is_built_again(cache: Cache, compiler: Path, tmp_path: Path) -> None:
    toolchain = find_toolchain()
    (tmp_path / "text").write_text("not machine code")
    cache.add_kernel(artifact_key(scale_kernel(), toolchain.fingerprint()), tmp_path / "text")
    (kernel,) = build_kernels([scale_kernel()], toolchain, cache)
    assert scaled(kernel, 4) == 8 and starts(compiler) == 1


def test_an_unusable_cache_still_gives_kernels(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(CacheWarning):
        cache = Cache(tmp_path / "file" / "x")
    for where in (cache, None):
        (kernel,) = build_kernels([scale_kernel(3.0)], find_toolchain(), where)
        assert scaled(kernel, 4) == 12


def test_a_full_cache_still_gives_kernels(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onepass.runtime.cache.os.replace", _only_in(cache.root, os.replace, full))
    with pytest.warns(CacheWarning, match="No space left") as seen:
        kernels = build_kernels([scale_kernel(2.0), scale_kernel(3.0)], find_toolchain(), cache)
    assert len(seen) == 1
    assert [scaled(k, 4) for k in kernels] == [8, 12]
    assert cache.count()["kernels"] == 0


def _only_in(folder: Path, real: Any, instead: Any) -> Any:
    def call(source: Any, target: Any) -> Any:
        return (instead if folder in Path(target).parents else real)(source, target)

    return call


def test_a_rejected_kernel_is_a_clear_error_and_may_be_tried_again(cache: Cache) -> None:
    bad = KernelSource("bad", "c", "int bad(void) { return syntax error; }", "bad", "bad", 0, 0, False)
    for _ in range(2):
        with pytest.raises(KernelBuildError, match="error"):
            build_kernels([scale_kernel(), bad], find_toolchain(), cache)
    assert len(kernel_files(cache)) == 1  # the good one is kept


def test_a_kernel_without_its_entry_is_an_error(cache: Cache) -> None:
    odd = KernelSource("odd", "c", "int other(void) { return 0; }", "odd", "odd", 0, 0, False)
    with pytest.raises(KernelBuildError, match="odd"):
        build_kernels([odd], find_toolchain(), cache)


def test_progress_is_told(cache: Cache) -> None:
    told: list[tuple[int, int, str]] = []
    build_kernels([scale_kernel(2.0), scale_kernel(3.0)], find_toolchain(), cache, lambda *a: told.append(a))
    assert [(done, total) for done, total, _ in told] == [(1, 2), (2, 2)]
    assert {name for *_, name in told} == {"scale_2.0", "scale_3.0"}


class _Slow(Toolchain):
    """A compiler that waits for the other builds to have begun, so that only parallel builds end."""

    barrier = threading.Barrier(2, timeout=30)

    def compile_c(self, text: str, output: Path) -> None:
        self.barrier.wait()
        super().compile_c(text, output)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor builds one kernel at a time")
def test_kernels_are_built_in_parallel() -> None:
    real = find_toolchain()
    slow = _Slow(real.command, real.flags, real.libraries, real.include)
    build_kernels([scale_kernel(2.0), scale_kernel(3.0)], slow)


def test_threads_that_want_one_kernel_share_its_build(cache: Cache, compiler: Path) -> None:
    results: list[LoadedKernel] = []
    toolchain = find_toolchain()

    def work() -> None:
        results.extend(build_kernels([scale_kernel()], toolchain, cache))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len({id(k.function) for k in results}) == 1 and len(results) == 4
    assert starts(compiler) == 1


def test_a_build_killed_in_the_middle_leaves_nothing_wrong(cache: Cache, tmp_path: Path) -> None:
    begun, hanging = tmp_path / "begun", tmp_path / "hanging-cc"
    hanging.write_text(f'#!/bin/sh\ntouch "{begun}"\nexec sleep 20\n')
    hanging.chmod(0o700)
    process = start_python(SECOND, str(cache.root), CC=str(hanging), TMPDIR=str(tmp_path))
    deadline = time.time() + 60
    while not begun.exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert begun.exists() and process.returncode == -signal.SIGKILL
    assert cache.count()["kernels"] == 0
    kernels = build_kernels([scale_kernel(2.0), scale_kernel(3.0)], find_toolchain(), cache)
    assert [scaled(k, 1.0) for k in kernels] == [2, 3] and cache.count()["kernels"] == 2


def test_the_key_tells_kernels_and_toolchains_apart() -> None:
    base = scale_kernel()
    keys = {artifact_key(s, f) for s in (base, scale_kernel(3.0), scale_kernel(status=1)) for f in ("x", "y")}
    assert len(keys) == 6
    renamed = KernelSource("another name", "c", "/* comment */" + base.text, base.entry, base.key, 2, 1, False)
    assert artifact_key(renamed, "x") == artifact_key(base, "x")
