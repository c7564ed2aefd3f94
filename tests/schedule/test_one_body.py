"""Kernels with one body: the body with one kernel's buffers and numbers in their places is that kernel's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from onepass.ir.kernel import Kernel, Parts, Share, Statement
from onepass.ir.options import Options
from onepass.ir.poly import Poly
from onepass.ir.program import Buffer
from onepass.ir.record import CompileRecord
from onepass.ir.target import find_target
from onepass.lowering import decomposition_table
from onepass.pipeline import PlannedGraph, compile_entry, lower, plan_graph, schedule_named, share_launches
from onepass.schedule.one_body import Different, alike, one_body


def updates(ps: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
    return [p - 0.1 * g for p, g in zip(ps, gs, strict=True)]


def norms(gs: list[Tensor], _: list[Tensor]) -> list[Tensor]:
    return [g.norm() for g in gs]


def planned(f: Callable[..., Any], sizes: list[int], target: str, times: int = 1) -> PlannedGraph:
    """The plan of a function of two lists of tensors, those of the second `times` as long."""
    found: list[PlannedGraph] = []

    def plan(graph: GraphModule, _: Any) -> Any:
        record = CompileRecord()
        found.append(plan_graph(lower(graph, find_target(target), Options.make({}), record), record))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=plan, decompositions=decomposition_table())
    torch._dynamo.reset()
    with FakeTensorMode():
        torch.compile(f, backend=backend)([torch.empty(n) for n in sizes], [torch.empty(times * n) for n in sizes])
    (plan_,) = found
    return plan_


def kernels(f: Callable[..., Any], sizes: list[int], target: str, times: int = 1) -> list[Kernel]:
    """The first kernels of groups, each alone."""
    plan = planned(f, sizes, target, times)
    return [schedule_named(plan, name).kernels[0] for name in plan.names]


def put_back(share: Share, part: int) -> tuple[Statement, ...]:
    """The body of one part: its numbers and buffers in the place of symbols and of the first one's buffers."""
    assert share.parts is not None
    values = {symbol: row[part] for symbol, row in share.parts.numbers}
    buffers = {row[0]: row[part] for row in share.parts.buffers}

    def own(tree: Any) -> Any:
        if isinstance(tree, Poly):
            return tree.substitute(values)
        if isinstance(tree, Buffer):
            return buffers[tree]
        if isinstance(tree, tuple):
            return tuple(map(own, tree))
        if is_dataclass(tree) and not isinstance(tree, type):
            return type(tree)(**{f.name: own(getattr(tree, f.name)) for f in fields(tree)})
        return tree

    found: tuple[Statement, ...] = own(share.body)
    return found


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_a_part_is_its_own_kernel_again(target: str) -> None:
    found = kernels(updates, [1000, 3001, 20007, 5, 777], target)
    share = one_body(found, Poly.ZERO)
    parts = share.parts
    assert parts is not None and parts.count == 5
    assert [len(row) for row in parts.buffers] == [5, 5, 5]
    for k, kernel in enumerate(found):
        assert repr(put_back(share, k)) == repr(kernel.body)  # axes by their names


def test_programs_follow_each_other() -> None:
    found = kernels(updates, [1000, 3001, 20007], "sm_90")
    share = one_body(found, Poly.of(7))
    parts = share.parts
    assert parts is not None
    programs = [k.programs.constant or 0 for k in found]
    firsts = [7, 7 + programs[0], 7 + programs[0] + programs[1]]
    assert [p.constant for p in parts.firsts] == firsts and share.end.constant == 7 + sum(programs)


def test_another_operation_is_another_body() -> None:
    ((one, *_), (other, *_)) = kernels(updates, [1000, 3001], "cpu"), kernels(norms, [17, 18], "cpu")
    assert not alike(one, other)
    with pytest.raises(Different):
        one_body([one, other], Poly.ZERO)


def test_what_lies_apart_is_another_body() -> None:
    def strided(ps: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
        return [p - 0.1 * g[::2] for p, g in zip(ps, gs, strict=True)]

    (apart,) = kernels(strided, [700], "sm_90", times=2)
    (whole,) = kernels(updates, [699], "sm_90")
    assert not alike(apart, whole)


def test_multiples_stay_multiples_on_a_gpu() -> None:
    even, odd, other = kernels(updates, [2000, 2001, 3016], "sm_90")
    assert alike(even, other) and not alike(even, odd)
    rows = one_body([even, other], Poly.ZERO).parts
    assert rows is not None and rows.divisor(0) == 8


@pytest.mark.parametrize("count", [4, 5, 40])
def test_many_parts_are_one_text(count: int) -> None:
    plan = planned(updates, [101 + 2 * k for k in range(count)], "sm_90")
    entry, _ = compile_entry(plan, CompileRecord(), {})
    (source,) = entry.kernels
    assert source.text.count("tl.store") == (count if count <= 4 else 1)
    assert source.pointers == (3 * count if count <= 4 else 1)
    if count > 4:
        assert ".multiple_of" not in source.general.replace("tl.multiple_of(tl.load(table + ", "", 0).split("own")[0]


def test_finishing_kernels_share_a_launch_too() -> None:
    plan = planned(norms, [100_003 + 1000 * k for k in range(9)], "sm_90")
    scheduled = {g: schedule_named(plan, name) for name, g in plan.names.items()}
    made = [k for s in share_launches(plan.plan, scheduled).values() for k in s.kernels]
    assert [k.name.rsplit("_", 1)[1] for k in made] == ["partial", "finish"]
    tables = [s.parts for k in made for s in k.body if isinstance(s, Share)]
    assert isinstance(tables[0], Parts)
