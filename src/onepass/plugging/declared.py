"""What users declare: a kernel or a rewrite, with a reference in torch and tensors to call it with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from ..errors import UnequalReplacement
from ..ir.plan import Decision
from .checks import Function, Metas, difference, metas_of
from .operators import Differentiated

F = TypeVar("F", bound=Function)


class KernelWarning(UserWarning):
    """A kernel or a rewrite that was plugged in is not used, because it computes something else."""


@dataclass(frozen=True, eq=False)
class Plug:
    """What a user plugged in. `function`: a kernel, or what replaces the reference where it is a `pattern`."""

    name: str
    function: Function
    reference: Function
    example: tuple[Tensor, ...]
    pattern: bool = False
    always: bool = False  # a kernel is used, however long it takes
    where: Callable[..., bool] | None = None
    backward: Function | None = None
    sizes: dict[Metas, frozenset[int]] = field(default_factory=dict)  # of the reference's results
    traced: dict[tuple[Metas, str], Any] = field(default_factory=dict)
    verdicts: dict[tuple[Any, ...], Decision] = field(default_factory=dict)
    operators: dict[tuple[bool, ...], Differentiated] = field(default_factory=dict)  # by which inputs are floating

    @property
    def kind(self) -> str:
        return "rewrite" if self.pattern else "kernel"


_plugs: list[Plug] = []
_lock = threading.Lock()


def kernel(
    reference: Function,
    example: Sequence[Tensor],
    *,
    always: bool = False,
    where: Callable[..., bool] | None = None,
    backward: Function | None = None,
) -> Callable[[F], F]:
    """Declare that a function computes what `reference` does, and runs in its place where it is faster.

    `example`: tensors to call it with. `always`: it is used even if it is slower. `where`: is asked with the tensors
    of a place, which have no values. `backward(*inputs, *results, *gradients)` gives the gradient of each input;
    without it the kernel does not run in training.
    """

    def register(function: F) -> F:
        name = getattr(function, "__name__", None) or str(function)
        _add(Plug(name, function, reference, tuple(example), always=always, where=where, backward=backward))
        return function

    return register


def replace_by(
    pattern: Function, replacement: Function, example: Sequence[Tensor], where: Callable[..., bool] | None = None
) -> None:
    """Compute what `pattern` does by `replacement`. They are compared on samples first: `UnequalReplacement`."""
    name = getattr(pattern, "__name__", str(pattern))
    if (found := difference(replacement, pattern, metas_of(example), wide=True)) is not None:
        raise UnequalReplacement(name, found)
    _add(Plug(name, replacement, pattern, tuple(example), pattern=True, where=where))


def declared() -> tuple[Plug, ...]:
    """All that is plugged in."""
    with _lock:
        return tuple(_plugs)


def unplug() -> None:
    """Forget all kernels and rewrites. What is compiled already stays as it is."""
    with _lock:
        _plugs.clear()


def _add(plug: Plug) -> None:
    with _lock:
        _plugs.append(plug)
