"""What a program's time was spent on, as plain data: steps with their times, whole calls, and the machine's limits.

`profiling/` measures it; `profile.py` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.record import CompileRecord


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do per microsecond; 0 where it is not known."""

    bytes_per_us: float
    flops_per_us: float
    source: str


@dataclass(frozen=True, slots=True)
class OperationTime:
    """What a kernel takes more for one operation than with a cheap one in its place; `problem` says why it is open."""

    name: str
    line: str
    exposed_us: float = 0.0
    spread_us: float = 0.0  # half the distance of the quartiles of what the rounds gave
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One kernel, library call or copy of a call of the program, and what it took."""

    graph: int  # position of its record
    direction: str
    name: str
    entry: str  # as profilers call it
    kind: str  # "kernel" | "extern" | "copy"
    time_us: float  # the median of all rounds, all its runs in a call together; 0 where it could not be measured
    runs: int = 1  # in one call
    predicted_us: float = 0.0
    bytes_moved: int = 0
    flops: float = 0.0  # of a library call; of a kernel, operations of lanes
    operations: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    parts: tuple[OperationTime, ...] = ()
    issue: str = ""  # of a GPU's kernel: which part of its instructions is whose
    alone_us: float = 0.0  # of a group whose operations were measured: its kernels by themselves, on other tensors
    rest_us: float = 0.0  # the same with a cheap operation in the place of every one

    @property
    def bytes_per_us(self) -> float:
        return self.bytes_moved * self.runs / self.time_us if self.time_us else 0.0

    @property
    def flops_per_us(self) -> float:
        return self.flops * self.runs / self.time_us if self.time_us else 0.0

    def limit(self, limits: Limits) -> tuple[float, str]:
        """The part of the nearest limit that the step reaches, and which: memory or products."""
        memory = self.bytes_per_us / limits.bytes_per_us if limits.bytes_per_us else 0.0
        known = limits.flops_per_us and self.kind == "extern"
        products = self.flops_per_us / limits.flops_per_us if known else 0.0
        return (products, "products") if products > memory else (memory, "memory")


@dataclass(frozen=True, slots=True)
class CallTime:
    """One way to run the whole program. `device_us`: 0 on a CPU, and where the device waits for the host."""

    name: str
    wall_us: float
    least_us: float = 0.0
    device_us: float = 0.0
    first_s: float = 0.0  # the first call, which compiles
    problem: str = ""

    @property
    def time_us(self) -> float:
        return self.device_us or self.wall_us


@dataclass(frozen=True, slots=True)
class Mark:
    """One run of a step on the time line of a call."""

    step: int
    start_us: float
    duration_us: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One call of a program: `calls` has onepass first, then what it was compared with, round by round."""

    graphs: list[CompileRecord]
    steps: list[StepTime]
    calls: list[CallTime]
    limits: Limits
    device: str
    rounds: int
    marks: list[Mark] = field(default_factory=list)

    @property
    def call(self) -> CallTime:
        return self.calls[0]

    @property
    def steps_us(self) -> float:
        """All steps together."""
        return sum(s.time_us for s in self.steps)

    def beside(self, name: str) -> CallTime | None:
        return next((c for c in self.calls[1:] if c.name == name and not c.problem), None)
