"""FX graph to `Program`: the decomposition table and one rule per operation."""

from __future__ import annotations

from .decompositions import decomposition_table
from .graph import lower_graph
from .random import reset_streams
from .registry import RULES, Unsupported

__all__ = ["RULES", "Unsupported", "decomposition_table", "lower_graph", "reset_streams"]
