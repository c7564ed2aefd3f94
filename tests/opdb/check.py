"""One sample judged: ours against eager, float64 and, where we differ or fail, aot_eager.

An error is ours only if aot_eager gives none; strides and aliasing may be eager's or aot_eager's.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable

import torch

from ..checking import (
    DEVICE,
    Compiler,
    Mismatch,
    Run,
    backend_callable,
    compare,
    compare_aliasing,
    compare_strides,
    compile_direct,
    execute,
    fresh,
)
from ..rounding import DRAWS, Rounding, decomposed
from .cases import UNSPECIFIED, Case


class Skipped(Exception):
    """The sample says nothing about us: eager or aot_eager fails on it too."""


def check_case(case: Case, compiler: Compiler, training: bool) -> bool:
    """Raise Mismatch if the compiled sample is wrong, Skipped if it cannot be judged.

    The result: whether eager's error in this run alone was enough to judge by.
    """
    alone = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = training and case.differentiable
        eager = _eager(case, training)
        ours = _compiled(case, compiler, training)
        if case.operator.name in UNSPECIFIED:
            _compare_form(ours, eager)
        elif _is_random(case, training):
            _compare_form(ours, eager)
            _check_random(case, compiler, training)
        else:
            reference = _reference(case, training)
            try:
                compare(ours, eager, reference)
            except Mismatch:
                compare(ours, eager, reference, draws=_draws(case, training))
                alone = False
        _compare_layout(case, ours, eager, training)
    return alone


def _inputs(case: Case, training: bool) -> list[torch.Tensor]:
    tensors = fresh(case.tensors)
    return tensors if training else [t.detach() for t in tensors]


def _eager(case: Case, training: bool, seed: int = 0) -> Run:
    try:
        return execute(case.function, _inputs(case, training), training, seed)
    except Exception as error:
        raise Skipped(f"eager: {_line(error)}") from error


def _compiled(case: Case, compiler: Compiler, training: bool) -> Run:
    try:
        return _compile_and_run(case, compiler, training)
    except Exception as error:
        try:
            _compile_and_run(case, backend_callable("aot_eager"), training)
        except Exception as also:
            raise Skipped(f"aot_eager: {_line(also)}") from also
        trace = "".join(traceback.format_exception(error)[-6:])
        raise Mismatch(f"an error that aot_eager does not give: {_line(error)}\n{trace}") from error


def _compile_and_run(case: Case, compiler: Compiler, training: bool, seed: int = 0) -> Run:
    function = compile_direct(case.function, _inputs(case, training), compiler)
    return execute(function, _inputs(case, training), training, seed)


def _reference(case: Case, training: bool) -> Run | None:
    wide = [t if training else t.detach() for t in case.wide()]
    try:
        return execute(case.reference, fresh(wide), training)
    except Exception:
        return None  # the operator has no float64 form: eager is the reference


def _draws(case: Case, training: bool) -> list[Run]:
    """Eager, rounded otherwise: where one element of a 16-bit sum that cancels was lucky, its error says little."""
    found = []
    try:
        function = compile_direct(case.function, _inputs(case, training), decomposed())
        for seed in range(DRAWS):
            with Rounding(1000 * seed):
                found.append(execute(function, _inputs(case, training), training))
    except Exception:
        return []  # the operator does not run so: eager's own error alone counts
    return found


def _is_random(case: Case, training: bool) -> bool:
    torch.manual_seed(0)
    before = _generators()
    case.function(*_inputs(case, training))
    return not all(map(torch.equal, before, _generators()))


def _generators() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if DEVICE == "cuda" else [])]


def _same(left: Run, right: Run) -> bool:
    pairs = zip(left.outputs, right.outputs, strict=True)
    return all(a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Values in which NaN equals itself."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return torch.nan_to_num(tensor) if tensor.is_floating_point() else tensor


def _check_random(case: Case, compiler: Compiler, training: bool) -> None:
    """The seed decides everything: equal seeds equal results; the next call continues the sequence."""
    function = compile_direct(case.function, _inputs(case, training), compiler)

    def call(seed: int) -> Run:
        return execute(function, _inputs(case, training), training, seed)

    first, again = call(3), call(3)
    if not _same(first, again):
        raise Mismatch("the same seed gave two results")
    if all(_same(first, call(seed)) for seed in range(4, 68)) and _varies(lambda seed: _eager(case, training, seed)):
        raise Mismatch("64 other seeds gave the same result")


def _varies(call: Callable[[int], Run]) -> bool:
    first = call(3)
    return sum(not _same(first, call(seed)) for seed in range(4, 12)) >= 6


def _compare_form(ours: Run, eager: Run) -> None:
    for i, (a, b) in enumerate(zip(ours.outputs, eager.outputs, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Mismatch(f"output {i}: {a.dtype}{list(a.shape)}, eager gives {b.dtype}{list(b.shape)}")


def _compare_layout(case: Case, ours: Run, eager: Run, training: bool) -> None:
    try:
        compare_strides(ours, eager)
        compare_aliasing(ours, eager)
    except Mismatch:
        also = _compile_and_run(case, backend_callable("aot_eager"), training)
        compare_strides(ours, eager, also)
        compare_aliasing(ours, eager, also)


def _line(error: BaseException) -> str:
    """The first line of an error, and of a failed build what the C compiler said."""
    lines = str(error).strip().splitlines() or [""]
    said = [line.strip() for line in lines[1:] if "error:" in line][:2]
    return f"{type(error).__name__}: {' | '.join([lines[0][:160], *said])}"
