"""What can be reached from some things, step by step: values, operations, nodes of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def reached(start: Iterable[T], following: Callable[[T], Iterable[T]], most: int | None = None) -> dict[T, None]:
    """The start and all that follows, each once. `most`: when more were found, nothing else is looked at."""
    found = dict.fromkeys(start)
    stack = list(found)
    while stack and (most is None or len(found) <= most):
        fresh = dict.fromkeys(x for x in following(stack.pop()) if x not in found)
        found |= fresh
        stack += fresh
    return found


def in_order(start: Iterable[T], needed: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """The start and all that it needs, each after what it needs itself; iterative, so depth is no limit."""
    done: dict[T, None] = {}
    stack = [(x, False) for x in start]
    while stack:
        x, ready = stack.pop()
        if ready:
            done[x] = None
        elif x not in done:
            stack.append((x, True))
            stack.extend((y, False) for y in needed(x) if y not in done)
    return done
