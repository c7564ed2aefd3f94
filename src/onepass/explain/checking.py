"""The last rung of the debug ladder: every stored buffer compared with the reference interpreter.

`observed` makes a program return what its kernels stored; `checked` runs it beside the interpreter on
copies of the arguments and raises at the first kernel whose result differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..errors import KernelMismatch
from ..ir.interpret import run_program
from ..ir.plan import FusionPlan, Group
from ..ir.poly import Poly
from ..ir.program import Buffer, Program, View

_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 2e-4, torch.float64: 1e-9}


def observed(program: Program, plan: FusionPlan) -> Program:
    """The program with every stored buffer among its outputs, after its own."""
    whole = (View(b, b.shape, b.strides, Poly.ZERO) for b in stored(plan))
    return replace(program, outputs=(*program.outputs, *whole))


def stored(plan: FusionPlan) -> dict[Buffer, str]:
    """The buffers that kernels store, in order, each with the operations of its kernel."""
    groups = [step for step in plan.steps if isinstance(step, Group)]
    return {s.buffer: ", ".join(dict.fromkeys(m.origin.op for m in g.members)) for g in groups for s in g.stores}


def checked(call: Callable[[list[Any]], Any], program: Program, plan: FusionPlan) -> Callable[[list[Any]], Any]:
    """`call` (of the observed program), checked at every run; returns the program's own outputs."""
    names = stored(plan)

    def run(args: list[Any]) -> Any:
        copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        before = torch.get_rng_state()
        results = call(args)
        after = torch.get_rng_state()
        torch.set_rng_state(before)  # the reference draws the same seeds
        expected = run_program(observed(program, plan), copies)
        torch.set_rng_state(after)
        own = len(program.outputs)
        for (buffer, operations), got, want in zip(names.items(), results[own:], expected[own:], strict=True):
            _compare(buffer, operations, got, want)
        return results[:own]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _compare(buffer: Buffer, operations: str, got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = _TOLERANCE.get(got.dtype, 0.0)
    wrong = ~torch.isclose(got, want.to(got.dtype), rtol=tolerance, atol=tolerance, equal_nan=got.is_floating_point())
    if wrong.any():
        place = tuple(int(k) for k in wrong.nonzero()[0])
        raise KernelMismatch(buffer.name, operations, int(wrong.sum()), got.numel(), place, got[place], want[place])
