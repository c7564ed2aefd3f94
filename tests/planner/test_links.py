"""The dependency graph of planning: joined steps keep their order with all others."""

from __future__ import annotations

from itertools import combinations

import torch
from tests.tuning.planned import traced
from torch import Tensor

from onepass.ir.program import Define
from onepass.lowering.graph import lower_graph
from onepass.planner.links import Links


def five(x: Tensor) -> tuple[Tensor, ...]:
    """Two chains of steps, 0 -> 3 -> 4 and 1 -> 2."""
    a = x + 1
    b = x * 2
    c = b * 3
    d = a - 4
    return a, b, c, d, d * 5


def test_joined_steps_wait_for_what_their_parts_wait_for() -> None:
    program = lower_graph(traced(five, torch.randn(4, 8)), precision="fused")
    links = Links(program)
    defines = [s for s in program.statements if isinstance(s, Define)]
    pairs = {(i, j) for i, j in combinations(range(5), 2) if links.connected(i, j)}
    assert pairs == {(0, 3), (0, 4), (3, 4), (1, 2)}
    assert links.is_cyclic([defines[0], defines[4]], ())
    assert not links.is_cyclic([defines[0], defines[4]], [defines[3]])  # computed again inside
    assert not links.is_cyclic([defines[0], defines[2]], ())
    joined = links.join([defines[1], defines[4]], ())
    assert links.connected(0, 2)  # through 3, which comes later in the program, and the joined step
    assert links.is_cyclic([defines[0], defines[2]], ())
    assert links.reaches_around(0, joined) is links.reaches_around(0, 2) is True
    assert links.reaches_around(3, joined) is False
