"""What the first tier of planning decides: regions around matrix products, each one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..analysis.access import estimate, numel
from ..analysis.contraction import Contraction
from ..analysis.passes import shares_out
from ..ir.plan import Decision
from ..ir.program import Define, Program
from ..ir.target import Target
from .cost import predict_us

TILE = 128  # a side of the tiles that results are counted in
SMALL, NESTED_ROWS = 32, 64  # a side of the smallest ones; rows of a tile with products inside the sweep
LONG = 256  # positions of a swept class that a program should have at least


@dataclass(frozen=True, slots=True)
class Region:
    """What must share a kernel. `again`: computed here although others may store it too.

    `beside`: its products have nothing in common but the launch. `tiled`: every tile of its products leaves states.
    `predicted_us`: the time of its kernels.
    """

    members: tuple[Define, ...]
    again: tuple[Define, ...]
    beside: bool = False
    tiled: bool = False
    predicted_us: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Regions:
    """The program with some products as definitions, and the kernels they are in."""

    program: Program
    regions: tuple[Region, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """What the kernel of a region takes: the matrix unit's time, bytes, and point-wise operations."""

    unit_us: float
    moved: int
    operations: float

    def time_us(self, target: Target) -> float:
        """The matrix unit beside everything else."""
        rest = predict_us(self.moved, self.operations, 1, target)
        return max(self.unit_us, rest) + 0.1 * min(self.unit_us, rest)


def tiles_of(c: Contraction) -> int:
    """Tiles of a result, as large as they are where there are many."""
    return numel(c.grid) * -(-estimate(c.rows.extent) // TILE) * -(-estimate(c.columns.extent) // TILE)


def waiting(c: Contraction, target: Target) -> int:
    """How many programs might share out the sweep of each that there is, but cannot: processors wait instead."""
    if shares_out(c):
        return 1
    rows, columns = estimate(c.rows.extent), estimate(c.columns.extent)
    tiles = -(-rows // NESTED_ROWS) if c.inner else -(-rows // SMALL) * -(-columns // SMALL)
    programs = max(1, numel(c.grid) * tiles)
    return max(1, min(estimate(c.swept.extent) // LONG, target.processors // programs))
