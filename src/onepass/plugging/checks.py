"""Whether a user's function computes what its reference does, forward and backward, and how long a call takes.

Both run on random samples like the tensors of a place; a reference in float64 says how exact eager is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Function: TypeAlias = Callable[..., Any]
Meta: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # shape, strides, ...
Metas: TypeAlias = tuple[Meta, ...]

SAMPLES = (1.0, 8.0, 1e-2)  # the standard deviations of three
MOST_ELEMENTS = 2**25  # of tensors that samples are made of
RUNS, RUN_SECONDS = 5, 0.02
# What a kernel may differ from its reference in float64, beyond twice what eager does: of the value itself and of a
# part of the largest one, which is larger for gradients: they are sums of many terms.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
LEAST, LEAST_GRADIENT = 1e-2, 0.1
SAME = 1e-5  # in float64: a reference may itself convert to float32


class Unlike(Exception):
    """A user's function differs from its reference; the text says how."""


def metas_of(tensors: Sequence[Tensor]) -> Metas:
    """What tensors are like."""
    return tuple((tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in tensors)


def elements(metas: Metas) -> int:
    """Of all tensors together."""
    return sum(torch.Size(shape).numel() for shape, *_ in metas)


def empty(meta: Meta, place: str = "") -> Tensor:
    """A tensor like these; `place`: on another device."""
    shape, strides, dtype, device = meta
    return torch.empty_strided(shape, strides, dtype=dtype, device=place or device)


def listed(results: Any) -> tuple[Any, ...]:
    """The results of a function that returns one or several."""
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def sample(metas: Metas, scale: float) -> list[Tensor]:
    """Random tensors like these, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    return [_drawn(meta, scale, generator) for meta in metas]


def _drawn(meta: Meta, scale: float, generator: torch.Generator) -> Tensor:
    shape, _, dtype, device = meta
    if dtype.is_floating_point:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    else:
        values = torch.randint(0, 2 if dtype is torch.bool else 8, shape, generator=generator)
    present = device.type != "meta" and (device.type != "cuda" or torch.cuda.is_available())
    return empty(meta, "" if present else "cpu").copy_(values)


def difference(
    function: Function,
    reference: Function,
    metas: Metas,
    *,
    wide: bool = False,
    gradients: bool = False,
    samples: Sequence[float] = SAMPLES,
) -> str | None:
    """The first sample on which a function is not what its reference is; None where it is on all.

    `wide`: both run in float64. `gradients`: those of the inputs are compared, too.
    """
    shown = ", ".join(f"{str(d).removeprefix('torch.')}{[*s]}" for s, _, d, _ in metas)
    for number, scale in enumerate(samples, 1):
        values = sample(metas, scale)
        with torch.set_grad_enabled(gradients):
            try:
                _compare(function, reference, values, wide, gradients)
            except Unlike as unlike:
                return f"{unlike} (sample {number}: {shown}; standard deviation {scale:g})"
            except Exception as error:
                return f"{type(error).__name__} on sample {number} ({shown}): {error}"
    return None


def _compare(function: Function, reference: Function, values: list[Tensor], wide: bool, gradients: bool) -> None:
    """Raise where two functions differ on these values."""
    doubles = [v.double() if v.is_floating_point() else v for v in values]
    exact, *steps = _run(reference, doubles, gradients)
    eager, *eager_steps = (exact, *steps) if wide else _run(reference, values, gradients)
    given = [v.clone() for v in (doubles if wide else values)]
    made, *made_steps = _run(function, given, gradients)
    if len(made) != len(eager):
        raise Unlike(f"it gives {len(made)} results where its reference gives {len(eager)}")
    for m, e in zip(made, eager, strict=True):
        if not isinstance(m, Tensor) or m.shape != e.shape or m.dtype != e.dtype:
            what = f"{m.dtype}{[*m.shape]}" if isinstance(m, Tensor) else type(m).__name__
            raise Unlike(f"it gives {what} where its reference gives {e.dtype}{[*e.shape]}")
    if not wide and not all(torch.equal(a, b) for a, b in zip(given, values, strict=True)):
        raise Unlike("it changes its arguments")
    for m, e, x in zip(made, eager, exact, strict=True):
        tolerance = SAME if wide else TOLERANCE.get(m.dtype, 0.0)
        _require("", "", m, x, _wrong(m, e, x, tolerance, LEAST))
    for k, (m, e, x) in enumerate(zip(*made_steps, *eager_steps, *steps, strict=True)):
        if m.shape != x.shape:
            raise Unlike(f"its gradient of argument {k} is {[*m.shape]}, that of its reference {[*x.shape]}")
        tolerance = SAME if wide else TOLERANCE.get(m.dtype, 0.0)
        _require(f"its gradient of argument {k} ", " the gradient", m, x, _wrong(m, e, x, tolerance, LEAST_GRADIENT))


def _require(what: str, of: str, made: Tensor, exact: Tensor, wrong: Tensor) -> None:
    if not wrong.any():
        return
    place = tuple(int(k) for k in wrong.nonzero()[0])
    numbers = made[place].item(), exact[place].item()
    if what:
        raise Unlike(f"at {[*place]} {what}is {numbers[0]:.6g}, by its reference {numbers[1]:.6g}")
    raise Unlike(f"at {[*place]} it gives {numbers[0]:.6g}, its reference {numbers[1]:.6g}")


def _run(function: Function, values: Sequence[Tensor], gradients: bool) -> Iterator[tuple[Tensor, ...]]:
    """The results of a function and, if asked for, the gradients of its inputs; None gives zeros."""
    if not gradients:
        yield listed(function(*values))
        return
    leaves = [v.detach().requires_grad_(v.is_floating_point()) for v in values]
    results = listed(function(*leaves))
    yield tuple(r.detach() if isinstance(r, Tensor) else r for r in results)
    roots = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    steps = [_drawn((tuple(r.shape), tuple(r.stride()), r.dtype, r.device), 1.0, generator) for r in roots]
    given = [s.clone() for s in steps]
    found = torch.autograd.grad(roots, wanted, given, allow_unused=True) if roots else [None] * len(wanted)
    if not all(map(torch.equal, given, steps)):
        raise Unlike("its backward changes the gradients that it is given")
    yield tuple(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True))


def _wrong(made: Tensor, eager: Tensor, exact: Tensor, tolerance: float, least: float) -> Tensor:
    """Where a result is farther from the exact one than rounding explains."""
    if not made.is_floating_point():
        return made != eager
    exact, close = exact.double(), (eager.double() - exact.double()).abs()
    finite = exact.isfinite()
    largest = exact[finite].abs().max() if finite.any() else exact.new_zeros(())
    far = (made.double() - exact).abs() > 2 * close + tolerance * (exact.abs() + least * largest)
    odd = ~finite & ~((made.double() == exact) | (made.isnan() & exact.isnan()))
    return torch.where(finite & eager.isfinite(), far | made.isnan(), odd & ~finite)


def time_us(call: Callable[[], object]) -> float:
    """The least time of a call."""
    device = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    call()
    best, repeats = float("inf"), 1
    for _ in range(RUNS):
        device()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        device()
        taken = time.perf_counter() - start
        best = min(best, taken / repeats)
        repeats = max(1, min(1000, int(RUN_SECONDS / max(best, 1e-7))))
    return best * 1e6
