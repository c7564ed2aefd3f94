"""The picture of README, docs/fusion.svg: one program before and after fusion, from the report of its plan."""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.explain.text import byte_text, short_operation
from onepass.ir.record import CompileRecord, FlowStep

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "fusion.svg"
WIDE, BOX, HIGH, DOWN, TOP = 720, 150, 30, 58, 84
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f; } .title { font-size: 15px; font-weight: 600; }
  .small { font-size: 11px; fill: #57606a; } .memory { stroke: #b0554f; } .few { stroke: #3a9d6e; }
  line { stroke-linecap: round; } rect { fill: #ddf4ff; stroke: #4c8dd6; } .kernel { fill: #dafbe1; stroke: #3a9d6e; }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .small { fill: #9da7b1; }
    rect { fill: #12304d; } .kernel { fill: #12361f; } }
"""


def forward(x: Tensor, bias: Tensor) -> Tensor:
    y = F.gelu(x + bias)
    return F.dropout(y, 0.1)


def record() -> CompileRecord:
    """The plan for tensors without memory: the same on every machine."""
    with torch.device("meta"):
        x, bias = torch.empty(4096, 4096), torch.empty(4096)
    (graph,) = onepass.explain(forward, x, bias, target="sm_90", options={"cache": False}).graphs
    return graph


def drawn(graph: CompileRecord) -> str:
    steps = [s for s in graph.flow.unfused if s.kind == "operation"]
    (kernel,) = (s for s in graph.flow.steps if s.kind == "kernel")
    high = TOP + DOWN * len(steps) + 20
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}"><style>{STYLE}</style>']
    parts += _title(20, "one kernel per operation", f"{byte_text(graph.bytes_unfused)} cross memory")
    for row, step in enumerate(steps):
        y = TOP + row * DOWN
        parts.append(_box(20, y, HIGH, [short_operation(step.op).split(".")[-1]], ""))
        parts += _traffic(20 + BOX, y + HIGH / 2, step, "memory")
    middle = 390
    parts += _title(middle, "fused by onepass", f"{byte_text(graph.bytes_moved)} cross memory, which is the least")
    names = [short_operation(s.op).split(".")[-1] for s in steps]
    tall = DOWN * (len(steps) - 1) + HIGH
    parts.append(_box(middle, TOP, tall, names, "kernel"))
    parts += _traffic(middle + BOX, TOP + tall / 2, kernel, "few")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(x: float, title: str, below: str) -> list[str]:
    lines = [f'<text class="title" x="{x}" y="30">{escape(title)}</text>']
    return [*lines, f'<text x="{x}" y="50">{escape(below)}</text>']


def _box(x: float, y: float, high: float, names: list[str], kind: str) -> str:
    gap = high / len(names)
    box = f'<rect class="{kind}" x="{x}" y="{y}" width="{BOX}" height="{high:g}" rx="6"/>'
    at = x + BOX / 2
    lines = [f'<text x="{at:g}" y="{y + gap * (k + 0.5) + 4.5:g}" text-anchor="middle">{escape(n)}</text>'
             for k, n in enumerate(names)]  # fmt: skip
    return box + "".join(lines)


def _traffic(x: float, y: float, step: FlowStep, kind: str) -> list[str]:
    """Lines as wide as the bytes that are read and written."""
    found = []
    for shift, count, verb in ((-7, sum(step.reads.values()), "reads"), (8, sum(step.writes.values()), "writes")):
        wide = max(1.0, 6.0 * count / (128 << 20))
        found.append(f'<line class="{kind}" x1="{x + 6}" x2="{x + 52}" y1="{y + shift:g}" y2="{y + shift:g}" '
                     f'stroke-width="{wide:g}"/>')  # fmt: skip
        found.append(f'<text class="small" x="{x + 62}" y="{y + shift + 4:g}">{verb} {byte_text(count)}</text>')
    return found


if __name__ == "__main__":
    PICTURE.write_text(drawn(record()), "utf-8")
    print(f"wrote {PICTURE}")
