"""Triton's stages one by one give what `triton.compile` gives, which compiles where they are not known."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

triton: Any = pytest.importorskip("triton")
import onepass  # noqa: E402
from onepass.errors import KernelBuildError  # noqa: E402
from onepass.ir.source import KernelSource  # noqa: E402
from onepass.ir.target import find_target  # noqa: E402
from onepass.profiling.issue import disassembled, instructions  # noqa: E402
from onepass.runtime import triton_kernels, triton_private  # noqa: E402
from onepass.runtime.assembler import adds_wrongly  # noqa: E402
from onepass.runtime.triton_private import Assembler, find_assembler, gpu_target, run_stages  # noqa: E402

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
    target = gpu_target(find_target(name))
    options = {"num_warps": 4, "num_stages": 2}
    staged = run_stages(source(tmp_path), target, options, {}, {})
    public = triton.compile(source(tmp_path), target=target, options=options)
    assembly, binary = ("amdgcn", "hsaco") if name.startswith("gfx") else ("ptx", "cubin")
    assert staged.texts[assembly] == public.asm[assembly]
    assert len(staged.texts[binary]) == len(public.asm[binary])  # a temporary file's name is in it
    assert all(staged.facts[fact] == getattr(public.metadata, fact) for fact in ("name", "shared", "num_warps"))


def test_a_text_is_edited_before_the_next_stage(tmp_path: Path) -> None:
    target = gpu_target(find_target("sm_90"))
    taken = []

    def edit(text: str) -> str:
        taken.append(text)
        return text.replace("ex2.approx.ftz.f32", "lg2.approx.ftz.f32")

    options = {"num_warps": 4, "num_stages": 2}
    plain = run_stages(source(tmp_path), target, options, {}, {})
    edited = run_stages(source(tmp_path), target, options, {"ptx": edit}, {})
    assert taken == [plain.texts["ptx"]] and "lg2" in edited.texts["ptx"]
    assert edited.texts["cubin"] != plain.texts["cubin"]


PLACES = """\
!14 = !DILocation(line: 34, column: 25, scope: !15, inlinedAt: !17)
!15 = distinct !DILexicalBlockFile(scope: !4, file: !16, discriminator: 0)
!17 = !DILocation(line: 283, column: 30, scope: !15, inlinedAt: !18)
!18 = distinct !DILocation(line: 21, column: 32, scope: !19)
!20 = !DILocation(line: 22, column: 21, scope: !4)
"""


def test_places_are_those_of_the_kernel_that_calls() -> None:
    own = "DILocation(line: 21, column: 32, scope: !19)"
    lines = triton_kernels.lines_of_callers(PLACES).splitlines()
    assert lines == [
        f"!14 = !{own}", PLACES.splitlines()[1], f"!17 = !{own}", f"!18 = distinct !{own}", PLACES.splitlines()[4]
    ]  # fmt: skip


def test_machine_code_names_no_line_outside_the_kernel(tmp_path: Path) -> None:
    """Of whichever Triton is installed; 3.6 names the line of the library alone where a function was inlined."""
    ((made, _),) = built(lambda x: torch.softmax(x * 1.405, -1), (64, 1000))
    edited = triton_kernels.build_binary(made, find_target("sm_90"))
    text = disassembled(triton_kernels.read_binary(edited).binary, find_target("sm_90"))
    if not text:
        pytest.skip("no disassembler")
    own = [made.text.splitlines()[i.line - 1] for i in instructions(text, made.key)[0] if i.line > 0]
    assert "inlined at" not in text and "triton_prelude" not in text
    for called in ("op_exp(", "op_fold_max(", "op_fold_sum("):
        assert sum(called in line for line in own) >= 5, called


@pytest.fixture(params=["an older version", "a newer version", "a part is missing"])
def stages_unknown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, last = triton_private.TESTED
    match request.param:
        case "an older version":
            monkeypatch.setattr(triton_private, "TESTED", ((last[0], last[1] + 1), (last[0], last[1] + 2)))
        case "a newer version":
            monkeypatch.setattr(triton_private, "TESTED", ((first[0], first[1] - 2), (first[0], first[1] - 1)))
        case _:
            from triton._C import libtriton

            monkeypatch.delattr(libtriton, "ir")  # Triton's compiler has taken it already
            monkeypatch.delitem(sys.modules, "triton._C.libtriton.ir", raising=False)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


def built(function: Any, *shapes: tuple[int, ...]) -> list[tuple[KernelSource, triton_kernels.Built]]:
    """The kernels of a function, built anew for sm_90."""
    found: list[tuple[KernelSource, triton_kernels.Built]] = []
    real = triton_kernels.build_binary

    def build(source: KernelSource, target: Any) -> bytes:
        data = real(source, target)
        found.append((source, triton_kernels.read_binary(data)))
        return data

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), torch.no_grad():
        patch.setattr(triton_kernels, "build_binary", build)
        patch.setattr("onepass.runtime.kernels._functions", {})
        arguments = [torch.empty(s, dtype=torch.bfloat16) for s in shapes]
        onepass.explain(function, *arguments, target="sm_90", options={"strict": True, "cache": False, "tune": "off"})
    return found


@pytest.mark.usefixtures("stages_unknown")
def test_triton_compiles_where_its_stages_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is complete: its name, arguments and descriptors, and nothing spilled."""
    called: list[str] = []
    real = triton.compile

    def compile_and_note(function: Any, **how: Any) -> Any:
        called.append(function.name)
        return real(function, **how)

    monkeypatch.setattr(triton, "compile", compile_and_note)
    found = built(lambda x: torch.softmax(x * 1.401, -1), (64, 1000))
    found += built(lambda x, w: torch.relu(F.linear(x, w)) * 1.402, (2048, 256), (4096, 256))
    assert called == [source.entry for source, _ in found] == ["onepass_max_exp_sum_div", "onepass_dot"]
    for source, kernel in found:
        assert kernel.entry == source.entry and kernel.registers > 0 and kernel.spills == 0
        assert len(kernel.maps) == len(source.matrices)
    assert found[1][0].matrices


