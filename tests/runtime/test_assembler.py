"""Addresses of matrices in shared memory: the assembler is not given the sums that it gets wrong."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.runtime import triton_kernels
from onepass.runtime.assembler import repaired
from onepass.runtime.device import runs_here

UPPER, OTHER = -4611685949707911168, -9223371899415822336
TEXT = f"""
	cvt.u64.u32 	%rd27, %r148;
	add.s64 	%rd10, %rd27, {OTHER + 2};
	or.b64 	%rd13, %rd27, {UPPER};
	add.s64 	%rd14, %rd27, {UPPER + 32};
	add.s64 	%rd30, %rd29, {UPPER + 32};
	add.s64 	%rd31, %rd27, 2048;
	add.s64 	%rd32, %rd27, -32;
	wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {{%r1,%r2}}, %rd13, %rd14, %p1, 1, 1, 1;
"""


def test_two_upper_halves_of_one_address() -> None:
    found = [line.strip() for line in repaired(TEXT).splitlines() if "add" in line or "or.b64" in line]
    assert found == [
        "add.s64 \t%rd10, %rd27, 2;", f"or.b64 \t%rd10, %rd10, {OTHER};",
        f"or.b64 \t%rd13, %rd27, {UPPER};",
        "add.s64 \t%rd14, %rd27, 32;", f"or.b64 \t%rd14, %rd14, {UPPER};",
        f"add.s64 \t%rd30, %rd29, {UPPER + 32};",
        "add.s64 \t%rd31, %rd27, 2048;", "add.s64 \t%rd32, %rd27, -32;",
    ]  # fmt: skip


@pytest.mark.parametrize("old", [f"{OTHER + 2}", "wgmma.mma_async"])
def test_one_upper_half_or_no_product(old: str) -> None:
    text = TEXT.replace(old, f"{UPPER + 2}" if old.startswith("-") else "mma")
    assert repaired(text) == text


def test_no_gpu_runs_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert not runs_here("sm_90")


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


@pytest.mark.parametrize(("size", "values"), [(32, 16), (64, 16), (64, 32)])
def test_machine_code(size: int, values: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No sum takes the lower half of an address for both of its halves."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    tool = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("no disassembler")
    binaries: list[bytes] = []
    real = triton_kernels.packed

    def packed(head: dict[str, Any], binary: bytes) -> bytes:
        binaries.append(binary)
        return real(head, binary)

    monkeypatch.setattr(triton_kernels, "packed", packed)
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(1, 1, 37, n, dtype=torch.float16) for n in (size, size, values))
        onepass.explain(plain, q, k, v, target="sm_90", options={"strict": True, "cache": False})
    assert binaries
    for binary in binaries:
        (tmp_path / "k.cubin").write_bytes(binary)
        text = subprocess.run([tool, "-c", tmp_path / "k.cubin"], capture_output=True, text=True, check=True).stdout
        assert "HGMMA" in text
        assert not wrong_sums(text)


def wrong_sums(text: str) -> list[str]:
    """Sums of two halves, in machine code, that read one register for both and never set it in between."""
    found, waiting = [], dict[str, str]()  # the carry of a lower half -> what it was added to
    for line in text.splitlines():
        if half := re.search(r"UIADD3 (UR\d+), (UP\d), (UR\d+), ", line):
            waiting[half[2]] = half[3]
        elif (half := re.search(r"UIADD3\.X UR\d+, (UR\d+), -0x\w+, URZ, (UP\d)", line)) and waiting.pop(
            half[2], ""
        ) == half[1]:
            found.append(line.strip())
        if result := re.search(r"\*/\s+\S+ (UR\d+),", line):
            waiting = {carry: base for carry, base in waiting.items() if base != result[1]}
    return found
