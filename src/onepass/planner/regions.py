"""What the first tier of planning decides: regions around matrix products, each one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.plan import Decision
from ..ir.program import Define, Program
from ..ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Region:
    """What must share a kernel. `again`: computed here although others may store it too.

    `beside`: its products have nothing in common but the launch. `tiled`: every tile of its products leaves states.
    `predicted_us`: the time of its kernels, the first of which runs by `schedule`.
    """

    members: tuple[Define, ...]
    again: tuple[Define, ...]
    beside: bool = False
    tiled: bool = False
    predicted_us: float = field(default=0.0, compare=False)
    schedule: Schedule | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Regions:
    """The program with some products as definitions, and the kernels they are in."""

    program: Program
    regions: tuple[Region, ...]
    decisions: tuple[Decision, ...]
