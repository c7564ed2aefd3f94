"""What a workload is, how it is run, and how its values are checked.

A workload is a plain function and its arguments; `train` adds the backward of a fixed output gradient.
The same type serves every device: arguments are built where they are to be measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
_COPIES = 12  # of the arguments in float64 that eager may hold at once, backward and check included


@dataclass(frozen=True, slots=True)
class Sample:
    """The part of a workload that a wide type has memory for: a smaller call, and the same part of an output."""

    arguments: Callable[[Arguments], Arguments]
    output: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """`build(scale)` gives the arguments; `scale` is 1 for the real sizes and below for quick runs.

    `operations` is the fewest arithmetic operations per element of the first argument (a transcendental function
    counts as one), or a function that counts those of a call. `jax` and `hand` name functions of jax_functions.py and
    hand.py; `libraries` has, per system, what makes a function of the arguments.
    """

    name: str
    function: Callable[..., Any]
    build: Callable[[float], Arguments]
    operations: float | Callable[[Arguments], float]
    train: bool = False
    random: bool = False  # the values differ from eager's: checked by their distribution
    jax: str = ""
    hand: str = ""
    sample: Sample | None = None
    libraries: Mapping[str, Callable[[Arguments], Callable[..., Any]]] = field(default_factory=dict, hash=False)


class Prepared:
    """A workload with its arguments on a device: `call(f)` runs f as the workload is meant to be run."""

    def __init__(self, workload: Workload, scale: float, device: str = "cpu", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.workload = workload
        with torch.device(device):
            self.arguments = workload.build(scale)
        self.wanted: list[Tensor] = []
        self.gradient: Tensor | None = None
        if workload.train:
            self.wanted = [a.requires_grad_() for a in self.arguments if is_float(a)]
            with torch.no_grad():
                self.gradient = torch.randn_like(workload.function(*self.arguments))

    def call(self, function: Callable[..., Any]) -> tuple[Tensor, ...]:
        output = function(*self.arguments)
        if not self.workload.train:
            return output if isinstance(output, tuple) else (output,)
        return output.detach(), *torch.autograd.grad(output, self.wanted, self.gradient)

    def reference_type(self) -> torch.dtype:
        """float64, or float32 where the device has too little memory for it."""
        first = next((a for a in self.arguments if isinstance(a, Tensor)), None)
        if first is None or not first.is_cuda:
            return torch.float64
        needed = _COPIES * 8 * sum(a.numel() for a in self.checked_arguments() if is_float(a))
        return torch.float64 if needed < torch.cuda.mem_get_info()[0] else torch.float32

    def checked_arguments(self) -> Arguments:
        """Those of the call whose values are computed in a wide type."""
        sample = self.workload.sample
        return self.arguments if sample is None else sample.arguments(self.arguments)

    def reference(self) -> tuple[Tensor, ...]:
        """The same, or the sample of it, in a wide type, by eager; nothing for random workloads."""
        if self.workload.random:
            return ()
        dtype = self.reference_type()
        wide = Prepared.__new__(Prepared)
        wide.workload = self.workload
        wide.arguments = tuple(a.detach().to(dtype) if is_float(a) else a for a in self.checked_arguments())
        wide.wanted = [a.requires_grad_() for a in wide.arguments if is_float(a)] if self.workload.train else []
        wide.gradient = None if self.gradient is None else self.gradient.to(dtype)
        return wide.call(self.workload.function)

    def minimum_bytes(self, outputs: tuple[Tensor, ...]) -> int:
        """Each input read and each output written once; backward reads the inputs again."""
        inputs = _bytes(self.arguments)
        if self.gradient is None:
            return inputs + _bytes(outputs)
        return 2 * inputs + _bytes((self.gradient,)) + _bytes(outputs)

    def minimum_flops(self) -> float:
        operations, first = self.workload.operations, self.arguments[0]
        return operations(self.arguments) if callable(operations) else operations * float(first.numel())


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _bytes(values: tuple[Any, ...]) -> int:
    return sum(v.nbytes for v in values if isinstance(v, Tensor))


def check_values(
    prepared: Prepared,
    ours: tuple[Tensor, ...],
    eager: tuple[Tensor, ...],
    reference: tuple[Tensor, ...],
    same_layout: bool = True,
) -> str:
    """Empty if right, else what is wrong: at most twice eager's error plus the dtype's tolerance."""
    if len(ours) != len(eager):
        return f"{len(ours)} outputs, eager {len(eager)}"
    for number, (got, expected) in enumerate(zip(ours, eager, strict=True)):
        placed = _layout(got) == _layout(expected) or not same_layout
        if got.shape != expected.shape or got.dtype != expected.dtype or not placed:
            shown, wanted = (f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in (got, expected))
            return f"output {number}: {shown}, eager {wanted}"
    if prepared.workload.random:
        return _check_distribution(ours, eager)
    if prepared.workload.sample is not None:
        return _check_sample(prepared.workload.sample, ours, eager, reference)
    for number, (got, expected, exact) in enumerate(zip(ours, eager, reference, strict=True)):
        if problem := value_problem(got, expected, exact, TOLERANCE.get(got.dtype, 1e-5)):
            return f"output {number}: {problem}"
    return ""


def value_problem(got: Tensor, expected: Tensor, exact: Tensor, tolerance: float, least_scale: float = 1e-30) -> str:
    """Empty if right, else what is wrong. The tolerance is a part of the largest value, or of `least_scale`."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)}, eager {expected.dtype} {tuple(expected.shape)}"
    scale = max(exact.abs().max().item(), least_scale)
    error, allowed = _error(got, exact), 2 * _error(expected, exact) + tolerance * scale
    return "" if error <= allowed else f"error {error:.3g}, allowed {allowed:.3g}"


