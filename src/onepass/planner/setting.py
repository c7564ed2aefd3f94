"""What all planning of a graph has in common, whatever part of it is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..analysis.answers import Answers
from ..analysis.contraction import Contraction
from ..analysis.nest import Refusal
from ..ir.limits import Limits
from ..ir.options import Options
from ..ir.plan import Chosen, Group, Shared, Store
from ..ir.target import Target

Choose: TypeAlias = Callable[[Iterable[Store], Target, float, bool], Chosen | Refusal]
ChooseProducts: TypeAlias = Callable[[Sequence[Contraction], Target, float], Chosen]
ShareLaunch: TypeAlias = Callable[[Sequence[Group], Sequence[float]], Shared]


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """`choose`, `choose_products`: the fastest way to run stores as one kernel, and contractions (`schedule/group.py`).
    `share`: groups in one launch, given the time of each alone.

    `answers`: what is known of the graph. `limits`: of operations whose kernels spilled.
    """

    target: Target
    options: Options
    choose: Choose
    choose_products: ChooseProducts
    share: ShareLaunch
    answers: Answers
    limits: Limits
