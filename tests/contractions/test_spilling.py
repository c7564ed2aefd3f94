"""Kernels of products that spill: what they give up, in which order, and that nothing else of a graph is touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.ir.record import CompileRecord, KernelRecord
from onepass.ir.source import KernelSource
from onepass.ir.target import find_target
from onepass.planner import contractions
from tests.checking import DEVICE
from tests.chips import CHIPS
from tests.contractions.judging import FREE, interpreted, judge, make_library_slow, products_left

pytest.importorskip("triton")
from onepass.runtime import triton_kernels

OPERANDS = "every schedule spills: operands of its products come from memory"
FOLLOWERS = "every schedule spills: what follows its products is not in their kernel"
LIBRARY = "every schedule spills: its products are the library's"


ROWS = ((131072, 64), (64, 128))  # short sums, few columns: one kernel with what reduces its rows


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Positions in the first 32 of a head."""
    y = x[..., :32]
    a, b = y.chunk(2, -1)
    return torch.cat([y * cosine + torch.cat([-b, a], -1) * sine, x[..., 32:]], -1)


def causal(s: Tensor) -> Tensor:
    rows, columns = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    return s.masked_fill(rows[:, None] < columns, -math.inf).softmax(-1)


def attention(q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return causal(rotated(q, cosine, sine) @ rotated(k, cosine, sine).mT / 16) @ v


def differential(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return (causal(q @ k.mT / 16) - weight * causal(q2 @ k2.mT / 16)) @ v


def explained(function: Callable[..., Any], target: str, *shapes: tuple[int, ...]) -> onepass.Explanation:
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        made = [torch.empty(s, dtype=torch.bfloat16) for s in shapes]
        return onepass.explain(function, *made, target=target, options=FREE)


def with_positions(size: int, length: int = 2048) -> list[tuple[int, ...]]:
    return [*[(4, 16, length, size)] * 3, (length, 32), (length, 32)]


def reasons(e: onepass.Explanation) -> list[str]:
    return [d.reason for d in e.decisions if d.kind == "spill"]


def fits(e: onepass.Explanation, target: str) -> None:
    for kernel in e.kernels:
        assert kernel.registers > 0 and kernel.spilled_bytes == 0, kernel.schedule
        assert kernel.shared_bytes <= find_target(target).shared_bytes, kernel.schedule


# --- as chips' compilers have it ---


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("size", [192, pytest.param(256, marks=pytest.mark.rotating)])
def test_operands_are_computed_before_a_kernel_that_spills(
    target: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_library_slow(monkeypatch)
    monkeypatch.setattr(
        contractions, "_with_rest_us", lambda *_: 0.0
    )  # operands are first tried inside, whatever the price
    e = explained(attention, target, *with_positions(size))
    fits(e, target)
    assert not products_left(e)
    spilled = reasons(e)
    apart = OPERANDS in spilled
    assert len(e.kernels) == (2 if apart else 1)  # operands of all heads; attention with its mask
    assert not spilled or "0 spills" in spilled[0]
    assert apart or target in ("sm_100", "gfx942") or (target, size) == ("sm_90", 192)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("size", [192, 256])
def test_smaller_tiles_are_the_next_schedules(target: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_library_slow(monkeypatch)
    e = explained(differential, target, *[(4, 16, 2048, size)] * 5, (1,))
    fits(e, target)
    assert not products_left(e) and len(e.kernels) == 1
    assert ("rows by 32" in e.kernels[0].schedule) == (target == "gfx942") == bool(reasons(e))


# --- as a test has it ---


def spilling_if(monkeypatch: pytest.MonkeyPatch, spills: Callable[[KernelSource], int]) -> list[KernelSource]:
    """Nothing is built; a kernel spills as many bytes as the test says. The sources that were asked for."""
    built: list[KernelSource] = []

    def build(source: KernelSource, target: Any) -> bytes:
        built.append(source)
        head = {"entry": source.entry, "shared": 0, "threads": 128, "registers": 255, "spills": spills(source)}
        return triton_kernels.packed(head, b"")

    monkeypatch.setattr(triton_kernels, "build_binary", build)
    monkeypatch.setattr("onepass.runtime.kernels._functions", {})
    return built


def multiplies(kernel: KernelSource | KernelRecord) -> bool:
    return "tl.dot" in (kernel.text if isinstance(kernel, KernelSource) else kernel.source)


def given_up(e: onepass.Explanation) -> list[str]:
    return [r for r in reasons(e) if r.startswith("every")]


def test_products_are_the_librarys_where_every_kernel_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    built = spilling_if(monkeypatch, lambda source: 512 if multiplies(source) else 0)
    e = explained(lambda *xs: attention(*xs) * 1.0625, "sm_90", *with_positions(64, 1152))
    assert len(products_left(e)) == 2 and all(k.spilled_bytes == 0 for k in e.kernels)
    assert given_up(e) == [OPERANDS, FOLLOWERS, LIBRARY]
    refused = [d for d in e.decisions if d.kind == "product" and d.reason == "every kernel that was tried spilled"]
    assert len(refused) == 2 and not any(d.accepted for d in refused)
    assert sum(map(multiplies, built)) <= 12
    assert len(e.kernels) <= 3  # operands, softmax with its mask, the last factor: nothing is torn apart


def test_an_epilogue_is_given_up_before_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(*xs: Tensor) -> Tensor:
        return attention(*xs).sin()

    spilling_if(monkeypatch, lambda source: 512 if multiplies(source) and "sin(" in source.text else 0)
    e = explained(function, "sm_90", *with_positions(256))
    assert given_up(e) == [OPERANDS, FOLLOWERS] and not products_left(e)
    assert [multiplies(k) for k in e.kernels] == [False, True, False]


def test_operands_that_only_move_or_convert_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated operands come from memory in 16 bits; heads repeated and widened in the kernel are not stored."""

    def function(q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return causal(q.float() @ k.float().mT / 16).bfloat16() @ v

    monkeypatch.setattr(
        contractions, "_with_rest_us", lambda *_: 0.0
    )  # operands are first tried inside, whatever the price
    spilling_if(monkeypatch, lambda source: 512 if multiplies(source) and "in5" in source.text else 0)  # angles
    shapes = with_positions(64)
    e = explained(function, "sm_90", shapes[0], *[(4, 8, 2048, 64)] * 2, *shapes[3:])
    assert given_up(e) == [OPERANDS] and not products_left(e)
    assert [multiplies(k) for k in e.kernels] == [False, True]
    moved = sum(k.bytes_read + k.bytes_written for k in e.kernels if not multiplies(k))
    assert moved <= 1.05 * 2 * (2 * 4 * (16 + 8) * 2048 * 64)  # queries and keys, in and out


def test_reductions_of_rows_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = (x @ weight).float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()

    spilling_if(monkeypatch, lambda source: 0)
    assert [multiplies(k) for k in explained(function, "sm_90", *ROWS).kernels] == [True]
    spilling_if(monkeypatch, lambda source: 512 if multiplies(source) and "rsqrt" in source.text else 0)
    e = explained(function, "sm_90", *ROWS)
    assert len(e.kernels) == 1 and products_left(e) and not e.kernels[0].spilled_bytes
    assert given_up(e) == [OPERANDS, FOLLOWERS]


def test_others_keep_their_fusions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers with one mask, and a chain of point-wise work; only the first layer's kernel spills."""

    def function(*xs: Tensor) -> list[Tensor]:
        z = xs[8]
        for number in range(12):
            z = (z * (1.0 + number)).sin()
        return [attention(*xs[:5]), attention(*xs[5:8], *xs[3:5]), z]

    shapes = [*with_positions(256), *with_positions(64)[:3], (4096, 4096)]
    spilling_if(monkeypatch, lambda source: 0)
    before = explained(function, "sm_90", *shapes)
    spilling_if(monkeypatch, lambda source: 512 if multiplies(source) and "[256]" in source.text else 0)
    e = explained(function, "sm_90", *shapes)
    assert given_up(e) == [OPERANDS, FOLLOWERS, LIBRARY] and not any(k.spilled_bytes for k in e.kernels)
    kept = {k.schedule for k in before.kernels if multiplies(k) and "[256]" not in k.schedule}
    kept |= {k.schedule for k in before.kernels if "sin" in k.name}
    assert len(kept) == 2 and kept <= {k.schedule for k in e.kernels}
    assert len(e.kernels) <= 5  # both, operands of each layer, the first one's softmax with its mask


def test_plain_kernels_that_spill_leave_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        for number in range(8):
            x, y = (x * (1.0 + number)).sin(), (y * (1.0 + number)).cos()
        return [x, y]

    spilling_if(monkeypatch, lambda source: 512 if source.text.count("tl.sin(") > 4 else 0)
    e = explained(function, "sm_90", (64, 128), (8192, 300))
    assert not any(k.spilled_bytes for k in e.kernels)
    found = [{o["op"].split(".")[1] for o in k.operations} for k in e.kernels]
    assert sum("sin" in ops for ops in found) == 2 and sum("cos" in ops for ops in found) == 1
    assert any("at most 8 operations in a kernel with one of its own" in r for r in given_up(e))


def test_what_spills_in_every_way_keeps_its_best_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    built = spilling_if(monkeypatch, lambda source: 4096 // source.warps)
    e = explained(lambda x: x.sum(-1), "sm_90", (600, 4000))
    most = max(source.warps for source in built)
    assert most > built[0].warps and [k.spilled_bytes for k in e.kernels] == [4096 // most]


@pytest.mark.parametrize("spilling", [1, 2, 4, 6, 8])
def test_values_are_the_same(spilling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many builds spill: other tiles, operands from memory, less in one kernel, the library."""
    builds: list[bool] = []

    def note(record: CompileRecord, *_: object) -> None:
        builds.append(any(map(multiplies, record.kernels)))
        for kernel in record.kernels:
            kernel.spilled_bytes = 512 if multiplies(kernel) and len(builds) <= spilling else 0

    monkeypatch.setattr("onepass.resources.note_resources", note)
    made = torch.Generator(DEVICE).manual_seed(spilling)
    shapes = [*[(1, 2, 80, 48)] * 3, (80, 32), (80, 32)]
    arguments = [torch.randn(s, generator=made) for s in shapes]
    torch._dynamo.reset()
    judge(interpreted(lambda *xs: attention(*xs).sin()), lambda *xs: attention(*xs).sin(), *arguments)
    assert len(builds) == spilling + 1 and all(builds)


def test_more_tensor_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five products of one tile each have a place in it; Triton's own launcher would refuse the kernel."""
    columns: dict[str, int] = {}
    real = triton_kernels.run_stages

    def run(function: Any, *rest: Any) -> Any:
        staged = real(function, *rest)
        columns[function.fn.src] = staged.facts["tmem_size"]
        return staged

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        a, b, c, d, e = (x @ w for w in weights)
        return torch.sigmoid(a) * b * torch.tanh(c) + torch.sigmoid(d) * e

    make_library_slow(monkeypatch)
    monkeypatch.setattr(triton_kernels, "run_stages", run)
    monkeypatch.setattr("onepass.runtime.kernels._functions", {})
    e = explained(function, "sm_100", (4096, 1024), *[(1024, 4096)] * 5)
    assert max(columns.values()) > 512 and reasons(e)
    kept = [n for text, n in columns.items() if any(text in k.source for k in e.kernels)]
    assert len(kept) == len(e.kernels) and max(kept) <= 512


# --- programs that a processor holds ---


@pytest.mark.parametrize(
    ("target", "registers", "shared", "threads", "programs"),
    [
        ("sm_90", 153, 115_712, 128, 2),  # (115,712 + 1024) x 2 is all of 228 KB
        ("sm_90", 153, 115_713, 128, 1),
        ("sm_100", 153, 115_712, 128, 2),
        ("sm_80", 153, 82_944, 128, 2),  # 164 KB
        ("sm_80", 153, 82_945, 128, 1),
        ("gfx942", 128, 32 << 10, 256, 2),
        ("gfx942", 128, 0, 256, 4),  # twice the registers of the others
        ("sm_90", 128, 0, 256, 2),
        ("sm_90", 129, 0, 256, 1),  # registers come in blocks of 8
        ("sm_90", 16, 0, 1024, 2),  # 2048 threads
        ("sm_90", 16, 0, 32, 32),
        ("cpu", 0, 0, 0, 0),
    ],
)
def test_resident_programs(target: str, registers: int, shared: int, threads: int, programs: int) -> None:
    assert find_target(target).resident_programs(registers, shared, threads) == programs


def by_positions(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    s = (q @ k.mT).float() * 128**-0.5
    return s.masked_fill(positions[:, None] < positions, -math.inf).softmax(-1).bfloat16() @ v


@pytest.mark.parametrize(("target", "shared"), [("sm_80", 0), ("sm_90", 115_768), ("sm_100", 115_808)])
def test_a_load_less_is_in_flight_where_a_program_is_lost_otherwise(target: str, shared: int) -> None:
    """Comparing positions takes 56 bytes of shared memory: of two programs of 113 KB one would be left.

    A processor of sm_80 has room for one program of these tiles, whatever is compared.
    """
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        made = [torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16) for _ in range(3)]
        positions = torch.empty(4096, dtype=torch.int64)
        e = onepass.explain(by_positions, *made, positions, target=target, options=FREE)
    fits(e, target)
    _, kernel = e.kernels
    chip = find_target(target)
    held = chip.resident_programs(kernel.registers, kernel.shared_bytes, kernel.threads)
    assert held * kernel.threads >= (256 if shared else 128), (
        kernel.schedule
    )  # two programs of four warps, or one of eight


@pytest.mark.parametrize(("saved", "stages"), [(40_000, "2 stages"), (8, "3 stages")])
def test_loads_stay_in_flight_where_that_helps_nobody(saved: int, stages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {3: 115_768, 2: 115_768 - saved}

    def build(source: KernelSource, target: Any) -> bytes:
        head = {"entry": source.entry, "shared": shared[source.stages], "threads": 128, "registers": 128, "spills": 0}
        return triton_kernels.packed(head, b"")

    monkeypatch.setattr(triton_kernels, "build_binary", build)
    monkeypatch.setattr("onepass.runtime.kernels._functions", {})
    e = explained(lambda q, k, v: causal((q @ k.mT).tanh()) @ v, "sm_90", *[(4, 16, 2048, 128)] * 3)
    assert len(e.kernels) == 1 and stages in e.kernels[0].schedule
