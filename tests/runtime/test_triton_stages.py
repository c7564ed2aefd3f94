"""Triton's stages one by one give what `triton.compile` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

triton: Any = pytest.importorskip("triton")
from onepass.ir.target import find_target  # noqa: E402
from onepass.runtime import triton_kernels  # noqa: E402
from onepass.runtime.triton_stages import run_stages  # noqa: E402

TEXT = """
import triton
import triton.language as tl


@triton.jit
def kernel(out, left, right):
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    product = tl.dot(tl.load(left + rows * 64 + columns), tl.load(right + rows * 64 + columns))
    tl.store(out + rows * 64 + columns, tl.exp2(product))
"""
TYPES = {"out": "*fp32", "left": "*fp16", "right": "*fp16"}


def source(folder: Path) -> Any:
    path = folder / "kernel.py"
    path.write_text(TEXT)
    scope: dict[str, Any] = {"__name__": "kernel"}
    exec(compile(TEXT, str(path), "exec"), scope)
    return triton.compiler.ASTSource(fn=scope["kernel"], signature=TYPES, constexprs={}, attrs={})


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "gfx942"])
def test_the_same_assembly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    target = triton_kernels._gpu_target(find_target(name))
    options = {"num_warps": 4, "num_stages": 2}
    staged = run_stages(source(tmp_path), target, options, {}, {})
    public = triton.compile(source(tmp_path), target=target, options=options)
    assembly, binary = ("amdgcn", "hsaco") if name.startswith("gfx") else ("ptx", "cubin")
    assert staged.texts[assembly] == public.asm[assembly]
    assert len(staged.texts[binary]) == len(public.asm[binary])  # a temporary file's name is in it
    assert all(staged.facts[fact] == getattr(public.metadata, fact) for fact in ("name", "shared", "num_warps"))


def test_a_text_is_edited_before_the_next_stage(tmp_path: Path) -> None:
    target = triton_kernels._gpu_target(find_target("sm_90"))
    taken = []

    def edit(text: str) -> str:
        taken.append(text)
        return text.replace("ex2.approx.ftz.f32", "lg2.approx.ftz.f32")

    options = {"num_warps": 4, "num_stages": 2}
    plain = run_stages(source(tmp_path), target, options, {}, {})
    edited = run_stages(source(tmp_path), target, options, {"ptx": edit}, {})
    assert taken == [plain.texts["ptx"]] and "lg2" in edited.texts["ptx"]
    assert edited.texts["cubin"] != plain.texts["cubin"]
