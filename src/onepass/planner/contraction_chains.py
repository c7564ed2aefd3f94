"""What lies between a product and earlier ones that it is made of, and what follows it."""

from __future__ import annotations

from ..analysis.access import numel
from ..analysis.contraction import MOST_HELD
from ..analysis.inline import reductions
from ..ir.program import Define
from .chooser import Chooser, Defines
from .reading import MOST_MEMBERS


def products_above(chooser: Chooser, last: Define) -> list[Define]:
    """The products that this one is made of, through values that are none."""
    return [d for d in _above(chooser, last)[0] if d.buffer in chooser.product_of and d not in chooser.taken]


def between(chooser: Chooser, last: Define, chosen: list[Define]) -> list[Define]:
    """Some of the products that this one is made of, and all that depends on them."""
    visited, finished = _above(chooser, last)
    depends = {d for d in chosen if d not in chooser.taken}
    for d in finished:
        if not depends.isdisjoint(chooser.sources(d)):
            depends.add(d)
    return [d for d in visited if d in depends]


def _above(chooser: Chooser, last: Define) -> tuple[list[Define], list[Define]]:
    """All that a product is made of, back to other products; and what of that is no product, sources first."""
    if last in chooser.above:
        return chooser.above[last]
    visited: dict[Define, None] = {}
    finished: list[Define] = []
    stack = [(d, False) for d in chooser.sources(last)]
    while stack:
        d, ready = stack.pop()
        if ready:
            finished.append(d)
        elif d not in visited:
            visited[d] = None
            if d.buffer not in chooser.product_of:
                stack.append((d, True))
                stack.extend((s, False) for s in chooser.sources(d) if s not in visited)
    chooser.above[last] = list(visited), finished
    return chooser.above[last]


def tails(chooser: Chooser, last: Define) -> list[Defines]:
    """Point-wise work on the result that nobody else reads, longest first; none at the end."""
    chain: list[Define] = []
    current = last
    while current.buffer not in chooser.elsewhere and len(chain) < MOST_MEMBERS:
        users = chooser.readers.get(current.buffer, [])
        if len(set(users)) != 1 or users[0] in chooser.taken or users[0].buffer in chooser.product_of:
            break
        user = users[0]
        if reductions([user.value]) or numel(user.axes) != numel(last.axes):
            break
        chain.append(user)
        current = user
    return [tuple(chain[:k]) for k in range(len(chain), 0, -1)] + [()]


def is_short(define: Define) -> bool:
    """Whether a product's sums are short enough to be computed inside a sweep."""
    lengths = [a.extent.constant for r in reductions([define.value]) for a in r.over]
    return all(n is not None and n <= MOST_HELD for n in lengths)
