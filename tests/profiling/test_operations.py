"""What an operation inside a kernel costs: the kernel without it, and why some have no such time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.backend import make_backend, watch_compilations
from onepass.ir.expr import Load, postorder
from onepass.ir.kernel import Let, walk
from onepass.ir.plan import Group
from onepass.profiling.form import OTHER_FORM, in_place, other_form, other_memory
from onepass.profiling.operations import _timed
from onepass.profiling.without import READING, dearest, stand_in, without
from onepass.runtime.rounds import Laps
from onepass.schedule.group import schedule_group


def planned_group(function: Any, *args: Tensor) -> Group:
    """The only group of a function's plan."""
    with watch_compilations() as compiled:
        torch.compile(function, backend=make_backend({"cache": False}))(*args)
    (found,) = compiled
    assert found.made is not None
    (group,) = found.made.planned.names.values()
    return group


def operations(group: Group) -> dict[str, Any]:
    return {m.origin.op.split(".")[1]: m for m in group.members}


def test_a_dear_operation_is_seen_and_a_cheap_one_has_no_time() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.atanh(torch.tanh(torch.sin(x) * 0.5).pow(3.5) * 0.5) + 1

    profile = onepass.profile(function, torch.rand(512, 1024), operations=True, seconds=0.01)
    (step,) = profile.steps
    found = {p.name: p for p in step.parts}
    assert set(found) == {"atanh", "tanh", "pow", "sin"}
    assert all("slower" in p.problem for p in step.parts if p.problem)  # by noise
    assert all("test_operations.py" in p.line for p in step.parts)
    assert 0 < step.rest_us < step.alone_us
    assert max(p.exposed_us for p in step.parts) > 0.05 * step.alone_us
    assert "is left with a cheap operation" in str(profile)


def test_equal_kernels_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.profiling import operations as module

    measured: list[str] = []
    original = module._measured

    def counted(step: Any, *rest: Any) -> Any:
        measured.append(step.name)
        return original(step, *rest)

    monkeypatch.setattr(module, "_measured", counted)

    def function(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x @ w)
        return x

    profile = onepass.profile(function, torch.randn(16, 16), torch.randn(16, 16), operations=True, seconds=0.01)
    kernels = [s for s in profile.steps if s.kind == "kernel"]
    assert len(kernels) == 3 and len(measured) == 1 and len({s.parts for s in kernels}) == 1
    assert [p.name for p in kernels[0].parts] == ["tanh"]


def test_stand_ins_keep_what_is_read_and_the_type() -> None:
    group = planned_group(lambda x, y: (x / y).exp() + x * 2, torch.randn(8, 8), torch.rand(8, 8) + 1)
    found = operations(group)
    assert str(stand_in(found["div"])) == "(a0[d0, d1] + a1[d0, d1])"
    assert stand_in(found["add"]) is None and stand_in(found["mul"]) is None  # nothing is cheaper
    assert [m.origin.op for m in dearest(group, 9)] == ["aten.exp.default", "aten.div.Tensor"]
    changed = without(group, [found["exp"]])
    assert isinstance(changed, Group) and "exp" not in str(changed.stores[0].value)
    assert "exp" in str(group.stores[0].value)


def test_a_reduction_that_alone_reads_has_no_time() -> None:
    group = planned_group(lambda x: (x * 2).exp().sum(-1), torch.randn(64, 256))
    assert without(group, [operations(group)["sum"]]) == READING
    softmax = planned_group(lambda x: torch.softmax(x, -1), torch.randn(64, 256))
    assert isinstance(without(softmax, [operations(softmax)["amax"]]), Group)


def scheduled_for_a_gpu(function: Any, *args: Tensor) -> tuple[Group, Any, Any]:
    """The only group of a plan for an absent GPU, what schedules it, and its kernels."""
    with FakeTensorMode(), watch_compilations() as compiled:
        onepass.explain(function, *(torch.empty(a.shape, dtype=a.dtype) for a in args), target="sm_90")
    assert compiled[0].made is not None
    planned = compiled[0].made.planned
    (group,) = planned.names.values()
    return group, planned.target, schedule_group(group, planned.target, "")


