"""Functions as graphs of functional operations, and how long our own kernels take for them in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..autograd.partition import partition
from ..autograd.saved import choose_saved
from ..compilation import compile_graph
from ..ir.options import Options
from ..ir.target import Target
from ..lowering.decompositions import decomposition_table
from ..lowering.registry import RULES
from .checks import Function, Metas, listed, sample, time_us


def functional_graph(function: Function, values: Sequence[Any], target: str = "auto") -> GraphModule:
    """What a function does to tensors like these, changes in place taken out."""
    table, traced = decomposition_table(target), function
    while True:  # what is taken apart may itself hold changes in place
        graph: GraphModule = make_fx(torch.func.functionalize(traced), table, tracing_mode="fake")(*values)
        calls = (n.target for n in graph.graph.nodes if n.op == "call_function")
        if traced is not function or not any(getattr(getattr(t, "_schema", None), "is_mutable", False) for t in calls):
            return graph
        traced = Interpreter(graph).run


def training_times(
    function: Function, backward: Function, reference: Function, metas: Metas, target: Target, options: Options
) -> tuple[float, float]:
    """How long forward and backward of a kernel take together, and those of our own kernels for its reference."""
    values = sample(metas, 1.0)
    results = listed(function(*values))
    steps = [torch.ones_like(r) for r in results]
    theirs = time_us(lambda: function(*values)) + time_us(lambda: backward(*values, *results, *steps))
    forward, later = partition(
        _joint(reference, values, steps, options.target),
        (values, steps),
        saving=lambda graph, outputs: choose_saved(graph, outputs, target, RULES, 1.0),
        num_fwd_outputs=len(results),
    )
    given: dict[Any, Any] = {f"primals_{k}": v for k, v in enumerate(values, 1)}
    given |= {f"tangents_{k}": v for k, v in enumerate(steps, 1)}
    ours = 0.0
    for graph, direction in ((forward, "forward"), (later, "backward")):
        own = compile_graph(graph, target, options, direction)
        args = [given[n.target] for n in graph.graph.find_nodes(op="placeholder")]
        ours += time_us(lambda call=own.call, args=args: call([*args]))  # type: ignore[misc]
        made = zip(graph.graph.output_node().args[0], own.call([*args]), strict=True)
        given |= {n.name: value for n, value in made if isinstance(n, Node)}
    return theirs, ours


def _joint(reference: Function, values: list[Tensor], steps: list[Tensor], target: str) -> GraphModule:
    """The joint graph of a function, its inputs named as torch names them."""

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Any]:
        results = listed(reference(*primals))
        roots, given = zip(*((r, t) for r, t in zip(results, tangents, strict=True) if r.requires_grad), strict=True)
        wanted = [p for p in primals if p.requires_grad]
        return [*results, *torch.autograd.grad(roots, wanted, given, allow_unused=True)]

    primals = [v.detach().requires_grad_(v.is_floating_point()) for v in values]
    with torch.enable_grad():
        traced = make_fx(joint, decomposition_table(target), tracing_mode="fake")(primals, steps)
    count = len(values)
    graph = functional_graph(lambda *v: traced([*v[:count]], [*v[count:]]), [*values, *steps], target)
    for number, node in enumerate(graph.graph.find_nodes(op="placeholder"), 1):
        node.name = node.target = f"primals_{number}" if number <= count else f"tangents_{number - count}"
    return graph
