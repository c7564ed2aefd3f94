"""The fuzzer can fail: a wrong backend is caught and the program shrunk to the statement at fault."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from tests.checking import Compiler, Mismatch, backend_callable
from tests.fuzz.check import check_program, failure, shrink
from tests.fuzz.generate import generate
from tests.fuzz.program import Program, Statement
from tests.rounding import Rounding


def miscompiles(wrong: torch._ops.OpOverload, right: torch._ops.OpOverload) -> Compiler:
    """aot_eager, but one operation is taken for another."""

    def swap(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if node.target is right:
                node.target = wrong
        module.recompile()
        return module

    backend: Compiler = aot_autograd(fw_compiler=swap)
    return backend


def test_right_backend_passes() -> None:
    for seed in range(15):
        check_program(generate(seed), backend_callable("aot_eager"))


@pytest.mark.rotating
def test_a_wrong_operation_is_found_and_shrunk() -> None:
    broken = miscompiles(torch.ops.aten.sin.default, torch.ops.aten.tanh.default)
    candidates = (p for p in map(generate, range(400)) if "torch.tanh(" in p.source())
    found = next(p for p in candidates if failure(p, broken))
    small, message = shrink(found, broken)
    assert "elements differ" in message
    assert "tanh" in small.source() and len(small.body) <= 3
    compile(small.repro(message), "repro", "exec")


def test_a_program_that_tracing_breaks_must_still_do_what_tracing_gives() -> None:
    setup = (Statement("x0", "values(1, (2, 7), f32)"), Statement("x1", "values(2, (4,), f32)"))
    body = (
        Statement("v0", "x0.unsqueeze(0).expand(3, *x0.shape)"),
        Statement("", "v0.fill_(0.75)"),  # functionalised into x0 plus the changes of all three copies
        Statement("v1", "torch.tanh(x1)"),
    )
    program = Program(0, setup, body, ("v0", "v1"), gradients=False)
    with pytest.raises(Mismatch):
        check_program(program, "aot_eager")
    assert failure(program, "aot_eager") is None
    message = failure(program, miscompiles(torch.ops.aten.sin.default, torch.ops.aten.tanh.default))
    assert message is not None and "aot_eager is wrong too" in message


def test_rounding_moves_what_is_inexact_and_nothing_else() -> None:
    x = torch.tensor([0.5, 0.75, -1.25])
    plain = (x * 2 - x, x.relu(), x.view(3, 1), torch.exp(x))
    with Rounding(0):
        moved = (x * 2 - x, x.relu(), x.view(3, 1), torch.exp(x))
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], moved[:3], strict=True))
    assert not torch.equal(plain[3], moved[3])
    torch.testing.assert_close(plain[3], moved[3], rtol=2.5e-7, atol=0)


def test_the_last_bit_is_forgiven_where_the_program_magnifies_it_and_no_more() -> None:
    """A norm of two nearly equal numbers: eager's own error, rounded otherwise, is the measure."""
    setup = (Statement("x0", "(values(1678, (300, 2), f32)).detach().requires_grad_()"),)
    body = (Statement("v0", "torch.exp(x0)"), Statement("v1", "F.layer_norm(v0, (2,))"))
    program = Program(0, setup, body, ("v1",), gradients=True)

    def off_by(relative: float) -> Compiler:
        def change(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            for node in list(module.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)):
                with module.graph.inserting_after(node):
                    new = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.0 + relative))
                    new.meta = node.meta
                node.replace_all_uses_with(new, lambda user, new=new: user is not new)  # type: ignore[misc]
            module.recompile()
            return module

        backend: Compiler = aot_autograd(fw_compiler=change)
        return backend

    assert failure(program, off_by(0.0)) is None
    assert failure(program, off_by(1e-3)) is not None


def test_repro_runs(tmp_path: Path) -> None:
    program = generate(3)
    text = program.repro("nothing is wrong").replace('backend="onepass"', 'backend="eager"')
    path = tmp_path / "repro.py"
    path.write_text(text.replace("import onepass\n", ""))
    runpy.run_path(str(path), run_name="__main__")
