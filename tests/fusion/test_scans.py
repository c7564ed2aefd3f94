"""How many kernels programs with scans take, and why some take more than one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unbuilt import unbuilt
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.lowering.recurrences import recurrence

TARGETS = ("cpu", "sm_90")


def explained(
    function: Callable[..., Any], shape: tuple[int, ...], target: str, grad: bool = False
) -> onepass.Explanation:
    with FakeTensorMode(), unbuilt():
        inputs = [torch.empty(shape, requires_grad=grad) for _ in range(2)]
        e = onepass.explain(function, *inputs, target=target, options={"strict": True, "cache": False})
    assert not e.externs
    return e


def gate(x: Tensor, g: Tensor) -> Tensor:
    return (torch.sigmoid(g) * x).cumsum(-1) * F.silu(g)


# name -> (function, kernels); rows or columns of 4096 x 8192 are scanned
KERNELS: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "gate": (gate, 1),
    "columns": (lambda x, g: (torch.sigmoid(g) * x).cumsum(0) * F.silu(g), 1),
    "from the end": (lambda x, g: (x * g).flip(-1).cumsum(-1).flip(-1) + g, 1),
    "softmax before": (lambda x, g: x.softmax(-1).cumsum(-1) * g, 1),
    "sum after": (lambda x, g: (x.cumsum(-1) * g).sum(-1), 1),
    "sum beside": (lambda x, g: (x.cumsum(-1) * g, x.sum(-1)), 1),
    "three scans": (lambda x, g: (x.cumsum(-1), g.cummax(-1)[0] + 1, (x * g).cumsum(-1)), 1),
    "scan of a scan": (lambda x, g: (x.cumsum(-1) + g).cumsum(-1), 1),
    "exponentials": (lambda x, g: x.logcumsumexp(-1) * g, 1),
    "value and place": (lambda x, g: x.cummax(-1), 1),
    "one position before": (lambda x, g: F.pad(x.cumsum(-1), (1, 0))[:, :-1] * g, 1),
    "both ways": (lambda x, g: x.cumsum(-1) * g.flip(-1).cumsum(-1).flip(-1), 2),
    "both axes": (lambda x, g: (x.cumsum(-1) + g).cumsum(0), 2),
    "read at other positions": (lambda x, g: x.cumsum(-1)[:, 1:] - x.cumsum(-1)[:, :-1] * g[:, 1:], 2),
}


def selective(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, z: Tensor) -> Tensor:
    """A selective state space with its output and gate. x, dt, z: [batch, time, channels]; b, c: [batch, time, n]."""
    decay = torch.exp(dt.float()[..., None] * a)
    states = recurrence(decay.movedim(1, 0), ((dt * x)[..., None] * b[:, :, None]).movedim(1, 0), None, False)
    return (states.movedim(0, 1) * c[:, :, None]).sum(-1) * F.silu(z)


@pytest.mark.parametrize("target", TARGETS)
def test_states_are_never_stored(target: str) -> None:
    """One kernel, which moves inputs and outputs alone; its states are in registers."""
    long, states = (8, 2048, 2048), (8, 2048, 16)
    shapes = (long, long, (2048, 16), states, states, long)
    with FakeTensorMode(), unbuilt():
        e = onepass.explain(selective, *map(torch.empty, shapes), target=target, options={"strict": True})
    assert len(e.kernels) == 1 and not e.externs and e.bytes_moved < 1.1 * e.bytes_minimum, str(e)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str, target: str) -> None:
    function, count = KERNELS[name]
    e = explained(function, (4096, 8192), target)
    assert len(e.kernels) == count, [k.name for k in e.kernels]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("both ways", "scans along two axes, or both ways along one"),
        ("read at other positions", "read at other positions"),
    ],
)
def test_reasons(name: str, reason: str) -> None:
    decisions = explained(KERNELS[name][0], (4096, 8192), "cpu").decisions
    assert any(reason in d.reason for d in decisions if not d.accepted), [d.reason for d in decisions]


@pytest.mark.parametrize("target", TARGETS)
def test_each_element_travels_once(target: str) -> None:
    e = explained(gate, (4096, 8192), target)
    assert e.bytes_moved == e.bytes_minimum == 3 * 4 * 4096 * 8192


def test_tile_of_long_rows() -> None:
    (kernel,) = explained(gate, (4096, 8192), "sm_90").kernels
    assert "swept by 4096; 8 warps" in str(kernel.schedule)


@pytest.mark.parametrize("target", TARGETS)
def test_few_long_rows_are_shared_out(target: str) -> None:
    """Two launches; what runs over the row beside the scan has kernels of its own."""
    first, second = explained(gate, (1, 1 << 26), target).kernels
    assert (first.name, second.name) == ("k0_mul_cumsum_silu_partial", "k0_mul_cumsum_silu_finish")
    e = explained(lambda x, g: x.softmax(-1).cumsum(-1) * g, (1, 1 << 26), target)
    assert any(k.name.endswith("cumsum_mul_finish") for k in e.kernels)


@pytest.mark.parametrize("target", TARGETS)
def test_backward(target: str) -> None:
    """The gradient is scanned from the end without a copy, in the kernel that makes it."""
    e = explained(lambda x, g: (x * 2).cumsum(-1) * g, (4096, 8192), target, grad=True)
    backward = e.graphs[1]
    assert len(backward.kernels) <= 2 and not any("flip" in k.name and "cumsum" not in k.name for k in backward.kernels)
