"""Plans and machine code for GPUs that are not here: kernel counts, text, registers and spills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.ir.target import find_target
from tests.chips import CHIPS, EVERY_CHIP
from tests.fusion.test_kernel_counts import COUNTS
from tests.golden.test_golden import CASES

pytest.importorskip("triton")
FREE = {"strict": True, "cache": False}


def planned(function: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]], target: str) -> onepass.Explanation:
    """Explained from fake tensors: nothing of that size is computed here."""
    with FakeTensorMode(), torch.no_grad():
        return onepass.explain(function, *arguments(), target=target, options=FREE)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("name", COUNTS)
def test_kernel_counts_hold_on_a_gpu(name: str) -> None:
    function, arguments, most = COUNTS[name]
    e = planned(function, arguments, "sm_90")
    assert 1 <= len(e.kernels) <= most, [k.name for k in e.kernels]
    assert all(k.spilled_bytes == 0 for g in e.graphs for k in g.kernels)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    function, arguments = CASES[name]
    with torch.no_grad():
        e = onepass.explain(function, *arguments, target="sm_90", options=FREE)
    (graph,) = e.graphs
    sources = ["\n".join(s for s in k.source.splitlines() if not s.startswith("#   ")) for k in graph.kernels]
    golden(f"golden/{name}.txt", "\n\n".join([graph.plan, *sources]) + "\n")


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("name", CASES)
def test_builds_without_spills(name: str, target: str) -> None:
    function, arguments = CASES[name]
    with torch.no_grad():
        e = onepass.explain(function, *arguments, target=target, options=FREE)
    for kernel in e.graphs[0].kernels:
        assert kernel.registers > 0 and kernel.spilled_bytes == 0
        assert kernel.shared_bytes <= find_target(target).shared_bytes


def test_another_chip_may_get_another_plan() -> None:
    """The same program is shared out differently where there are more processors."""
    schedules = {}
    for target in ("sm_80", "gfx942"):
        e = planned(lambda x: x.sum(-1), lambda: (torch.empty(300, 1 << 16),), target)
        schedules[target] = [k.schedule for k in e.graphs[0].kernels]
    assert schedules["sm_80"] != schedules["gfx942"]


def test_the_report_shows_resources() -> None:
    e = onepass.explain(lambda x: x.softmax(-1), torch.randn(64, 1000), target="sm_90", options=FREE)
    assert "registers" in str(e) and "sm_90" in str(e)


def test_explain_for_an_absent_chip_still_computes() -> None:
    x = torch.randn(8, 100, requires_grad=True)
    e = onepass.explain(lambda x: x.softmax(-1).square().sum(), x, target="sm_90", options=FREE)
    assert {g.direction for g in e.graphs} == {"forward", "backward"}


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


# name -> function, arguments, kernels of the backward
TRAINING: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], int]] = {
    "LayerNorm": (
        lambda x, w, b: F.layer_norm(x, (4096,), w, b), lambda: (bf16(16384, 4096), bf16(4096), bf16(4096)), 2),
    "RMSNorm": (lambda x, w: F.rms_norm(x, (8192,), w), lambda: (bf16(16384, 8192), bf16(8192)), 2),
    "bias + GELU": (lambda x, b: F.gelu(x + b), lambda: (bf16(16384, 4096), bf16(4096)), 2),
    "cross-entropy": (
        F.cross_entropy, lambda: (bf16(8192, 128256), torch.zeros(8192, dtype=torch.int64)), 3),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("target", EVERY_CHIP)
@pytest.mark.parametrize("name", TRAINING)
def test_training_steps_at_real_sizes(name: str, target: str) -> None:
    """One pass over memory each way, with the finish of what is split, and no spill on any chip."""
    function, arguments, most = TRAINING[name]
    with FakeTensorMode():
        e = onepass.explain(function, *arguments(), target=target, options=FREE)
    kernels = {g.direction: g.kernels for g in e.graphs}
    assert len(kernels["backward"]) <= most, [k.name for k in kernels["backward"]]
    assert all(k.spilled_bytes == 0 and k.registers > 0 for g in e.graphs for k in g.kernels)
