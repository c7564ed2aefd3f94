"""Answers kept by structure: equal layers of a model ask the same questions, and each is answered once.

A question is about one kernel of some definitions, or of stores. Its key holds what they compute, the layouts of their
buffers, which buffers they share, and which of them are stored; no name is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..ir.plan import Store
from ..ir.program import Buffer, Define
from ..ir.structure import form

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What was found when the question was first asked; `own` maps the buffers of then to those of now."""

    value: T
    own: dict[Buffer, Buffer]


class Answers:
    """The questions about one graph, however often it is planned, and their answers."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, tuple[Buffer, ...]]] = {}

    def ask(
        self, about: Hashable, defines: Iterable[Define | Store], stored: Collection[Define], answer: Callable[[], T]
    ) -> Answer[T]:
        """The answer to a question about definitions of which some are stored; `answer` finds it the first time.

        `about` is all that the answer depends on beside the definitions.
        """
        numbers: dict[Buffer, int] = {}
        parts: list[Hashable] = [about]
        found = [(d, form(d)) for d in defines]
        places = {place: n for n, place in enumerate(sorted({p for _, own in found for p in own.places}))}
        for d, own in found:
            parts += own.text, d in stored, tuple(numbers.setdefault(b, len(numbers)) for b in own.buffers)
            parts.append(tuple(places[p] for p in own.places))
        buffers = tuple(numbers)
        parts.append(tuple(numbers[b] for b in sorted(buffers, key=lambda b: b.place)))
        key = tuple(parts)
        if key not in self._known:
            self._known[key] = answer(), buffers
        value, before = self._known[key]
        return Answer(value, dict(zip(before, buffers, strict=True)))
