"""The compile record: what every stage did to one graph, kept for explain, debug and the cache.

It is plain data (JSON both ways), so a cache hit explains itself as well as a fresh compilation.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from .plan import Decision as Decision

UNCOLLECTED = ("lower", "plan", "schedule", "emit")
FEW_BYTES = 16  # spilled by a thread: a few registers do not matter (sine and cosine in one kernel spill two)


@dataclass(slots=True)
class TrialRecord:
    """One way to run a kernel that was tried on the device."""

    change: str  # from what the rules say
    time_us: float  # 0 where there is none: `problem` says why
    registers: int = 0
    spilled_bytes: int = 0
    chosen: bool = False
    problem: str = ""

    @property
    def spills(self) -> bool:
        return self.spilled_bytes > FEW_BYTES


@dataclass(slots=True)
class KernelRecord:
    """One launch, for people."""

    name: str
    operations: list[dict[str, str]]  # node, op, line
    bytes_read: int
    bytes_written: int
    schedule: str
    source: str
    predicted_us: float
    registers: int = 0  # per thread; 0 where nobody counts them
    spilled_bytes: int = 0
    shared_bytes: int = 0
    threads: int = 0  # of one program; 0 where nobody said
    tuning: str = ""  # what measuring led to, or why nothing was measured; empty where nobody asked
    trials: list[TrialRecord] = field(default_factory=list)  # of a split's first kernel: both kernels together
    work: float = 0.0  # operations of lanes; a dear one counts as several
    issue: dict[str, float] = field(default_factory=dict)  # parts of the machine code's cycles, where somebody asked

    @property
    def group(self) -> str:
        """The name of the group that the kernel belongs to."""
        return re.sub(r"_(partial|finish\d*|visits\d+_\d+)$", "", self.name)

    @property
    def asks(self) -> bool:
        """Whether it finds out what data leaves of a sweep, for the kernel after it."""
        return bool(re.search(r"_visits\d+_\d+$", self.name))

    def note(self, built: Any) -> None:
        """Keep what the chip's own compiler said of the kernel, if it did."""
        if built is not None:
            self.registers, self.spilled_bytes = built.registers, built.spills
            self.shared_bytes, self.threads = built.shared, built.threads


@dataclass(slots=True)
class ExternRecord:
    """One call that runs as eager does, and why."""

    name: str
    op: str
    why: str
    line: str
    bytes_moved: int
    flops: int = 0  # of products and convolutions; 0 where nobody counts them
    predicted_us: float = 0.0  # 0 where there is no prediction


@dataclass(slots=True)
class SavedRecord:
    """A tensor that forward keeps for backward, and why."""

    name: str
    op: str
    line: str
    type: str  # "bfloat16[8, 1024]"
    bytes: int
    why: str


@dataclass(slots=True)
class OrderRecord:
    """What a user asked of one operation or value: "together", "apart" or "kept", and how it was asked."""

    what: str
    by: str
    node: str
    line: str


@dataclass(slots=True)
class FlowStep:
    """What a launch or a call reads and writes, or an operation before fusion: bytes by the name of the buffer."""

    name: str  # of the kernel; of the node in the graph
    kind: str  # "kernel" | "extern" | "operation"
    op: str
    line: str
    reads: dict[str, int]
    writes: dict[str, int]


@dataclass(slots=True)
class DataFlow:
    """Where data goes: launches and calls in order, the same before fusion, and what is there from start or to end."""

    steps: list[FlowStep] = field(default_factory=list)
    unfused: list[FlowStep] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)


@dataclass(slots=True)
class GraphFacts:
    """What is known of a graph before it is compiled. `broken`: why it ends before the function does, and `broken_at`.

    `widened_at`: the line where float64 enters a program of narrower floats, and how many operations compute in it.
    """

    broken: str = ""
    broken_at: str = ""
    widened_at: str = ""
    widened_operations: int = 0
    result_bytes: int = 0


@dataclass(slots=True)
class CompileRecord:
    """Everything about one graph. `direction` is "inference", "forward" or "backward"; "rows": of a loop's chunk in the
    graph before it, and `repeats` says how many chunks there are.
    """

    direction: str = "inference"
    target: str = "cpu"
    program: str = ""
    plan: str = ""
    kernels: list[KernelRecord] = field(default_factory=list)
    externs: list[ExternRecord] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    orders: list[OrderRecord] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # what bytes and times assume of sizes known at run time
    bytes_moved: int = 0
    bytes_unfused: int = 0
    bytes_minimum: int = 0
    saved_bytes: int = 0  # of `saved`
    saved: list[SavedRecord] = field(default_factory=list)  # by a forward graph, beyond its inputs and results
    stage_seconds: dict[str, float] = field(default_factory=dict)
    cache: str = "miss"  # "hit" | "miss" | "off" | "not kept": close calls could not be measured now
    fallback: str = ""  # why the whole graph runs as eager, if it does
    graph: str = ""  # how it runs as a CUDA graph, or why it does not; empty where nobody asked
    key: str = ""
    repeats: int = 1
    facts: GraphFacts = field(default_factory=GraphFacts)
    flow: DataFlow = field(default_factory=DataFlow)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> CompileRecord:
        kernels = [_kernel_record(**k) for k in data["kernels"]]
        externs, decisions = [ExternRecord(**e) for e in data["externs"]], [Decision(**d) for d in data["decisions"]]
        saved = [SavedRecord(**s) for s in data.get("saved", ())]
        orders = [OrderRecord(**o) for o in data.get("orders", ())]
        parts: dict[str, Any] = {"kernels": kernels, "externs": externs, "decisions": decisions, "saved": saved}
        flow: dict[str, Any] = data.get("flow", {})
        flow |= {name: [FlowStep(**step) for step in flow.get(name, ())] for name in ("steps", "unfused")}
        parts |= {"orders": orders, "facts": GraphFacts(**data.get("facts", {})), "flow": DataFlow(**flow)}
        return CompileRecord(**(data | parts))


def _kernel_record(trials: Any = (), **fields: Any) -> KernelRecord:
    return KernelRecord(**fields, trials=[TrialRecord(**t) for t in trials])


@contextmanager
def stage(record: CompileRecord, name: str) -> Iterator[None]:
    """Time a stage of the compilation; those before kernels are built run without the collector of cycles.

    They make many objects and few cycles: looking for these takes a tenth of their time.
    """
    start, collects = time.perf_counter(), gc.isenabled()
    if name in UNCOLLECTED:
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
    record.stage_seconds[name] = record.stage_seconds.get(name, 0.0) + time.perf_counter() - start
