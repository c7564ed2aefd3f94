"""How a kernel's axes run, as data: each is factored grid x loop x tile.

A group of the plan carries the schedule that was priced; building a kernel reads it and derives nothing again.

    c0[8192]: grid x tile 2; c1[1024]: held; 4 warps
"""

from __future__ import annotations

from dataclasses import dataclass

from .poly import Axis


@dataclass(frozen=True, slots=True)
class Factor:
    """One axis. An axis with neither grid nor loop is held: all its positions are open at once.

    `tile`: positions that are open at once. `turns`: tiles that one step of a loop takes, or that a held axis is worked
    through in. `chunk`: positions of a reduced axis that one program takes, its partial result finished by another
    kernel; 0: it takes all. `role`: of an axis of a matrix product.
    """

    grid: bool = False
    loop: bool = False
    tile: int = 1
    turns: int = 1
    chunk: int = 0
    role: str = ""

    def __str__(self) -> str:
        if self.role:
            return f"{self.role} by {self.tile}"
        if self.grid and self.loop:
            return f"grid x loop {self.tile}"
        if self.grid:
            return f"grid x tile {self.tile}" if self.tile > 1 else "grid"
        many = f"{self.turns} x {self.tile}" if self.turns > 1 else str(self.tile)
        if self.loop:
            return f"swept by {many}" if self.tile else "swept"
        return f"held as {many}" if self.turns > 1 else "held"


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one kernel runs. `order`: the axes of a program's tile, neighbours in memory last.

    `way`: which of the ways to number programs it is made for. `split`: the axis that programs share out. `chunks`: how
    many programs share the sweep of a product. `states`: every tile of a product leaves states of reductions, which
    another kernel merges. `shares`: the schedules of kernels that have nothing in common but their launch.
    """

    axes: tuple[tuple[Axis, Factor], ...] = ()
    order: tuple[Axis, ...] = ()
    warps: int = 0
    stages: int = 0
    way: int = 0
    split: Axis | None = None
    chunks: int = 0
    staged: bool = False  # the number of stages is part of the text: it was chosen, not derived
    resident: bool = False  # programs stay and take one tile after another
    states: bool = False
    shares: tuple[Schedule, ...] = ()

    def __str__(self) -> str:
        if self.shares:
            alike: dict[object, list[Schedule]] = {}
            for s in self.shares:
                alike.setdefault((tuple(f for _, f in s.axes), s.warps) if not s.multiplies else str(s), []).append(s)
            return " | ".join(f"{own[0]}{f' ({len(own)} parts)' * (len(own) > 1)}" for own in alike.values())
        words = []
        for axis, factor in self.axes:
            words.append(f"{axis.name}[{axis.extent!r}]: {factor}")
            words += [f"in {self.chunks} chunks"] if self.chunks and factor.loop else []
        words += [f"split over {self.split.name}"] if self.split is not None else []
        words += [f"{self.warps} warps"] if self.warps else []
        words += [f"{self.stages} stages"] if self.staged else []
        return "; ".join(words)

    @property
    def multiplies(self) -> bool:
        """Whether the kernel computes matrix products."""
        return any(s.multiplies for s in self.shares) or any(factor.role for _, factor in self.axes)

    def factor(self, axis: Axis) -> Factor:
        """How an axis runs."""
        return dict(self.axes)[axis]
