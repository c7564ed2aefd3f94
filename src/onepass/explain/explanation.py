"""The explanation of a program: its compile records, their totals, and three ways to read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..ir.record import CompileRecord, Decision, ExternRecord, KernelRecord
from .advice import advise
from .html import in_notebook, render_html
from .text import advice_text, render_text, total
from .width import fitted


@dataclass(frozen=True, slots=True)
class Explanation:
    """One record per compiled graph, in the order they were compiled (forward before backward)."""

    graphs: list[CompileRecord]

    @property
    def kernels(self) -> list[KernelRecord]:
        """Every generated launch of one call."""
        return [kernel for graph in self.graphs for kernel in graph.kernels]

    @property
    def externs(self) -> list[ExternRecord]:
        """Every call that runs as eager does, with the reason."""
        return [extern for graph in self.graphs for extern in graph.externs]

    @property
    def decisions(self) -> list[Decision]:
        """Every fusion accepted or rejected, with the number that decided."""
        return [decision for graph in self.graphs for decision in graph.decisions]

    @property
    def rejected(self) -> list[Decision]:
        """The fusions that were considered and not made."""
        return [decision for decision in self.decisions if not decision.accepted]

    @property
    def bytes_moved(self) -> int:
        """Bytes the compiled program reads and writes, externs included."""
        return total(self.graphs, "bytes_moved")

    @property
    def bytes_unfused(self) -> int:
        """Bytes it would move with one kernel per operation."""
        return total(self.graphs, "bytes_unfused")

    @property
    def bytes_minimum(self) -> int:
        """Bytes of inputs and outputs: what no compiler can avoid."""
        return total(self.graphs, "bytes_minimum")

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward for backward, beyond the inputs."""
        return total(self.graphs, "saved_bytes")

    @property
    def advice(self) -> list[str]:
        """What limits this program and what to do, as far as its records say; empty where nothing is to be said."""
        return advise(self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Totals and every record, as JSON types."""
        totals = ("bytes_moved", "bytes_unfused", "bytes_minimum", "saved_bytes")
        return {
            **{name: total(self.graphs, name) for name in totals},
            "kernels": len(self.kernels),
            "externs": len(self.externs),
            "advice": self.advice,
            "graphs": [graph.to_json() for graph in self.graphs],
        }

    def to_json(self) -> str:
        """The whole explanation as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """One self-contained page."""
        return render_html(self.graphs, self.advice)

    def _repr_html_(self) -> str:
        return in_notebook(self.to_html())

    def __str__(self) -> str:
        return fitted(render_text(self.graphs) + advice_text(self.advice))
