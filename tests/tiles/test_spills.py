"""A kernel that spills registers gets its next schedule; where there is none, the plan fuses less and says so."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import onepass
from onepass.errors import KernelBuildError
from onepass.ir.limits import NO_LIMITS
from onepass.ir.record import KernelRecord
from onepass.ir.schedule import Schedule
from onepass.ir.source import KernelSource
from onepass.ir.target import find_target
from onepass.resources import Resources

pytest.importorskip("triton")
from onepass.runtime import triton_kernels
from onepass.runtime.cubin import cubin_resources
from onepass.runtime.triton_private import Staged

FREE = {"strict": True, "cache": False}


def spilling_if(monkeypatch: pytest.MonkeyPatch, spills: Any) -> None:
    """The assembler's answer replaced: a kernel spills where the test says so."""
    real = triton_kernels.build_binary

    def build(source: KernelSource, target: Any) -> bytes:
        built = triton_kernels.read_binary(real(source, target))
        head = {"entry": built.entry, "shared": built.shared, "threads": built.threads, "registers": 255}
        return triton_kernels.packed({**head, "spills": 512 if spills(source) else 0}, built.binary)

    monkeypatch.setattr(triton_kernels, "build_binary", build)


def test_the_next_schedule_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spilling_if(monkeypatch, lambda source: source.warps <= 8)
    e = onepass.explain(lambda x: (x * 1.0371).softmax(-1), torch.randn(600, 4000), target="sm_90", options=FREE)
    (graph,) = e.graphs
    assert [k.spilled_bytes for k in graph.kernels] == [0]
    assert "16 warps" in graph.kernels[0].schedule
    notes = [d for d in graph.decisions if d.kind == "spill"]
    assert notes and not notes[0].accepted and "512 bytes" in notes[0].reason


def test_less_is_fused_where_every_schedule_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    spilling_if(monkeypatch, lambda source: source.text.count("tl.load") > 4)

    def function(*xs: torch.Tensor) -> torch.Tensor:
        total = xs[0] * 1.0372
        for x in xs[1:]:
            total = total * x + x
        return total

    e = onepass.explain(function, *(torch.randn(64, 128) for _ in range(12)), target="sm_90", options=FREE)
    (graph,) = e.graphs
    assert len(graph.kernels) > 1
    assert all(k.spilled_bytes == 0 for k in graph.kernels)
    assert any("operations, limit" in d.reason for d in graph.decisions if not d.accepted)


def test_cosines_keep_their_kernel() -> None:
    """Together with sines they spill two registers of 64, among two thousand instructions."""
    e = onepass.explain(
        lambda x: x.cos() + x.sin(), torch.empty(4096, 4096, device="meta"), target="sm_90", options=FREE
    )
    (graph,) = e.graphs
    assert len(graph.kernels) == 1 and "4 warps" in graph.kernels[0].schedule


@pytest.mark.parametrize("change", ["stores", "schedule"])
def test_other_kernels_of_the_same_operations_start_anew(change: str) -> None:
    """Planned again, a group may store more or be of another kind: what its schedules spilled is not known then."""
    members = tuple(SimpleNamespace(buffer=SimpleNamespace(name=name)) for name in "ab")
    first = SimpleNamespace(members=members, stores=members[1:], products=True, schedule=Schedule(states=True))
    other = {"stores": members} if change == "stores" else {"schedule": Schedule()}
    plans = [
        SimpleNamespace(
            names={"k0": g},
            limits=NO_LIMITS,
            target=find_target("sm_90"),
            smaller=lambda *_: [Schedule()],
            shared=set(),
            plan=SimpleNamespace(launches=()),
        )
        for g in (first, SimpleNamespace(**{**vars(first), **other}))
    ]
    spills, spilling = Resources([]), [KernelRecord("k0", [], 0, 0, "", "", 0.0, spilled_bytes=8)]
    assert spills.after(plans[0], spilling) is NO_LIMITS  # type: ignore[arg-type]
    assert [bool(spills.choices(p)) for p in plans] == [True, False]  # type: ignore[arg-type]


SPILLING = """
import triton
import triton.language as tl


@triton.jit
def onepass_kernel(out0, in1):
    t = tl.arange(0, LANES)
    a = tl.load(in1 + t)
    b = tl.load(in1 + LANES + t)
    total = tl.sum(a * b, 0)  # both are needed again
    tl.store(out0 + t, a * total + b)
"""


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("spills", [False, True])
def test_registers_are_read_from_the_binary(target: str, spills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binary's own numbers are the assembler's; where it has a stack, the assembler is asked for spills."""
    asked: list[tuple[int, int, int]] = []
    real = triton_kernels.registers_and_stack

    def ask(ptx: str, chip: Any) -> tuple[int, int, int]:
        asked.append(real(ptx, chip))
        return asked[-1]

    text = SPILLING.replace("LANES", "8192" if spills else "512")
    source = KernelSource("k", "triton", text, "onepass_kernel", f"spilling{spills}{target}", 2, 0, False)
    source = replace(source, signature=("*fp32", "*fp32"), warps=1, stages=1)
    monkeypatch.setattr(triton_kernels, "registers_and_stack", ask)
    built = triton_kernels.read_binary(triton_kernels.build_binary(source, find_target(target)))
    assert len(asked) == spills and (built.spills > 0) == spills
    from_binary = cubin_resources(built.binary)
    assert from_binary[0] == built.registers and bool(from_binary[1]) == spills


def test_a_stack_that_only_the_binary_has_is_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton may ask its assembler for another allocation than we do, which then says nothing of the binary."""
    text = SPILLING.replace("LANES", "8192")
    source = KernelSource("k", "triton", text, "onepass_kernel", "stack", 2, 0, False)
    source = replace(source, signature=("*fp32", "*fp32"), warps=1, stages=1)
    monkeypatch.setattr(triton_kernels, "registers_and_stack", lambda *_: (200, 16, 0))
    built = triton_kernels.read_binary(triton_kernels.build_binary(source, find_target("sm_90")))
    registers, stack = cubin_resources(built.binary)
    assert (built.registers, built.spills) == (registers, stack - 16) and stack > 16


@pytest.mark.parametrize(("name", "value"), [("global_scratch_size", 64), ("ptx", ".entry k(.param .u64 a)")])
def test_kernels_that_the_launcher_does_not_know(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = triton_kernels.run_stages

    def run(*arguments: Any) -> Staged:
        staged = real(*arguments)
        return (
            Staged({**staged.texts, name: value}, staged.facts)
            if name == "ptx"
            else Staged(staged.texts, {name: value})
        )

    source = KernelSource("k", "triton", SPILLING.replace("LANES", "512"), "onepass_kernel", "unknown", 2, 0, False)
    source = replace(source, signature=("*fp32", "*fp32"), warps=1, stages=1)
    monkeypatch.setattr(triton_kernels, "run_stages", run)
    with pytest.raises(KernelBuildError, match="4 and none are passed"):
        triton_kernels.build_binary(source, find_target("sm_90"))


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02", b"\x7fELF\x02" + bytes(80), b"nonsense" * 20])
def test_a_binary_that_is_none(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"ELF|section"):
        cubin_resources(data)
