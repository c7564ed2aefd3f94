"""Runs a function through AOTAutograd with our table, lowering and the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition

from onepass.ir.interpret import run_program
from onepass.ir.program import Program
from onepass.ir.verify import verify_program
from onepass.lowering import decomposition_table, lower_graph, reset_streams

TABLE = decomposition_table()


class Traced:
    """A function compiled to programs; `programs` holds what was lowered, forward first."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        dynamic: bool = False,
        precision: str = "fused",
        strict: bool = True,
        wide_products: bool = False,
    ) -> None:
        self.programs: list[Program] = []
        self.precision, self.strict, self.wide_products = precision, strict, wide_products
        self.run = aot_function(
            function,
            fw_compiler=self.compile,
            bw_compiler=self.compile,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=TABLE,
            keep_inference_input_mutations=True,
            dynamic=dynamic,
        )

    def compile(self, graph_module: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        program = lower_graph(
            graph_module, precision=self.precision, strict=self.strict, wide_products=self.wide_products
        )
        verify_program(program)
        self.programs.append(program)
        return lambda *args: run_program(program, args)

    def __call__(self, *args: Any) -> Any:
        reset_streams()
        return self.run(*args)

    @property
    def program(self) -> Program:
        return self.programs[0]
