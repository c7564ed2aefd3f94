"""Exchanges with other processes: they start early and are waited for late, and their order is the program's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from tests.checking import DEVICE
from torch import Tensor
from torch.distributed import _functional_collectives as exchanges
from torch.testing._internal.distributed.fake_pg import FakeStore

from onepass.backend import watch_compilations
from onepass.ir.source import Call, Launch

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="the order is the same on every target"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),  # the new names are not in torch 2.11
]


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """This process is one of two; the other one is made up."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


def steps(function: Any, *inputs: Tensor, **options: Any) -> list[str]:
    """What the host program does, in order: "kernel", or the name of an operator."""
    with watch_compilations() as compiled:
        compiled_function = torch.compile(function, backend="onepass", options={"cache": False, **options})
        found, eager = compiled_function(*inputs), function(*inputs)
    torch.testing.assert_close(found, eager)
    (one,) = compiled
    instructions = one.executable.host.instructions if one.executable else ()
    calls = [i for i in instructions if isinstance(i, Launch | Call)]
    return ["kernel" if isinstance(i, Launch) else str(i.target).split(".")[1] for i in calls]


def test_other_steps_run_while_an_exchange_does() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = exchanges.all_reduce(x @ w, "sum", distributed.group.WORLD)
        return (y * 2).relu(), (x.T @ x).sin()

    assert steps(f, torch.randn(64, 64), torch.randn(64, 64)) == [
        "mm", "all_reduce", "mm", "kernel", "wait_tensor", "kernel",
    ]  # fmt: skip


def test_exchanges_keep_the_programs_order() -> None:
    """The second one has its input first, and must still start second: another rank may be at the first one."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = exchanges.all_reduce((x @ w).sin() @ w, "sum", distributed.group.WORLD)
        second = exchanges.all_gather_tensor(x, 0, distributed.group.WORLD)
        third = exchanges.reduce_scatter_tensor(w, "sum", 0, distributed.group.WORLD)
        return second + 1, first * 2, third - 1

    found = steps(f, torch.randn(64, 64), torch.randn(64, 64))
    starts = [s for s in found if s in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")]
    assert starts == ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"]
    assert found.index("reduce_scatter_tensor") < found.index("wait_tensor")
    assert found.count("wait_tensor") == 3


def test_work_around_an_exchange_fuses_up_to_it() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = exchanges.all_reduce((x * w).tanh() + x, "sum", distributed.group.WORLD)
        return (y / 2).relu() * w

    found = steps(f, torch.randn(64, 64), torch.randn(64, 64))
    assert found == ["kernel", "all_reduce", "wait_tensor", "kernel"]


def test_nothing_is_measured_among_ranks() -> None:
    from onepass.runtime.device import has_other_ranks

    assert has_other_ranks()