def test_a_sum_that_cannot_be_repaired_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`triton.compile` edits nothing: what its assembler would get wrong is no kernel."""
    ((source, _),) = built(lambda x: torch.softmax(x * 1.403, -1), (64, 1000))
    real = run_stages
    monkeypatch.setattr(triton_kernels, "run_stages", lambda *a: replace(real(*a), edited=False))
    monkeypatch.setattr(triton_kernels, "repaired", lambda text: text + " ")
    versions = iter([(12, 9), (12, 8)])
    monkeypatch.setattr(triton_kernels, "find_assembler", lambda _: Assembler("ptxas", "sm_90a", next(versions)))
    triton_kernels.build_binary(source, find_target("sm_90"))
    with pytest.raises(KernelBuildError, match="may add addresses wrongly"):
        triton_kernels.build_binary(source, find_target("sm_90"))


@pytest.mark.parametrize(("version", "wrong"), [((12, 8), True), ((), True), ((12, 9), False), ((13, 4, 59), False)])
def test_only_old_assemblers_are_given_repaired_text(
    version: tuple[int, ...], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((source, _),) = built(lambda x: torch.softmax(x * 1.404, -1), (64, 1000))
    found = find_assembler(find_target("sm_90"))
    assert found is not None and found.version > (12,) and Path(found.path).exists()
    seen: list[str] = []
    monkeypatch.setattr(triton_kernels, "find_assembler", lambda _: replace(found, version=version))
    monkeypatch.setattr(triton_kernels, "repaired", lambda text: seen.append(text) or text)
    triton_kernels.build_binary(source, find_target("sm_90"))
    assert len(seen) == wrong and adds_wrongly(None)
