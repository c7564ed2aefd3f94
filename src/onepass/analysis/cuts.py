"""Parts of a program that one value ends: the value, what it is made of inside, and what it reads from outside.

A part is convex, and nothing of it but its end is read elsewhere (`shared`: more may be, which the caller looks after).
`Parts` grows them upwards from their ends, as long as they hold no operation that is not wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..ir.expr import Expr, Pointwise, Reduce, postorder
from ..ir.ops import CASTS
from ..ir.orders import NO_ORDERS
from ..ir.plan import Store
from ..ir.program import Buffer, Define, Extern, Program, buffers_in
from .inline import Inliner, loaded, read_by

MOST_PARTS = 512  # of one end
_SAME = {"gt": "lt", "ge": "le", "welford": "sum", "argmax": "max", "argmin": "min"}
REPEATED = 2  # times that a program may spell out what a part does once
_ALGEBRA = frozenset(("add", "sub", "mul", "div", "neg", "sqrt", "rsqrt", "pow", *CASTS))


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """`defines`: in order, the end last. `inputs`: the buffers it reads, in order of first appearance."""

    defines: tuple[Define, ...]
    inputs: tuple[Buffer, ...]

    @property
    def end(self) -> Define:
        return self.defines[-1]

    def store(self) -> Store:
        """Its result as an expression of its inputs."""
        made = {d.buffer: d for d in self.defines}
        return Store(self.end.buffer, self.end.dimensions, Inliner(made).value(self.end.buffer))


def definitions(program: Program) -> dict[Buffer, Define]:
    """What defines each buffer, products of matrices by the library among them."""
    found = (s.contraction if isinstance(s, Extern) else s for s in program.statements)
    return {d.buffer: d for d in found if isinstance(d, Define)}


def parts_of(program: Program) -> list[ProgramPart]:
    """Each result of a program as a part that reads inputs alone; none where calls make something."""
    parts = Parts(program)
    ends = [*buffers_in(program.outputs)]
    if len(ends) != len(program.outputs) or len(parts.defines) != len(program.statements):
        return []
    found = [parts.above(end, program.inputs) for end in ends]
    return [part for part in found if part is not None] if None not in found else []


def _part(defines: Iterable[Define]) -> ProgramPart:
    """Definitions in order, as a part."""
    order = tuple(defines)
    made = {d.buffer for d in order}
    return ProgramPart(order, tuple(dict.fromkeys(b for d in order for b in loaded(d.value) if b not in made)))


def work(part: Iterable[Define]) -> Counter[str]:
    """The operations that are not the algebra of real numbers: how many of each."""
    return sum((_work(d.value) for d in part), Counter())


@lru_cache(maxsize=8192)
def _work(value: Expr) -> Counter[str]:
    found: Counter[str] = Counter()
    for e in postorder([value]):
        if isinstance(e, Pointwise) and e.op not in _ALGEBRA:
            found[_SAME.get(e.op, e.op)] += 1
        elif isinstance(e, Reduce):
            found[_SAME.get(e.monoid, e.monoid)] += 2 if e.monoid == "welford" else 1
    return found


class Parts:
    """The parts of one program."""

    def __init__(self, program: Program) -> None:
        self.defines, self._readers = definitions(program), _readers(program)
        self._position = {b: k for k, b in enumerate(self.defines)}

    def above(self, end: Buffer, inputs: Collection[object]) -> ProgramPart | None:
        """What makes a buffer of some others, as a part; None where it is made of more, or asked to be as it is."""
        inside: set[Define] = set()
        waiting = [end]
        while waiting:
            define = self.defines.get(waiting.pop())
            if define is None or define.orders != NO_ORDERS:
                return None
            if define not in inside:
                inside.add(define)
                waiting += [r for r in loaded(define.value) if r not in inputs]
        return _part(self._in_order(inside))

    def _in_order(self, inside: Iterable[Define]) -> list[Define]:
        return sorted(inside, key=lambda d: self._position[d.buffer])

    def read_outside(self, made: Collection[Buffer]) -> set[Buffer]:
        """The buffers of these that are read by more than the others."""
        return {b for b in made if not self._readers.get(b, set()) <= {*made}}

    def ending(self, end: Define, wanted: Counter[str], most: int, shared: bool = False) -> Iterator[ProgramPart]:
        """The parts with this end that do the wanted work with at most so many definitions, the smallest first."""
        start = frozenset((end,))
        waiting, seen = [start], {start}
        while waiting and len(seen) <= MOST_PARTS:
            inside = waiting.pop(0)
            done = work(inside)
            other = any(n > REPEATED * wanted[op] for op, n in done.items())
            if other or len(inside) > most or any(d.orders != NO_ORDERS for d in inside):
                continue
            part = _part(self._in_order(inside))
            made = {d.buffer for d in inside}
            if done.keys() == wanted.keys():
                yield part
            for b in part.inputs:
                inner = b in self.defines and (shared or self._readers.get(b, {None}) <= made)
                if inner and (grown := inside | {self.defines[b]}) not in seen:
                    seen.add(grown)
                    waiting.append(grown)


def _readers(program: Program) -> dict[Buffer, set[Buffer | None]]:
    """The buffers that are made of each buffer; None stands for every other reader."""
    readers: dict[Buffer, set[Buffer | None]] = {b: {None} for b in (*buffers_in(program.outputs), *program.kept)}
    for s in program.statements:
        define = s.contraction if isinstance(s, Extern) else s if isinstance(s, Define) else None
        read = loaded(define.value) if define is not None else read_by(s)
        for b in read:
            if isinstance(b, Buffer):
                readers.setdefault(b, set()).add(define.buffer if define is not None else None)
    return readers
