"""Registers of the matrix unit are set before the fence that orders them, also where Triton does it behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onepass.ir.source import KernelSource
from onepass.ir.target import find_target
from onepass.runtime import triton_kernels
from onepass.runtime.assembler import FENCE, fenced

RIGHT = """
	mov.b32 	%r3, %r9;
	wgmma.fence.sync.aligned;
	add.s64 	%rd2, %rd1, 32;
	// begin inline asm
	wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%r1,%r2,%r3,%r4}, {%r5,%r6,%r7,%r8}, %rd2, %p1, 1, 1, 1;
	// end inline asm
	wgmma.commit_group.sync.aligned;
	mov.b32 	%r3, %r9;
"""
# Zero times a number is the same register for a whole row of the accumulator: copies are made right before the product.
ONCE = """
import triton
import triton.language as tl


@triton.jit
def onepass_kernel(out0, in1, in2, in3):
    r = tl.arange(0, 64)[:, None]
    c = tl.arange(0, 16)[None, :]
    k = tl.arange(0, 128)
    product = tl.dot(
        tl.load(in1 + r * 32 + tl.arange(0, 32)[None, :]), tl.load(in2 + tl.arange(0, 32)[:, None] + k[None, :] * 32)
    )
    top = tl.max(product, 1)[:, None]
    zero = tl.zeros([64, 16], tl.float32) * tl.exp2(float("-inf") - top)
    total = tl.dot(tl.exp2(product - top).to(tl.float16), tl.load(in3 + k[:, None] * 16 + c), zero)
    tl.store(out0 + r * 16 + c, total)
"""


def test_a_fence_that_is_right_stays_alone() -> None:
    assert fenced(RIGHT) == RIGHT
    assert fenced("no products\n") == "no products\n"


@pytest.mark.parametrize("register", ["%r1", "%r4", "%r5", "%r8"])
def test_registers_set_behind_the_fence(register: str) -> None:
    wrong = RIGHT.replace("	add.s64", f"	mov.b32 	{register}, %r9;\n	add.s64")
    lines = [line.strip() for line in fenced(wrong).splitlines()]
    start = next(k for k, line in enumerate(lines) if line.startswith("wgmma.mma_async"))
    assert lines[start - 2 : start] == [f"{FENCE};", "// begin inline asm"]
    assert lines.count(f"{FENCE};") == 2


def test_what_triton_writes_is_assembled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine code that runs is that of the text with all fences."""
    pytest.importorskip("triton")
    assembled: list[str] = []
    real = triton_kernels.assemble

    def assemble(ptx: str, *arguments: Any) -> bytes:
        assembled.append(ptx)
        return real(ptx, *arguments)

    monkeypatch.setattr(triton_kernels, "assemble", assemble)
    source = KernelSource("k", "triton", ONCE, "onepass_kernel", "onceagain", 4, 0, False)
    source = replace(source, signature=("*fp32", "*fp16", "*fp16", "*fp16"), warps=4, stages=1)
    built = triton_kernels.read_binary(triton_kernels.build_binary(source, find_target("sm_90")))
    assert built.registers > 0 and built.binary.startswith(b"\x7fELF")
    for ptx in assembled:
        assert fenced(ptx) == ptx and ptx.count(FENCE) > 2
