"""Which groups share a launch, and why others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unbuilt import unbuilt
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.ir.record import CompileRecord, Decision

SIZES = [1000 * k + 17 for k in range(1, 13)]


def planned(f: Callable[..., Any], *sizes: list[int], target: str = "sm_90") -> CompileRecord:
    """The record of a function of lists of tensors; nothing is built."""
    with FakeTensorMode(), unbuilt():
        (graph,) = onepass.explain(f, *([torch.empty(n) for n in own] for own in sizes), target=target).graphs
    return graph


def launches(graph: CompileRecord) -> list[Decision]:
    return [d for d in graph.decisions if d.kind == "launch"]


def updates(ps: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
    return [p - 0.1 * g for p, g in zip(ps, gs, strict=True)]


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("count", [2, 12])
def test_updates_are_one_launch(target: str, count: int) -> None:
    graph = planned(updates, SIZES[:count], SIZES[:count], target=target)
    (kernel,) = graph.kernels
    (decision,) = launches(graph)
    assert decision.accepted and f"{count} parts of one launch" in decision.reason and decision.saved_us > 0
    assert all(o["parts"] == str(count) for o in kernel.operations)  # named once
    assert len(kernel.operations) == 2


def test_text_does_not_grow_with_tensors() -> None:
    few, many = (planned(updates, sizes, sizes).kernels[0] for sizes in (SIZES[:6], SIZES[:6] * 8))
    assert len(many.source) < 1.05 * len(few.source)


def test_fusion_can_be_turned_off() -> None:
    with FakeTensorMode(), unbuilt():
        xs = [torch.empty(n) for n in SIZES[:3]]
        (graph,) = onepass.explain(updates, xs, xs, target="sm_90", options={"fuse": False}).graphs
    assert not launches(graph) and len(graph.kernels) == 6


def test_what_waits_is_another_launch() -> None:
    def twice(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        sums = [x.sum() for x in xs]
        total = torch.stack(sums).sum()
        return [y * total for y in ys]

    graph = planned(twice, [100_000 + n for n in SIZES], SIZES)
    assert len(graph.kernels) == 4  # partial sums, sums, their sum, products
    assert [int(k.operations[0].get("parts", 1)) >= 11 for k in graph.kernels] == [True, True, False, True]


def test_a_reduction_of_its_kind_stays_with_them() -> None:
    def norm(gs: list[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gs]))

    graph = planned(norm, SIZES)
    first, total = graph.kernels
    assert int(first.operations[0]["parts"]) >= 11
    assert "parts" not in total.operations[0]


def test_changes_in_place_are_not_copied() -> None:
    def step(ps: list[Tensor], steps: list[Tensor]) -> None:
        for p, s in zip(ps, steps, strict=True):
            s.add_(1)
            p.div_(s[0])

    graph = planned(step, SIZES, [1] * len(SIZES))
    assert len(graph.kernels) == 2
    assert all(d.accepted for d in graph.decisions if d.kind == "in-place")


def test_readers_of_an_input_come_before_its_update() -> None:
    def step(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        before = [x.flip(0) + y for x, y in zip(xs, ys, strict=True)]
        for x in xs:
            x.mul_(2)
        return before

    graph = planned(step, SIZES, SIZES)
    assert len(graph.kernels) == 2 and all(d.accepted for d in graph.decisions if d.kind == "in-place")


def test_several_kinds_share_a_launch() -> None:
    def both(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        return [torch.sin(xs[0]), torch.softmax(ys[0].view(9, -1), -1)]

    graph = planned(both, [700], [900])
    (kernel,) = graph.kernels
    assert " | " in kernel.schedule and len(launches(graph)) == 1


def test_kernels_that_fill_the_chip_gain_too_little() -> None:
    def both(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        return [torch.sin(xs[0]), torch.softmax(ys[0].view(4096, -1), -1)]

    assert len(planned(both, [1 << 26], [1 << 26]).kernels) == 2


def test_memory_is_not_above_eager() -> None:
    # One after another, each result dies at once: together they would all be there.
    def chain(xs: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for x in xs:
            big = torch.cumsum(x * 2, 0)
            total = total + big.max()
        return total

    graph = planned(chain, [1 << 20] * 9)
    assert all(d.accepted or "bytes at the peak" in d.reason for d in launches(graph))
    assert any("bytes at the peak" in d.reason for d in launches(graph))


def test_a_launch_that_spills_is_taken_apart() -> None:
    from onepass.ir.dtypes import DType
    from onepass.ir.expr import const
    from onepass.ir.limits import NO_LIMITS
    from onepass.ir.plan import Group, Store
    from onepass.ir.program import Buffer

    stored = Buffer("b7", DType.F32, (), ())
    group = Group((Store(stored, (), const(1.0, DType.F32)),), ())
    assert NO_LIMITS.parting([group]).apart == {"b7"}
