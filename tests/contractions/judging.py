"""Is a program with matrix products right, and is it the kernel it should be?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from tests.checking import DEVICE, compare_tensor, fresh, tensors_of, to_float64
from tests.unbuilt import unbuilt

FREE = {"strict": True, "cache": False}
# On a GPU by the rules alone: what is measured there, and what follows from it, is no matter of these tests.
INTERPRETED = {"tune": "off", **FREE} if DEVICE == "cuda" else {"target": "triton-interpret", **FREE}
without_gpu = pytest.mark.skipif(DEVICE != "cpu", reason="torch has no such product on a GPU, or no GPU is asked")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul")


def interpreted(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """The function as the kernels of a GPU compute it, run in an interpreter; on a GPU itself where tests use one."""
    compiled: Callable[..., Any] = torch.compile(function, backend="onepass", options=INTERPRETED, **settings)
    return compiled


def judge(run: Callable[..., Any], function: Callable[..., Any], *arguments: Tensor, absolute: float = 0.0) -> None:
    """Raise where a run of the function differs from float64 by more than twice eager's own largest error.

    Sums of products cancel: an element of eager that happens to be exact says nothing about the next.
    """
    ours, eager = (tensors_of(f(*fresh(arguments))) for f in (run, function))
    reference = tensors_of(function(*map(to_float64, arguments)))
    assert len(ours) == len(eager)
    for k, (mine, theirs, exact) in enumerate(zip(ours, eager, reference, strict=True)):
        errors = (theirs.detach().double() - exact.detach().double()).abs().nan_to_num(0, 0, 0)
        largest = float(errors.max()) if errors.numel() else 0.0
        compare_tensor(f"output {k}", mine, theirs, exact, absolute=max(absolute, 2 * largest))


def explained(
    function: Callable[..., Any], *arguments: Tensor, target: str = "sm_90", built: bool = False
) -> onepass.Explanation:
    """The program's kernels for a chip, as inference; built where registers and spills are asked for."""
    with torch.no_grad(), nullcontext() if built else unbuilt():
        return onepass.explain(function, *arguments, target=target, options=FREE)


def make_library_slow(patch: pytest.MonkeyPatch) -> None:
    """Kernels of ours wherever there can be one: the library's products and attention take a second each."""
    for name in ("chooser.product_us", "library_attention.attention_us"):
        patch.setattr(f"onepass.planner.{name}", lambda *_: 1e6)


def products_left(explanation: onepass.Explanation) -> list[str]:
    """Matrix products that the library computes."""
    return [e.op for e in explanation.externs if set(e.op.split(".")) & set(PRODUCTS)]
