"""A graph whose kernels run on a GPU may hold numbers that live on the CPU; no kernel writes there."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from onepass.ir.expr import Load, postorder
from onepass.ir.program import Define, Extern
from onepass.lowering.graph import lower_graph

aten = torch.ops.aten


def test_a_constant_on_the_cpu_in_a_graph_on_a_gpu() -> None:
    """As from `y[..., 0] = 1`: kernels know the number, and only the library makes the tensor."""
    graph = torch.fx.Graph()
    with FakeTensorMode() as mode:
        x = graph.placeholder("x")
        constant = graph.get_attr("one")
        fresh = graph.call_function(aten.lift_fresh_copy.default, (constant,))
        filled = graph.call_function(aten.fill.Tensor, (x, fresh))
        graph.output((filled, fresh))
        x.meta["val"] = filled.meta["val"] = torch.empty(4, 5, device="cuda")
        constant.meta["val"] = fresh.meta["val"] = torch.empty((), device="cpu")
    del mode
    module = torch.fx.GraphModule({"one": torch.tensor(1.0)}, graph)
    program = lower_graph(module, device="cuda", strict=True)
    defines = [s for s in program.statements if isinstance(s, Define)]
    assert [s.buffer.device for s in defines] == ["cuda:0"]
    assert not any(isinstance(e, Load) for s in defines for e in postorder([s.value]))
    made = [s for s in program.statements if isinstance(s, Extern)]
    assert len(made) == 2
