"""Planning without running: for tensors that have no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PLANNING: ContextVar[bool] = ContextVar("onepass_planning", default=False)


@contextmanager
def planning(wanted: bool) -> Iterator[None]:
    """Graphs compiled here are planned and built, but run operation by operation, if that is wanted."""
    token = _PLANNING.set(wanted or is_planning())
    try:
        yield
    finally:
        _PLANNING.reset(token)


def is_planning() -> bool:
    return _PLANNING.get()
