"""What lies between a product and earlier ones that it is made of, and what follows it."""

from __future__ import annotations

from collections.abc import Iterable

from ..analysis.access import numel
from ..analysis.contraction import MOST_HELD
from ..analysis.inline import reductions
from ..ir.program import Define
from .chooser import Chooser, Defines
from .reading import MOST_MEMBERS


def between(chooser: Chooser, last: Define, chosen: list[Define] | None) -> Iterable[Define]:
    """The products that this one is made of; with some of them chosen, those and all that depends on them."""
    depends: dict[Define, bool] = {}
    stack = [(d, False) for d in chooser.sources(last)]
    while stack:
        d, ready = stack.pop()
        if d in depends and not ready:
            continue
        if d.buffer in chooser.product_of:
            depends[d] = d not in chooser.taken and (chosen is None or d in chosen)
        elif ready:
            depends[d] = any(depends.get(s, False) for s in chooser.sources(d))
        else:
            depends[d] = False
            stack.append((d, True))
            stack.extend((s, False) for s in chooser.sources(d) if s not in depends)
    return [d for d, yes in depends.items() if yes and (chosen is not None or d.buffer in chooser.product_of)]


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
