"""The explanation as one HTML page: no scripts, nothing fetched, every name escaped.

The picture shows kernels as boxes in launch order and bytes as bars; sources fold out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from ..ir.record import CompileRecord, KernelRecord
from . import text as report

_PAGE = Path(__file__).with_name("page.html")
_WIDTH, _BAR, _LABEL, _ROW = 860, 520, 210, 30  # of the pictures, in SVG units
_STEPS_DRAWN = 60  # a picture of thousands of boxes helps nobody; the list below it has them all
_TOTALS = {"moved": "bytes_moved", "unfused": "bytes_unfused", "minimum": "bytes_minimum"}
_Row = tuple[str, str, dict[str, int]]  # a label, the kind of its box if it has one, bytes by the kind of their bar


def render_html(graphs: Sequence[CompileRecord]) -> str:
    """The whole page."""
    parts = [*_summary(graphs)]
    for number, graph in enumerate(graphs, 1):
        parts.extend(_graph(graph, number))
    if not graphs:
        parts.append("<p>Nothing was compiled: no tensor operation was captured.</p>")
    return Template(_PAGE.read_text("utf-8")).substitute(body="\n".join(parts))


def _summary(graphs: Sequence[CompileRecord]) -> Iterator[str]:
    yield f"<p class=lead>{report.counts_text(graphs)}</p>"
    rows: list[_Row] = [(kind, "", {kind: report.total(graphs, field)}) for kind, field in _TOTALS.items()]
    if saved := report.total(graphs, "saved_bytes"):
        rows.append(("saved for backward", "", {"saved": saved}))
    yield _chart(rows, "bytes moved, unfused and minimum")
    if moved := report.total(graphs, "bytes_moved"):
        fewer = report.ratio_text(report.total(graphs, "bytes_unfused"), moved)
        yield f"<p>Without fusion {fewer} the bytes would cross memory.</p>"


def _chart(rows: Sequence[_Row], title: str) -> str:
    """Rows of a label, in a box or not, and bars end to end with their bytes."""
    largest = max((sum(bars.values()) for _, _, bars in rows), default=0) or 1
    shapes: list[str] = []
    for position, (label, box, bars) in enumerate(rows):
        y, x = position * _ROW, float(_LABEL)
        text = label if len(label) <= 26 else label[:25] + "…"
        if box:
            shapes.append(f'<rect class="box {box}" x="1" y="{y + 1}" width="{_LABEL - 20}" height="26" rx="4"/>')
        shapes.append(f'<text x="10" y="{y + 18}">{escape(text)}<title>{escape(label)}</title></text>')
        for kind, count in bars.items():
            width = _BAR * count / largest
            shapes.append(f'<rect class="{kind}" x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="18"/>')
            x += width
        shapes.append(f'<text x="{x + 8:.1f}" y="{y + 18}">{report.byte_text(sum(bars.values()))}</text>')
    head = f'<svg viewBox="0 0 {_WIDTH} {len(rows) * _ROW + 2}" role="img" aria-label="{escape(title)}">'
    return head + "".join(shapes) + "</svg>"


def _graph(graph: CompileRecord, number: int) -> Iterator[str]:
    facts = f"target {escape(graph.target)}, cache {escape(graph.cache)}"
    if graph.sizes:
        facts += f"; any sizes, numbers are for {escape(report.sizes_text(graph.sizes))}"
    yield f"<section><h2>Graph {number}: {escape(graph.direction)}</h2><p>{facts}</p>"
    if graph.fallback:
        yield f"<p class=problem>Runs as eager: {escape(graph.fallback)}</p>"
    yield _picture(graph)
    for kernel in graph.kernels:
        yield from _kernel(kernel)
    if graph.externs:
        yield "<h3>Externs</h3>"
        rows = [(e.op, report.byte_text(e.bytes_moved), e.why, e.line) for e in graph.externs]
        yield _table(("operation", "bytes", "why", "line"), rows)
    if graph.saved:
        yield f"<h3>Kept for backward: {report.byte_text(graph.saved_bytes)}</h3>"
        kept = [(what, report.byte_text(count), why, line) for count, what, why, line in report.saved_rows(graph)]
        yield _table(("operation", "bytes", "why", "line"), kept)
    if graph.orders:
        yield "<h3>Asked for</h3>" + _table(("what", "by", "line"), report.asked_rows(graph))
    yield from _decisions(graph)
    for title, text in (("Program", graph.program), ("Plan", graph.plan)):
        if text:
            yield f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"
    if graph.stage_seconds:
        times = [(name, f"{seconds * 1e3:.1f} ms") for name, seconds in graph.stage_seconds.items()]
        yield "<details><summary>Time per stage</summary>" + _table(("stage", "time"), times) + "</details>"
    yield "</section>"


def _picture(graph: CompileRecord) -> str:
    """Each launch or call is a box holding its name; its bytes read and written are bars beside it."""
    steps: list[_Row] = [
        (f"{k.name} ({len(k.operations)} ops)", "kernel", {"read": k.bytes_read, "written": k.bytes_written})
        for k in graph.kernels
    ]
    steps += [(e.op, "extern", {"read": e.bytes_moved}) for e in graph.externs]
    if not steps:
        return ""
    more = f"<p>The first {_STEPS_DRAWN} of {len(steps)} are drawn.</p>" if len(steps) > _STEPS_DRAWN else ""
    legend = "<p class=legend><span class=read></span>read <span class=written></span>written</p>"
    return _chart(steps[:_STEPS_DRAWN], "kernels and their bytes") + legend + more


def _kernel(kernel: KernelRecord) -> Iterator[str]:
    yield f"<article><h3>{escape(kernel.name)}</h3>"
    yield f"<p>{report.kernel_facts(kernel)}<br><span class=schedule>{escape(kernel.schedule)}</span></p>"
    if kernel.tuning:
        yield f"<p>Tuning: {escape(kernel.tuning)}</p>"
    if kernel.trials:
        yield "<ul>" + "".join(f"<li>{escape(report.trial_line(t))}</li>" for t in kernel.trials) + "</ul>"
    rows = [(o.get("op", ""), o.get("node", ""), o.get("line", "")) for o in kernel.operations]
    yield _table(("operation", "node", "line"), rows)
    if kernel.source:
        yield f"<details><summary>Source</summary><pre>{escape(kernel.source)}</pre></details>"
    yield "</article>"


def _decisions(graph: CompileRecord) -> Iterator[str]:
    if not graph.decisions:
        return
    rejected = report.rejected_by_size(graph.decisions)
    accepted = [d for d in graph.decisions if d.accepted]
    yield f"<h3>Fusions: {len(accepted)} made, {len(rejected)} rejected</h3>"
    for title, decisions in (("Rejected", rejected), ("Made", accepted)):
        if decisions:
            items = "".join(f"<li>{escape(report.decision_line(d))}</li>" for d in decisions)
            opened = " open" if title == "Rejected" else ""
            yield f"<details{opened}><summary>{title}</summary><ul>{items}</ul></details>"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