def _layout(value: Tensor) -> list[int]:
    """Strides of the dimensions that have any."""
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]


def _error(value: Tensor, exact: Tensor) -> float:
    error: float = (value.to(exact.dtype) - exact).abs().max().item()
    return error


def _check_sample(
    sample: Sample, ours: tuple[Tensor, ...], eager: tuple[Tensor, ...], reference: tuple[Tensor, ...]
) -> str:
    """The sample against the wide type, then every value against eager; each row by its own scale.

    Rows differ in scale: the first of causal attention are values, the last are means of thousands.
    """
    for number, (got, expected, exact) in enumerate(zip(ours, eager, reference, strict=True)):
        tolerance = TOLERANCE.get(got.dtype, 1e-5) if is_float(got) else 1.0
        allowed = 2 * _row_error(sample.output(expected), exact) + tolerance
        error = _row_error(sample.output(got), exact)
        if not error <= allowed:
            return f"output {number}: error {error:.3g} of a row's largest value, allowed {allowed:.3g}"
        apart, allowed = _row_error(got, expected), 1.5 * allowed  # eager's own error on top
        if not apart <= allowed:
            return f"output {number}: {apart:.3g} of a row's largest value from eager, allowed {allowed:.3g}"
    return ""


def _row_error(value: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest value of its row; integers: in steps.

    A row of almost nothing counts as a thousandth of the largest: the gradient of the first query of causal attention,
    which has one key, is zero.
    """
    wide = torch.float64 if exact.dtype is torch.float64 else torch.float32
    error = (value.to(wide) - exact.to(wide)).abs().amax(-1)
    if is_float(value):
        largest = exact.abs().amax(-1).to(wide)
        error = error / largest.clamp_min(max(1e-3 * largest.max().item(), 1e-30))
    return float(error.max().item())


def _check_distribution(ours: tuple[Tensor, ...], eager: tuple[Tensor, ...]) -> str:
    """Zeros, mean, deviation and agreement where both kept the value must be those of eager."""
    got, expected = ours[0].double().flatten(), eager[0].double().flatten()
    slack = 6 / math.sqrt(got.numel())
    zeros = ((got == 0).double().mean() - (expected == 0).double().mean()).abs().item()
    mean = (got.mean() - expected.mean()).abs().item()
    deviation = (got.std() - expected.std()).abs().item()
    correlation = torch.corrcoef(torch.stack([got, expected]))[0, 1].item()
    if max(zeros, mean, deviation) > 2 * slack or not 0.5 < correlation < 0.9999:
        return f"zeros {zeros:.2g}, mean {mean:.2g}, deviation {deviation:.2g} off; correlation {correlation:.3f}"
    return ""
