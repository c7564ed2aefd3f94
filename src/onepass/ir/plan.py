"""The fusion plan: which defines share a kernel, and every decision on the way there."""

from __future__ import annotations

from dataclasses import dataclass, field

from .expr import Expr
from .poly import Axis
from .program import Buffer, Define, Extern, Origin
from .schedule import Schedule
from .time import Time, total_us


@dataclass(frozen=True, slots=True)
class Store:
    """buffer[axes] = value, where everything virtual has been inlined into the value."""

    buffer: Buffer
    axes: tuple[Axis, ...]
    value: Expr


@dataclass(frozen=True, slots=True)
class Chosen:
    """How the fastest kernels of stores run: the schedule of the first, and the times of their launches."""

    schedule: Schedule
    times: tuple[Time, ...]

    @property
    def time_us(self) -> float:
        return total_us(self.times)


@dataclass(frozen=True, slots=True)
class Decision:
    """One accepted or rejected fusion, with the number that decided."""

    producer: str
    consumer: str
    # "vertical" | "sibling" | "recompute" | "in-place" | "chain" | "library" | "rows" | "tiles" | "product" | "beside"
    # | "launch"
    kind: str
    accepted: bool
    reason: str
    saved_us: float = 0.0
    bytes_saved: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """What shares a kernel: the stores it makes, and the defines computed inside."""

    stores: tuple[Store, ...]
    members: tuple[Define, ...]
    schedule: Schedule | None = None  # how its first kernel runs, where it was priced

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(dict.fromkeys(m.origin for m in self.members))

    @property
    def products(self) -> bool:
        """Whether matrix products are computed inside."""
        return self.schedule is not None and self.schedule.multiplies


@dataclass(frozen=True, slots=True)
class Shared:
    """Groups in one launch, with the schedules they have there. `refusal`: why there is none."""

    groups: tuple[Group, ...] = ()
    together_us: float = 0.0
    refusal: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class FusionPlan:
    """Groups and externs in execution order; `in_place` maps a stored buffer to the input it overwrites.

    `launches`: groups that share one, neighbours among the steps.
    """

    steps: tuple[Group | Extern, ...]
    decisions: tuple[Decision, ...]
    in_place: dict[Buffer, Buffer] = field(default_factory=dict)
    copies: tuple[tuple[Buffer, Buffer], ...] = ()  # (input, source) copied at the end
    rereads: tuple[tuple[Buffer, Buffer], ...] = ()  # those whose kernel reads the input in several places: it may do
    launches: tuple[tuple[Group, ...], ...] = ()
