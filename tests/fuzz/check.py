"""One program judged, and made smaller where it fails."""

from __future__ import annotations

import warnings
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
from ..rounding import DRAWS, Rounding
from .generate import coarsest_float
from .program import Program, with_other_sizes

# What a rounding of the coarsest type inside may do to a result of ordinary size.
COARSE = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-5}


def check_program(program: Program, backend: str | Compiler = BACKEND, model: str = "eager") -> None:
    """Raise if the compiled program differs from the model in values, mutation, gradients, strides or aliasing."""
    floor = coarsest_float(program)
    absolute = COARSE.get(floor or torch.float64, 1e-7)
    if not isinstance(backend, str):  # without dynamo there is one compilation, for one size
        program = replace(program, resized=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = (_runs(program, model), _runs(program, model, wide=True), _runs(program, backend))
        for number, (expected, reference, ours) in enumerate(zip(*runs, strict=True)):
            try:
                compare(ours, expected, reference, floor, absolute)
            except Mismatch:
                compare(ours, expected, reference, floor, absolute, _draws(program, number))
            compare_strides(ours, expected)
            compare_aliasing(ours, expected)


def _draws(program: Program, number: int) -> list[Run]:
    """Eager, rounded otherwise."""
    found = []
    for seed in range(DRAWS):
        with Rounding(1000 * seed):
            found.append(_runs(program, "eager")[number])
    return found


def _runs(program: Program, backend: str | Compiler, wide: bool = False) -> list[Run]:
    """What the program does; after it, what it does with inputs of another size."""
    function, example = program.load(wide)
    _, inputs = program.load(wide)
    if backend == "eager":
        run = function
    elif not isinstance(backend, str):
        run = compile_direct(function, example, backend)
    elif program.through_dynamo:
        torch._dynamo.reset()
        run = compiled(function, backend, dynamic=program.dynamic or None)
    else:
        run = compile_direct(function, example, backend_callable(backend))
    sizes = [inputs, with_other_sizes(example)] if program.resized else [inputs]
    return [execute(run, x, program.gradients, skipped=program.skipped_positions()) for x in sizes]


def failure(program: Program, backend: str | Compiler = BACKEND) -> str | None:
    """What is wrong with the compiled program; None if nothing is, or if it does all that aot_eager does.

    Tracing itself loses some things: layouts, writes through expanded views, copies between scalars.
    Where it does, aot_eager is wrong too, and what it does takes eager's place.
    """
    wrong = _difference(program, backend, "eager")
    if isinstance(wrong, torch.AcceleratorError):  # nothing runs after it: everything would be wrong alike
        raise AssertionError(program.repro(_text(wrong))) from wrong
    if wrong is None:
        return None
    traced = _difference(program, "aot_eager", "eager")
    if traced is None:
        return _text(wrong)
    if isinstance(traced, Mismatch):
        same = _difference(program, backend, "aot_eager") is None
    else:
        same = _text(wrong) == _text(traced)
    return None if same else f"{_text(wrong)}; aot_eager is wrong too, but otherwise"


def _difference(program: Program, backend: str | Compiler, model: str) -> Exception | None:
    try:
        check_program(program, backend, model)
    except Exception as error:
        return error
    return None


def _text(error: Exception) -> str:
    error = getattr(error, "inner_exception", error)  # dynamo wraps it, with the backend's name
    return str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"


def shrink(program: Program, backend: str | Compiler = BACKEND) -> tuple[Program, str]:
    """The smallest program found by dropping statements and outputs that still fails, with its message."""
    message = failure(program, backend) or "it does not fail a second time"
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(program):
            found = failure(candidate, backend)
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
