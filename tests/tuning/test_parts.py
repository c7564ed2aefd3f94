"""What the parts of a group should take, for groups that were seen to be slow."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from onepass.building import _parts_us
from tests.tuning.planned import planned


@pytest.mark.parametrize("shape", [(64, 300), (1, 300), (64, 1, 300)])
def test_parts_have_a_price_whatever_dimensions_they_have(shape: tuple[int, ...]) -> None:
    """Statistics keep a dimension of one position, which no axis runs over."""
    graph = planned(lambda x: F.layer_norm(x, shape[-1:]) * 2, torch.randn(shape))
    for group in graph.names.values():
        assert 0 < _parts_us(group, graph.target) < math.inf
