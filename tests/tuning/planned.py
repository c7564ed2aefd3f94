"""Graphs planned for a target, ready to be scheduled in one way or another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch.fx import GraphModule

from onepass.ir.options import Options
from onepass.ir.record import CompileRecord
from onepass.ir.target import find_target
from onepass.lowering.decompositions import decomposition_table
from onepass.pipeline import PlannedGraph, lower, plan_graph


def traced(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> GraphModule:
    """The graph AOTAutograd makes of a function, without gradients."""
    found: list[GraphModule] = []

    def keep(graph: GraphModule, _inputs: Any) -> Callable[..., Any]:
        found.append(graph)
        return make_boxed_func(graph.forward)

    with torch.no_grad():
        aot_function(function, fw_compiler=keep, decompositions=decomposition_table(), dynamic=dynamic)(*inputs)
    return found[0]


def planned(
    function: Callable[..., Any], *inputs: torch.Tensor, target: str = "triton-interpret", **settings: Any
) -> PlannedGraph:
    """A function's graph, planned with these options."""
    options = Options.make({"strict": True, "tune": "quick", **settings})
    return plan_graph(lower(traced(function, *inputs), find_target(target), options, CompileRecord()), CompileRecord())
