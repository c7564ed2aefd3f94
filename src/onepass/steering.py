"""What users write in a program to steer its plan: `fuse`, `no_fuse`, `keep`, `save`, `recompute`.

    with onepass.no_fuse():
        y = torch.softmax(x, -1)
    y = onepass.keep(y)

In eager, and for other compilers, they do nothing. Dynamo runs `annotate` while it traces, so that every operation
inside has the order in its metadata (`ir/orders.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.fx.traceback import annotate

from .ir.orders import BOTH, FORWARD, FUSE, KEEP, NO_FUSE, RECOMPUTE, SAVE, VALUE

F = TypeVar("F", bound=Callable[..., Any])
_numbers = itertools.count()


class Order:
    """A context and a decorator; entered outside of a compiled function it does nothing."""

    def __init__(self, traced: Callable[[], Any]) -> None:
        self._traced = traced

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, function: F) -> F:
        traced = self._traced

        @functools.wraps(function)
        def ordered(*args: Any, **kwargs: Any) -> Any:
            with traced():
                return function(*args, **kwargs)

        return ordered  # type: ignore[return-value]


def fuse(*, backward: bool = True) -> Any:
    """The operations inside share one kernel; in training those of their gradient share one, too, with `backward`.

    A context or a decorator: `with onepass.fuse():`, `@onepass.fuse()`. What cannot be is an `UnmetOrder`.
    """
    if torch.compiler.is_compiling():
        return _inside({FUSE + _new_region(): BOTH if backward else FORWARD})
    return Order(functools.partial(fuse, backward=backward))


def no_fuse() -> Any:
    """Each operation inside has a kernel of its own, in backward too. A context or a decorator."""
    return _inside({NO_FUSE: "onepass.no_fuse"}) if torch.compiler.is_compiling() else Order(no_fuse)


def keep(value: torch.Tensor) -> torch.Tensor:
    """The value itself, which stays a tensor in memory: it is stored once, and its readers read it."""
    return _asked(value, KEEP)


def save(value: torch.Tensor) -> torch.Tensor:
    """The value itself; in training, backward reads it from memory where it needs it."""
    return _asked(value, SAVE)


def recompute(value: torch.Tensor) -> torch.Tensor:
    """The value itself; in training, backward computes it again where it needs it."""
    return _asked(value, RECOMPUTE)


@contextmanager
def _inside(order: dict[str, str]) -> Iterator[None]:
    """What dynamo traces; it cannot leave `annotate` itself for a graph break, but a generator around it."""
    with annotate(order):
        yield


def _asked(value: torch.Tensor, what: str) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        return value
    with annotate({VALUE: what}):
        alias: torch.Tensor = torch.ops.aten.alias.default(value)
    return alias


@torch.compiler.assume_constant_result  # type: ignore[no-untyped-call,untyped-decorator]
def _new_region() -> str:
    """A name for each time that a region is entered while a program is traced."""
    return str(next(_numbers))
