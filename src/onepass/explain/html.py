"""The explanation as one HTML page: no scripts, nothing fetched, every name escaped.

The picture shows kernels as boxes in launch order and bytes as bars; sources fold out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ..ir.record import CompileRecord, ExternRecord, KernelRecord
from .text import byte_text, counted, decision_line, ratio_text, rejected_by_size, sizes_text, time_text, trial_line

if TYPE_CHECKING:
    from .explanation import Explanation

_PAGE = Path(__file__).with_name("page.html")
_WIDTH, _BAR, _LABEL = 860, 520, 210  # of the pictures, in SVG units
_ROW = 26
_STEPS_DRAWN = 60  # a picture of thousands of boxes helps nobody; the list below it has them all


def render_html(explanation: Explanation) -> str:
    """The whole page."""
    parts = [*_summary(explanation)]
    for number, graph in enumerate(explanation.graphs, 1):
        parts.extend(_graph(graph, number))
    if not explanation.graphs:
        parts.append("<p>Nothing was compiled: no tensor operation was captured.</p>")
    return Template(_PAGE.read_text("utf-8")).substitute(body="\n".join(parts))


def _summary(explanation: Explanation) -> Iterator[str]:
    counts = (
        counted(len(explanation.graphs), "graph"),
        counted(len(explanation.kernels), "kernel"),
        counted(len(explanation.externs), "extern"),
    )
    yield f"<p class=lead>{', '.join(counts)}</p>"
    rows = [
        ("moved", explanation.bytes_moved, "moved"),
        ("unfused", explanation.bytes_unfused, "unfused"),
        ("minimum", explanation.bytes_minimum, "minimum"),
    ]
    if explanation.saved_bytes:
        rows.append(("saved for backward", explanation.saved_bytes, "saved"))
    yield _bars(rows)
    if explanation.bytes_moved:
        fewer = ratio_text(explanation.bytes_unfused, explanation.bytes_moved)
        yield f"<p>Without fusion {fewer} the bytes would cross memory.</p>"


def _bars(rows: list[tuple[str, int, str]]) -> str:
    largest = max((count for _, count, _ in rows), default=0) or 1
    shapes = []
    for position, (label, count, kind) in enumerate(rows):
        y = position * _ROW
        width = max(1.0, _BAR * count / largest) if count else 0.0
        shapes.append(f'<text x="0" y="{y + 16}">{escape(label)}</text>')
        shapes.append(f'<rect class="{kind}" x="{_LABEL}" y="{y + 3}" width="{width:.1f}" height="18" rx="2"/>')
        shapes.append(f'<text x="{_LABEL + width + 8:.1f}" y="{y + 16}">{byte_text(count)}</text>')
    return _svg(shapes, len(rows) * _ROW, "bytes moved, unfused and minimum")


def _svg(shapes: list[str], height: int, title: str) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return head + "".join(shapes) + "</svg>"


def _graph(graph: CompileRecord, number: int) -> Iterator[str]:
    facts = f"target {escape(graph.target)}, cache {escape(graph.cache)}"
    if graph.sizes:
        facts += f"; any sizes, numbers are for {escape(sizes_text(graph.sizes))}"
    yield f"<section><h2>Graph {number}: {escape(graph.direction)}</h2><p>{facts}</p>"
    if graph.fallback:
        yield f"<p class=problem>Runs as eager: {escape(graph.fallback)}</p>"
    yield _picture(graph)
    for kernel in graph.kernels:
        yield from _kernel(kernel)
    if graph.externs:
        yield "<h3>Externs</h3>"
        yield _table(("operation", "bytes", "why", "line"), [_extern_row(e) for e in graph.externs])
    yield from _decisions(graph)
    for title, text in (("Program", graph.program), ("Plan", graph.plan)):
        if text:
            yield f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"
    if graph.stage_seconds:
        rows = [(name, f"{seconds * 1e3:.1f} ms") for name, seconds in graph.stage_seconds.items()]
        yield "<details><summary>Time per stage</summary>" + _table(("stage", "time"), rows) + "</details>"
    yield "</section>"


def _picture(graph: CompileRecord) -> str:
    """Each launch or call is a box holding its name; its bytes read and written are bars beside it."""
    steps: list[tuple[str, int, int, str]] = [
        (f"{k.name} ({len(k.operations)} ops)", k.bytes_read, k.bytes_written, "kernel") for k in graph.kernels
    ]
    steps += [(e.op, e.bytes_moved, 0, "extern") for e in graph.externs]
    drawn = steps[:_STEPS_DRAWN]
    largest = max((read + written for _, read, written, _ in drawn), default=0) or 1
    shapes: list[str] = []
    for position, (label, read, written, kind) in enumerate(drawn):
        y, scale = position * (_ROW + 4), _BAR / largest
        text = label if len(label) <= 26 else label[:25] + "…"
        shapes.append(f'<rect class="box {kind}" x="1" y="{y + 1}" width="{_LABEL - 20}" height="{_ROW}" rx="4"/>')
        shapes.append(f'<text x="10" y="{y + 18}">{escape(text)}<title>{escape(label)}</title></text>')
        wide = read * scale
        shapes.append(f'<rect class="read" x="{_LABEL}" y="{y + 4}" width="{wide:.1f}" height="18"/>')
        end = wide + written * scale
        shapes.append(
            f'<rect class="written" x="{_LABEL + wide:.1f}" y="{y + 4}" width="{written * scale:.1f}" height="18"/>'
        )
        shapes.append(f'<text x="{_LABEL + end + 8:.1f}" y="{y + 18}">{byte_text(read + written)}</text>')
    if not drawn:
        return ""
    more = f"<p>The first {_STEPS_DRAWN} of {len(steps)} are drawn.</p>" if len(steps) > _STEPS_DRAWN else ""
    legend = "<p class=legend><span class=read></span>read <span class=written></span>written</p>"
    return _svg(shapes, len(drawn) * (_ROW + 4) + 2, "kernels and their bytes") + legend + more


def _kernel(kernel: KernelRecord) -> Iterator[str]:
    yield f"<article><h3>{escape(kernel.name)}</h3>"
    facts = (
        f"reads {byte_text(kernel.bytes_read)}, writes {byte_text(kernel.bytes_written)}, "
        f"predicted {time_text(kernel.predicted_us)}"
    )
    yield f"<p>{facts}<br><span class=schedule>{escape(kernel.schedule)}</span></p>"
    if kernel.tuning:
        yield f"<p>Tuning: {escape(kernel.tuning)}</p>"
    if kernel.trials:
        yield "<ul>" + "".join(f"<li>{escape(trial_line(t))}</li>" for t in kernel.trials) + "</ul>"
    rows = [(o.get("op", ""), o.get("node", ""), o.get("line", "")) for o in kernel.operations]
    yield _table(("operation", "node", "line"), rows)
    if kernel.source:
        yield f"<details><summary>Source</summary><pre>{escape(kernel.source)}</pre></details>"
    yield "</article>"


def _extern_row(extern: ExternRecord) -> tuple[str, ...]:
    return extern.op, byte_text(extern.bytes_moved), extern.why, extern.line


def _decisions(graph: CompileRecord) -> Iterator[str]:
    if not graph.decisions:
        return
    rejected = rejected_by_size(graph.decisions)
    accepted = [d for d in graph.decisions if d.accepted]
    yield f"<h3>Fusions: {len(accepted)} made, {len(rejected)} rejected</h3>"
    for title, decisions in (("Rejected", rejected), ("Made", accepted)):
        if decisions:
            items = "".join(f"<li>{escape(decision_line(d))}</li>" for d in decisions)
            opened = " open" if title == "Rejected" else ""
            yield f"<details{opened}><summary>{title}</summary><ul>{items}</ul></details>"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
