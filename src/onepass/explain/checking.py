"""The reference interpreter beside a compiled program: the last rung of the debug ladder, and values by their lines.

`observed` makes a program return what its kernels stored; `checked` runs it beside the interpreter on copies of the
arguments and raises at the first kernel whose result differs; `watched` prints what lines of the user's compute.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..errors import KernelMismatch
from ..ir.interpret import run_program
from ..ir.options import LINES, is_among
from ..ir.plan import FusionPlan, Group
from ..ir.poly import Poly
from ..ir.program import Buffer, Define, Program, View
from .text import one_line, short_operation, user_line

FIRST = 4  # elements of a value that are printed
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


def watched(call: Callable[[list[Any]], Any], program: Program, lines: str) -> Callable[[list[Any]], Any]:
    """`call`; before each run the interpreter computes the values of lines of the user's, and they are printed."""
    patterns = [p for part in lines.split(",") if (p := LINES.fullmatch(part.strip()))]
    found = [d for d in program.defines() if any(_is_of(d, p) for p in patterns)]
    views = tuple(View(d.buffer, d.buffer.shape, d.buffer.strides, Poly.ZERO) for d in found)
    if not found:
        return call

    def run(args: list[Any]) -> Any:
        copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        before = torch.get_rng_state()
        for define, value in zip(found, run_program(replace(program, outputs=views), copies), strict=True):
            print(_value_text(define, value), file=sys.stderr)
        torch.set_rng_state(before)  # the program draws the same seeds
        return call(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _is_of(define: Define, lines: re.Match[str]) -> bool:
    place = re.match(r"(.*?):(\d+)", define.origin.line)
    return place is not None and is_among(lines, place[1], int(place[2]))


def _value_text(define: Define, value: torch.Tensor) -> str:
    """A value in a line: where, what, its range, and the first elements."""
    about = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.numel():
        wide = value.double()
        missing = int(wide.isnan().sum())
        low, high = (float(x) for x in torch.aminmax(wide.nan_to_num(0.0) if missing else wide))
        first = ", ".join(f"{x:.6g}" for x in wide.flatten()[:FIRST].tolist())
        about += f" from {low:.6g} to {high:.6g}{f', {missing} NaN' if missing else ''}: {first}"
        about += ", ..." if value.numel() > FIRST else ""
    return one_line(f"{user_line(define.origin.line)}  {short_operation(define.origin.op)} = {about}")


def _compare(buffer: Buffer, operations: str, got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = _TOLERANCE.get(got.dtype, 0.0)
    wrong = ~torch.isclose(got, want.to(got.dtype), rtol=tolerance, atol=tolerance, equal_nan=got.is_floating_point())
    if wrong.any():
        place = tuple(int(k) for k in wrong.nonzero()[0])
        raise KernelMismatch(buffer.name, operations, int(wrong.sum()), got.numel(), place, got[place], want[place])
