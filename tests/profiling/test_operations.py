"""What an operation inside a kernel costs: the kernel without it, and why some have no such time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.backend import make_backend, watch_compilations
from onepass.ir.plan import Group
from onepass.profiling.without import READING, dearest, stand_in, without


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
    assert not any(p.problem for p in step.parts) and all("test_operations.py" in p.line for p in step.parts)
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