def form_without(group: Group, target: Any, whole: Any, removed: Any) -> str:
    version = without(group, [removed])
    assert isinstance(version, Group)
    inputs = {e.buffer for e in postorder([s.value for s in group.stores]) if isinstance(e, Load)}
    return other_form(whole.kernels, schedule_group(version, target, "").kernels, inputs)


def test_an_exponential_that_holds_a_sweep_together_is_replaced_in_its_kernel() -> None:
    rows = torch.empty(512, 32000, dtype=torch.bfloat16)
    group, target, whole = scheduled_for_a_gpu(lambda x: torch.logsumexp(x.float(), -1), rows)
    found = {m.origin.op.split(".")[1]: m for m in group.members}
    assert "it reads an input 2.0 times as often" in form_without(group, target, whole, found["exp"])
    assert form_without(group, target, whole, found["log"]) == ""
    kept = in_place(whole, [found["exp"]], group.members)
    assert kept is not None
    before, after = ([s for k in g.kernels for s in walk(k.body)] for g in (whole, kept))
    names = [[s.op for s in each if isinstance(s, Let)] for each in (before, after)]
    assert "exp" in names[0] and names[1] == ["maximum" if op == "exp" else op for op in names[0]]
    assert len(before) == len(after)
    assert in_place(whole, [found["log"]], group.members) is None
    assert in_place(whole, [found["exp"]], [*group.members, found["exp"]]) is None  # one of two


def test_a_scale_behind_a_product_has_no_time() -> None:
    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return x @ (weight.to(x.dtype) * scale)

    x = torch.empty(16, 8192, dtype=torch.bfloat16)
    args = x, torch.empty(8192, 8192, dtype=torch.int8), torch.empty(8192, dtype=torch.bfloat16)
    group, target, whole = scheduled_for_a_gpu(product, *args)
    (scaled,) = (m for m in group.members if "mul" in m.origin.op)
    assert form_without(group, target, whole, scaled) == OTHER_FORM + "another of its launches reads an input"


def test_a_kernel_that_is_slower_without_an_operation_gives_no_time() -> None:
    group = planned_group(torch.sin, torch.randn(64))
    (sin,) = group.members
    whole, slower, noisy = (Laps(wall_us=us) for us in ([50.0] * 8, [60.0] * 8, [50.5, 49.5] * 4))
    assert "10.0 us slower" in _timed(sin, whole, slower).problem
    assert not _timed(sin, whole, noisy).problem and _timed(sin, slower, whole).exposed_us == 10.0


def test_a_version_that_holds_more_shared_memory_has_another_form() -> None:
    def kernels(shared: int) -> list[Any]:
        return [SimpleNamespace(function=SimpleNamespace(built=SimpleNamespace(shared=shared)))]

    assert "65536 bytes of shared memory, not 32768" in other_memory(kernels(32768), kernels(65536))
    assert other_memory(kernels(512), kernels(4096)) == other_memory(kernels(65536), kernels(32768)) == ""


def test_integers_and_masks() -> None:
    group = planned_group(lambda x, m: torch.where(m, x // 3, x), torch.arange(64), torch.rand(64) > 0.5)
    for member in group.members:
        value = stand_in(member)
        assert value is None or value.dtype is member.buffer.dtype


@pytest.mark.parametrize("target", ["triton-interpret"])
def test_kernels_of_tiles_too(target: str) -> None:
    pytest.importorskip("triton")
    profile = onepass.profile(
        lambda x: torch.softmax(x, -1), torch.randn(4, 32), operations=True, seconds=0.01, target=target
    )
    (step,) = profile.steps
    assert {p.name.split(".")[0] for p in step.parts} >= {"exp"} and step.alone_us > 0
