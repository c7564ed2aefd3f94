"""Kernels that assume something of their arguments, and what runs instead: built when needed, once, and kept."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.ir.source import KernelSource, Matrix
from onepass.ir.target import find_target
from onepass.runtime import builders, driver, kernels, triton_kernels
from onepass.runtime.cache import Cache, default_cache
from onepass.runtime.triton_kernels import ANY_POINTERS, ANY_SIZES, TritonBuilder, variant_of
from tests.runtime.test_gpu_launcher import ENCODE, LAUNCH

NO_CONTEXT = 201
SOURCE = KernelSource(
    "k", "triton", "text", "entry", "key", 2, 1, False, signature=("*fp32", "*fp32", "i64", "tensordesc<fp16[32, 16]>"),
    warps=4, matrices=(Matrix(1, 100, 64),), general="general", multiples=(0,), streams=True,
)  # fmt: skip
MAP = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [32, 16]}


class Chip:
    """A driver that knows which binaries it was given; like the real one it does nothing without a context."""

    def __init__(self, bound: bool = True) -> None:
        self.bound, self.launched, self.loaded = bound, list[bytes](), list[bytes]()
        self._launch, self._encode = LAUNCH(self._launched), ENCODE(self._encoded)

    def address(self, name: str = "") -> int | None:
        return ctypes.cast(self._encode if name == driver.ENCODE else self._launch, ctypes.c_void_p).value

    def bind(self, _device: int) -> None:
        self.bound = True

    def load(self, binary: bytes, _entry: str, _shared: int) -> int:
        if not self.bound:
            raise OSError("cuModuleLoadData returned 201")
        self.loaded.append(binary.partition(b"\n")[0])  # the cache adds a line
        return len(self.loaded)

    def _launched(self, function: int, *_: Any) -> int:
        if self.bound:
            self.launched.append(self.loaded[function - 1])
        return 0 if self.bound else NO_CONTEXT

    def _encoded(self, *_: Any) -> int:
        return 0 if self.bound else NO_CONTEXT


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[KernelSource]:
    """The sources that were built; a binary is the text and what it assumes."""
    sources: list[KernelSource] = []

    def build(source: KernelSource, _target: Any) -> bytes:
        sources.append(source)
        head = {"entry": "entry", "shared": 0, "threads": 128, "registers": 32, "spills": 0}
        code = f"{source.text} {source.aligned} {source.multiples}".encode()
        return triton_kernels.packed({**head, "maps": [MAP] * len(source.matrices)}, code)

    monkeypatch.setattr(triton_kernels, "build_binary", build)
    monkeypatch.setattr(kernels, "_functions", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return sources


def launched(monkeypatch: pytest.MonkeyPatch, chip: Chip, cache: Cache | None) -> Any:
    """The kernel as the host calls it."""
    monkeypatch.setattr(triton_kernels, "driver", lambda _target: chip)
    (loaded,) = kernels.build_kernels([SOURCE], TritonBuilder(find_target("sm_90")), cache)
    launch, recover = loaded.function(0)[:2]

    def call(*words: int) -> None:
        if launch(*words):
            recover(*words)

    return call


EVEN, SIZES, POINTERS = (1600, 3200, 64, 8, 0), (1600, 3200, 63, 8, 0), (1602, 3200, 64, 8, 0)


@pytest.mark.parametrize("keeps", [False, True])
def test_variants_are_built_once_and_kept(
    keeps: bool, built: list[KernelSource], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "a cache"))
    cache = default_cache() if keeps else None
    wanted = [b"text True (0,)", b"text True ()", b"general False ()"]
    for process in range(2):
        chip = Chip()
        call = launched(monkeypatch, chip, cache)
        for _ in range(2):
            for words in (EVEN, SIZES, POINTERS):
                call(*words)
        assert chip.launched == wanted * 2 and chip.loaded == wanted
        assert len(built) == (3 if keeps or not process else 6)
        kernels._functions.clear()
    assert (tmp_path / "a cache").exists() == keeps


@pytest.mark.parametrize("words", [EVEN, SIZES, POINTERS])
def test_a_thread_without_a_context(
    words: tuple[int, ...], built: list[KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets one, whatever else is missing; matrices are not read without descriptors for that."""
    chip = Chip()
    call = launched(monkeypatch, chip, None)
    chip.bound = False
    call(*words)
    expected = {EVEN: b"text True (0,)", SIZES: b"text True ()", POINTERS: b"general False ()"}[words]
    assert chip.launched == [expected]


def test_variants_are_kernels_of_their_own() -> None:
    sizes, pointers = variant_of(SOURCE, ANY_SIZES), variant_of(SOURCE, ANY_POINTERS)
    assert len({SOURCE.key, sizes.key, pointers.key}) == 3
    assert replace(sizes, key=SOURCE.key, multiples=(0,)) == SOURCE
    assert pointers.signature == ("*fp32", "*fp32", "i64") and not pointers.matrices


def test_kernels_are_known_by_what_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of any of these files gives other machine code of the same text."""
    read: list[str] = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or b"")
    builders.prelude_digest.__wrapped__()
    codegen, runtime = ("prelude", "hardware", "nvidia"), ("triton_kernels", "triton_private", "assembler")
    assert set(read) == {*(f"triton_{name}.py" for name in codegen), *(f"{name}.py" for name in runtime)}
