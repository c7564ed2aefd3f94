"""The profile of a program, and the ways to read it: text, JSON, and a time line for trace viewers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from .advice import advise, advise_measured
from .html import in_notebook, render_html
from .measured import Measured
from .profile_text import render_profile
from .text import advice_text
from .width import fitted, terminal_width


@dataclass(frozen=True, slots=True)
class Profile(Measured):
    """One call of a program, measured."""

    @property
    def advice(self) -> list[str]:
        """What limits this program and what to do; empty where nothing is to be said."""
        return [*advise_measured(self), *advise(self.graphs)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {
            "limits": asdict(self.limits),
            "device": self.device,
            "rounds": self.rounds,
            "advice": self.advice,
            "calls": [asdict(c) for c in self.calls],
            "steps": [asdict(s) for s in self.steps],
            "graphs": [g.to_json() for g in self.graphs],
        }

    def to_json(self) -> str:
        """The whole profile as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """One self-contained page."""
        return render_html(self.graphs, self.advice, self)

    def _repr_html_(self) -> str:
        return in_notebook(self.to_html())

    def to_trace(self) -> str:
        """One call as a time line for chrome://tracing or Perfetto, kernels named as torch.profiler names them."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": self.device}}
        ]
        for mark in self.marks:
            s = self.steps[mark.step]
            about = {"kernel": s.name, "graph": s.direction, "bytes": s.bytes_moved, "predicted_us": s.predicted_us}
            category = "kernel" if s.kind == "kernel" else "cpu_op"
            event = {"ph": "X", "name": s.entry, "cat": category, "pid": 0, "tid": 0}
            events.append(event | {"ts": mark.start_us, "dur": mark.duration_us, "args": {**about, "lines": s.lines}})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def __str__(self) -> str:
        width = terminal_width()
        return fitted(render_profile(self, width) + advice_text(self.advice), width)

    def save_trace(self, path: str) -> None:
        """Write the time line to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_trace())
