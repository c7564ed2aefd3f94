"""Tensors without memory can be explained, again and again, and the process ends as it should."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.unbuilt import unbuilt
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass

PROGRAM = """
import torch, onepass
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    x = torch.empty(3, 1 << 20, dtype=torch.bfloat16)
    for _ in range(2):
        print(len(onepass.explain(lambda x: x.sum(-1), x, options={"cache": False}).kernels))
"""


def test_twice_in_one_process() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.split()
    assert first == second != "0"


class Block(nn.Module):
    """A parameter, a buffer, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(32)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.relu(self.first(x)))) * self.scale + torch.arange(32, device=x.device)


def kernels(model: nn.Module, x: torch.Tensor) -> list[tuple[str, str, str]]:
    with unbuilt():
        e = onepass.explain(model, x, target="sm_90", options={"cache": False, "strict": True})
    assert not [g.fallback for g in e.graphs if g.fallback]
    return [(g.direction, k.name, k.schedule) for g in e.graphs for k in g.kernels]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("where", ["meta", "fake", "parameters"])
def test_a_model_without_memory_is_planned_like_one_with_it(where: str, training: bool) -> None:
    """`parameters`: only they have none."""
    with torch.set_grad_enabled(training):
        expected = kernels(Block(), torch.randn(64, 32))
        if where == "fake":
            with FakeTensorMode():
                model, x = Block(), torch.randn(64, 32)
        else:
            with torch.device("meta"):
                model = Block()
            x = torch.randn(64, 32, device="meta" if where == "meta" else "cpu")
        before = list(model.parameters())
        assert kernels(model, x) == expected
    assert {d for d, _, _ in expected} == ({"forward", "backward"} if training else {"inference"})
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in before)


def test_sizes_of_an_earlier_question_do_not_matter() -> None:
    """torch.compile would take sizes that differ from the last call's for dynamic ones."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    for size in (64, 96):
        with unbuilt(), torch.no_grad():
            e = onepass.explain(function, torch.randn(size, size), options={"cache": False})
        assert f"[{size}]" in e.kernels[0].schedule


@pytest.mark.parametrize(("target", "known"), [("sm_90", True), ("sm_80", False), ("gfx942", False), ("cpu", True)])
def test_predictions_for_chips_that_were_not_measured_say_so(target: str, known: bool) -> None:
    with unbuilt(), torch.no_grad():
        e = onepass.explain(lambda x: x.exp() + 1, torch.randn(64, 64), target=target, options={"cache": False})
    assert ("unmeasured" in str(e)) != known
