"""Which of its possible schedules a group of the plan gets.

The rules of `schedule/` decide everything that is not said here. A `Choice` asks for a schedule with fewer values
per thread (a kernel spilled), or for one that differs from the rules' own by a few doublings (a device was asked).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Adjustment:
    """How a tile program differs from what the rules say: how often each size is doubled, halved where negative.

    What a program does not have (lanes of a sweep, chunks of a split) cannot be adjusted and stays as it is.
    """

    warps: int = 0
    lanes: int = 0  # positions of a streamed axis that one step takes
    block: int = 0  # positions of an outer axis that one program takes
    chunk: int = 0  # positions of a split axis that one program takes
    stages: int = 0  # loads in flight: so many more or fewer of a product; any other sweep has some or none

    def __str__(self) -> str:
        words = [_step_text(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name)]
        return ", ".join(words) or "as the rules say"

    def neighbours(self) -> tuple[Adjustment, ...]:
        """Those one step away, the most promising first."""
        steps = [("warps", 1), ("warps", -1), ("lanes", 1), ("lanes", -1), ("block", 1), ("block", -1)]
        steps += [("chunk", -1), ("chunk", 1), ("stages", 1), ("stages", -1)]
        return tuple(replace(self, **{name: getattr(self, name) + step}) for name, step in steps)


AS_RULED = Adjustment()


@dataclass(frozen=True, slots=True)
class Choice:
    """`candidate`: how many schedules of the group are passed over because they keep too much in registers."""

    candidate: int = 0
    adjustment: Adjustment = AS_RULED


FIRST = Choice()


def _step_text(name: str, doublings: int) -> str:
    if name == "stages":
        return f"stages {doublings:+d}"
    return f"{name} x {1 << doublings}" if doublings > 0 else f"{name} / {1 << -doublings}"


def group_name(kernel: str) -> str:
    """The name of the group that a kernel belongs to."""
    return re.sub(r"_(partial|finish\d*)$", "", kernel)
