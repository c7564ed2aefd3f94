"""Values that are computed again in their readers, although somebody else wants them in memory."""

from __future__ import annotations

import torch
from tests.unbuilt import unbuilt
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass


def looked_up(scores: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    n = scores.shape[-1]
    at = torch.arange(n, device=scores.device)[:, None] - torch.arange(n, device=scores.device) + n - 1
    return torch.softmax(scores + table[:, at], -1), at


def test_returned_positions_are_computed_again_where_they_index() -> None:
    """A look-up at computed positions is contiguous; one at stored positions could be anywhere."""
    with FakeTensorMode(), unbuilt():
        inputs = [torch.empty(s, dtype=torch.bfloat16) for s in ((8, 16, 1024, 1024), (16, 2047))]
        report = onepass.explain(looked_up, *inputs, target="sm_90", options={"tune": "off", "cache": False})
    (decision,) = (d for g in report.graphs for d in g.decisions if d.kind == "recompute")
    assert decision.accepted and decision.saved_us > 50
    _, softmax = report.kernels
    assert softmax.bytes_read < 2**28 + 2**20  # scores and table, no positions


def test_values() -> None:
    torch.manual_seed(0)
    scores, table = torch.randn(2, 3, 9, 9), torch.randn(3, 17)
    for options in ({"target": "triton-interpret", "cache": False}, {"cache": False}):
        torch._dynamo.reset()
        found = torch.compile(looked_up, backend="onepass", options=options)(scores, table)
        torch.testing.assert_close(found, looked_up(scores, table))
