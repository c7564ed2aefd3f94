"""What is known of a graph before it is compiled, for advice: why it ends, and where float64 enters it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..autograd.between import bytes_of
from ..ir.origins import origin_of
from ..ir.record import GraphFacts

_NARROWER = (torch.float32, torch.float16, torch.bfloat16)


def ending(graph: GraphModule) -> tuple[str, str]:
    """Why tracing ended with this graph before the function did, and at which line; empty where it did not."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return "", ""
    why = (str(reason.reason).strip().splitlines() or [""])[0]
    frames = list(reason.user_stack)
    return why, f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line or ''}".rstrip(": ") if frames else ""


def facts_of(graph: GraphModule, ended: tuple[str, str]) -> GraphFacts:
    """The facts of a graph that AOTAutograd traced."""
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    wide = [n for n in calls if _dtype(n) is torch.float64]
    entering = [n for n in wide if any(_dtype(a) in _NARROWER for a in n.all_input_nodes)]
    line = next((found for n in entering if (found := origin_of(n).line)), "")
    results = {a for a in graph.graph.output_node().all_input_nodes if a.op == "call_function"}
    return GraphFacts(*ended, line, len(wide) if line else 0, sum(map(bytes_of, results)))


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
