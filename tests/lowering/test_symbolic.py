"""Symbolic sizes: one program for many shapes, and no guard added by lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.ir.interpret import run_program
from onepass.ir.verify import verify_program
from onepass.lowering import lower_graph

from .tracing import TABLE

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: torch.softmax(x * 2, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "variance": lambda x: torch.var_mean(x, 0),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "chunk": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "slices": lambda x: x[1:] - x[:-1],
    "cat": lambda x: torch.cat([x, x.flip(0), x[:1]]),
    "pad": lambda x: F.pad(x, (1, 2, 1, 0)),
    "roll": lambda x: x.roll(1, 0),
    "flatten": lambda x: x.t().reshape(-1).reshape(8, -1).sum(1),
    "causal": lambda x: (x @ x.t()).tril().softmax(-1),
    "sizes": lambda x: x * x.shape[0] + x.numel() / 3,
    "argmax": lambda x: x.argmax(),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0]) % 8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program_for_ten_sizes(name: str) -> None:
    function = FUNCTIONS[name]
    graph = make_fx(function, tracing_mode="symbolic", decomposition_table=TABLE)(torch.randn(5, 8))
    shape_env = next(n.meta["val"].fake_mode.shape_env for n in graph.graph.nodes if n.op == "placeholder")
    guards = len(shape_env.guards)
    program = lower_graph(graph, strict=True)
    verify_program(program)
    assert len(shape_env.guards) == guards
    for rows in (2, 3, 4, 5, 7, 16, 31, 64, 100, 129):
        x = torch.randn(rows, 8)
        result, expected = run_program(program, [x]), function(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        torch.testing.assert_close(tuple(result), expected, check_stride=True)


def test_only_library_calls_are_extern() -> None:
    for name, function in FUNCTIONS.items():
        graph = make_fx(function, tracing_mode="symbolic", decomposition_table=TABLE)(torch.randn(5, 8))
        whys = {e.why for e in lower_graph(graph, strict=True).externs()}
        assert whys <= {"a matmul goes to the library, what is around it is fused"}, name


def test_integer_argument_of_any_sign() -> None:
    function = lambda x, n: x.roll(n, 0) + n  # noqa: E731
    traced: list[Any] = []

    def capture(graph: Any, inputs: Any) -> Any:
        program = lower_graph(graph, strict=True)
        verify_program(program)
        traced.append(program)
        return lambda *args: run_program(program, args)

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=capture, decompositions=TABLE), dynamic=True)
    x = torch.randn(5, 3)
    for number in (2, 3, -2, 7):
        torch.testing.assert_close(compiled(x, number), function(x, number))
    assert not any(program.externs() for program in traced)
