"""One program judged, and made smaller where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from ..checking import (
    BACKEND,
    Compiler,
    Mismatch,
    Run,
    backend_callable,
    compare,
    compare_aliasing,
    compare_strides,
    compile_direct,
    compiled,
    execute,
)
from .generate import coarsest_float
from .program import Program

# What a rounding of the coarsest type inside may do to a result of ordinary size.
COARSE = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-5}


def check_program(program: Program, backend: str | Compiler = BACKEND) -> None:
    """Raise if the compiled program differs from eager in values, mutation, gradients, strides or aliasing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function, inputs = program.load()
        eager = execute(function, inputs, program.gradients)
        wide, wide_inputs = program.load(wide=True)
        reference = execute(wide, wide_inputs, program.gradients)
        ours = _run(program, backend)
        floor = coarsest_float(program)
        compare(ours, eager, reference, floor, COARSE.get(floor or torch.float64, 1e-7))
        compare_strides(ours, eager)
        compare_aliasing(ours, eager)


def _run(program: Program, backend: str | Compiler) -> Run:
    function, example = program.load()
    _, inputs = program.load()
    if not isinstance(backend, str):
        run = compile_direct(function, example, backend)
    elif program.through_dynamo:
        torch._dynamo.reset()
        run = compiled(function, backend, dynamic=program.dynamic or None)
    else:
        run = compile_direct(function, example, backend_callable(backend))
    return execute(run, inputs, program.gradients)


def failure(program: Program, check: Callable[[Program], None] = check_program) -> str | None:
    """What is wrong with the compiled program; None if nothing is, or if aot_eager is wrong as well.

    Tracing itself loses some things: layouts, writes through expanded views, copies between scalars.
    """
    try:
        check(program)
    except Exception as error:
        text = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
        return text if _aot_eager_is_right(program) else None
    return None


def _aot_eager_is_right(program: Program) -> bool:
    try:
        check_program(program, "aot_eager")
    except Exception:
        return False
    return True


def shrink(program: Program, check: Callable[[Program], None] = check_program) -> tuple[Program, str]:
    """The smallest program found by dropping statements and outputs that still fails, with its message."""
    message = failure(program, check) or "it does not fail a second time"
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(program):
            found = failure(candidate, check)
            if found:
                program, message, smaller = candidate, found, True
                break
    return program, message


def _candidates(program: Program) -> list[Program]:
    fewer = [program.without(i) for i in reversed(range(len(program.body)))]
    found = [p for p in fewer if p is not None]
    if len(program.outputs) > 1:
        found += [
            replace(program, outputs=program.outputs[:i] + program.outputs[i + 1 :])
            for i in range(len(program.outputs))
        ]
    return found
