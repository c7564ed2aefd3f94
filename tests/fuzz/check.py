"""One program judged, and made smaller where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ..checking import (
    Compiler,
    Mismatch,
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


def check_program(program: Program, compiler: Compiler | None = None) -> None:
    """Raise if the compiled program differs from eager in values, mutation, gradients, strides or aliasing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function, inputs = program.load()
        eager = execute(function, inputs, program.gradients)
        wide, wide_inputs = program.load(wide=True)
        reference = execute(wide, wide_inputs, program.gradients)
        _, example = program.load()
        _, ours_inputs = program.load()
        if program.through_dynamo and compiler is None:
            torch._dynamo.reset()
            run = compiled(function, dynamic=program.dynamic or None)
        else:
            run = compile_direct(function, example, compiler or backend_callable())
        ours = execute(run, ours_inputs, program.gradients)
        floor = coarsest_float(program)
        compare(ours, eager, reference, floor, COARSE.get(floor or torch.float64, 1e-7))
        compare_strides(ours, eager)
        compare_aliasing(ours, eager)


def failure(program: Program, check: Callable[[Program], None] = check_program) -> str | None:
    """What is wrong with the compiled program; None if nothing is, or if eager or aot_eager fails too."""
    try:
        check(program)
    except Mismatch as mismatch:
        return str(mismatch)
    except Exception as error:
        return f"{type(error).__name__}: {error}" if _others_work(program) else None
    return None


def _others_work(program: Program) -> bool:
    """Eager and aot_eager run the program."""
    try:
        check_program(program, backend_callable("aot_eager"))
    except Mismatch:
        return True
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
    from dataclasses import replace

    fewer = [program.without(i) for i in reversed(range(len(program.body)))]
    found = [p for p in fewer if p is not None]
    if len(program.outputs) > 1:
        found += [
            replace(program, outputs=program.outputs[:i] + program.outputs[i + 1 :])
            for i in range(len(program.outputs))
        ]
    return found
