"""What compiling costs as a model gets deeper: `python -m benchmarks.planning --layers 4 16 32`.

Takes Llama of `transformers`, with tensors that have no memory, planned for a chip that need not be there. Prints, for
every depth and direction, the seconds of each stage before building, and the kernels and how many of them differ.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from onepass.autograd.partition import partition
from onepass.ir.options import Options
from onepass.ir.record import CompileRecord
from onepass.ir.target import find_target
from onepass.lowering.decompositions import decomposition_table
from onepass.pipeline import compile_entry, lower, plan_graph

STAGES = ("lower", "plan", "schedule", "emit")


def llama_graphs(layers: int) -> list[tuple[str, GraphModule]]:
    """Forward and backward of the loss of a Llama, as (direction, graph)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=32000, attn_implementation="sdpa", use_cache=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = LlamaForCausalLM._from_config(config)
        tokens = torch.zeros(8, 1024, dtype=torch.int64)
        return graphs_of(lambda t: model(input_ids=t, labels=t).loss, tokens)


def graphs_of(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[tuple[str, GraphModule]]:
    """The graphs that the compiler is given for a function with one result and for its backward."""
    found: list[tuple[str, GraphModule]] = []

    def compiler(direction: str) -> Callable[[GraphModule, Sequence[Any]], Any]:
        def keep(graph: GraphModule, _inputs: Sequence[Any]) -> Any:
            found.append((direction, graph))
            return make_boxed_func(graph.forward)

        return keep

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=partition,
        decompositions=decomposition_table(),
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args).backward()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--target", default="sm_90")
    arguments = parser.parse_args()
    print("layers direction " + " ".join(f"{s:>8}" for s in STAGES) + "  kernels distinct externs decisions")
    for layers in arguments.layers:
        for direction, graph in llama_graphs(layers):
            gc.collect()
            record = CompileRecord(direction=direction)
            planned = plan_graph(lower(graph, find_target(arguments.target), Options.make({}), record), record)
            entry, _ = compile_entry(planned, record, {})
            seconds = " ".join(f"{record.stage_seconds[s]:8.2f}" for s in STAGES)
            counts = f"{len(record.kernels):8} {len(entry.kernels):8} {len(record.externs):7} {len(record.decisions):9}"
            print(f"{layers:6} {direction:9} {seconds} {counts}", flush=True)


if __name__ == "__main__":
    main()
