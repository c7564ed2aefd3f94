"""What the first tier of planning decides: regions around matrix products, each one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.plan import Chosen, Decision
from ..ir.program import Define, Program


@dataclass(frozen=True, slots=True)
class Region:
    """What must share a kernel. `again`: computed here although others may store it too. `chosen`: how it runs."""

    members: tuple[Define, ...]
    again: tuple[Define, ...]
    chosen: Chosen | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Regions:
    """The program with some products as definitions, and the kernels they are in."""

    program: Program
    regions: tuple[Region, ...]
    decisions: tuple[Decision, ...]
