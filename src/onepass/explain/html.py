"""A report as one HTML page: nothing fetched, every name escaped, no script but the page's own (`page.js`).

Bytes as a waterfall, steps as bars that can be sorted, kernels under the chip's limits; equal kernels once; sources
fold out. With a profile, steps and the roofline are of measured times. The script draws the graph and the memory, and
links lines. Large pages travel compressed and need it; others can be read without.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template

from ..ir.record import CompileRecord, KernelRecord
from ..ir.target import Target, targets
from . import text as report
from .html_pictures import Bar, Point, bars, roofline, waterfall
from .measured import Limits, Measured
from .profile_text import HEAD, OPERATION_HEAD, Row, between_text, call_line, grouped, operation_cells, row_cells

_PAGE, _SCRIPT = (Path(__file__).with_name(f"page.{end}") for end in ("html", "js"))
LARGEST_PLAIN = 256 << 10  # characters of a page that is not compressed
LONGEST_TEXT, MOST_DECISIONS = 60_000, 200  # characters of a listing
MOST_LINES, MOST_FILES, MOST_AROUND = 3, 3, 12  # of an operation; in the title; rejected fusions of a kernel
_HEADING = re.compile(r"(^(//|#(?!include)).*\n)+")  # the comment on top of a source: names and lines


def render_html(graphs: Sequence[CompileRecord], advice: Sequence[str] = (), profile: Measured | None = None) -> str:
    """The whole page."""
    parts = [*_summary(graphs, advice)]
    if profile is not None:
        parts += _measured(profile)
    sources: dict[str, str] = {}  # what was shown, and of which kernel
    for number, graph in enumerate(graphs, 1):
        parts.extend(_graph(graph, number, sources))
    if not graphs:
        parts.append("<p>Nothing was compiled: no tensor operation was captured.</p>")
    parts.append(_data(graphs, profile))
    body, packed = "\n".join(parts), ""
    if len(body) > LARGEST_PLAIN:
        content = base64.b64encode(gzip.compress(body.encode(), mtime=0)).decode()
        body, packed = "<p>This page needs a script.</p>", f'<script type="text/plain" id="packed">{content}</script>'
    script = _SCRIPT.read_text("utf-8")
    digest = "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = f"onepass: {_program_name(graphs)}"
    values = {"body": body, "packed": packed, "script": script, "digest": digest, "title": escape(title)}
    return Template(_PAGE.read_text("utf-8")).substitute(values)


def in_notebook(page: str) -> str:
    """The page in a frame, whose styles stay inside."""
    style = "width:100%;height:640px;border:1px solid #8884;border-radius:6px"
    return f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" style="{style}"></iframe>'


def _program_name(graphs: Sequence[CompileRecord]) -> str:
    """The files that the program's lines are in."""
    lines = [o.get("line", "") for g in graphs for k in g.kernels for o in k.operations]
    lines += [e.line for g in graphs for e in g.externs]
    files = dict.fromkeys(Path(found[1]).name for line in lines if (found := re.match(r"(.*?):\d+", line)))
    return ", ".join([*files][:MOST_FILES]) or "what shares a kernel, and why"


def _data(graphs: Sequence[CompileRecord], profile: Measured | None) -> str:
    """What the script draws."""
    times: dict[tuple[int, str], list[float]] = {}  # of equal calls in the order in which they run
    for step in profile.steps if profile is not None else ():
        times.setdefault((step.graph, step.name), []).append(step.time_us)
    data = []
    for number, g in enumerate(graphs):
        predicted = {k.name: k.predicted_us for k in g.kernels} | {e.name: e.predicted_us for e in g.externs}
        steps = []
        for s in g.flow.steps:
            own = times.get((number, s.name if s.kind == "kernel" else s.op))
            measured = own.pop(0) if own else 0.0
            us, how = (measured, "measured") if measured else (predicted.get(s.name, 0.0), "predicted")
            steps.append({**asdict(s), "line": report.user_line(s.line), "us": us, "how": how})
        unfused = [{**asdict(s), "line": report.user_line(s.line)} for s in g.flow.unfused]
        kernels = [{"name": k.name, "nodes": [o.get("node", "") for o in k.operations]} for k in g.kernels]
        flow = {
            "steps": steps,
            "unfused": unfused,
            "inputs": g.flow.inputs,
            "results": g.flow.results,
            "kernels": kernels,
        }
        data.append(flow)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'


def _summary(graphs: Sequence[CompileRecord], advice: Sequence[str]) -> Iterator[str]:
    yield f"<p class=lead>{report.counts_text(graphs)}</p>"
    if advice:
        yield "<ul class=advice>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in advice) + "</ul>"
    yield waterfall(graphs)
    if moved := report.total(graphs, "bytes_moved"):
        fewer = report.ratio_text(report.total(graphs, "bytes_unfused"), moved)
        yield f"<p>Without fusion {fewer} the bytes would cross memory.</p>"


# --- measured ---


def _measured(profile: Measured) -> Iterator[str]:
    yield f"<section><h2>Where the time goes</h2><p>{escape(profile.device)}, {profile.rounds} rounds in turns</p>"
    calls = [c for c in profile.calls if not c.problem]
    yield bars([Bar(c.name, {"moved": c.time_us}, report.time_text(c.time_us)) for c in calls], "whole calls")
    failed = [call_line(c, profile.call) for c in profile.calls if c.problem]
    yield "".join(f"<p class=problem>{escape(line)}</p>" for line in failed)
    rows = grouped(profile)
    steps = [_step_bar(row, profile.limits) for row in rows]
    yield bars(steps, "steps and their times", "steps")
    yield f"<p>Steps together {report.time_text(profile.steps_us)}; {escape(between_text(profile))}.</p>"
    yield f"<details><summary>Table</summary>{_table((*HEAD, 'lines'), _step_rows(rows, profile.limits))}</details>"
    if parts := [(r.step.name, *operation_cells(p)) for r in rows for p in r.step.parts]:
        yield "<h3>Operations inside kernels</h3>" + _table(("kernel", *OPERATION_HEAD), parts)
    points = [
        Point(r.step.name, r.step.kind, r.step.flops / r.step.bytes_moved, _rate(r), r.share)
        for r in rows
        if r.step.bytes_moved and r.step.time_us
    ]
    yield roofline(points, profile.limits, "measured kernels under the machine's limits")
    yield "</section>"


def _step_rows(rows: Sequence[Row], limits: Limits) -> list[tuple[str, ...]]:
    """The table of the text, with the first lines of each step."""
    shown = [(row, [report.user_line(line) for line in row.step.lines[:MOST_LINES]]) for row in rows[:MOST_DECISIONS]]
    return [(*row_cells(row, limits), "; ".join(lines)) for row, lines in shown]


def _rate(row: Row) -> float:
    return row.step.flops * row.step.runs / row.step.time_us


def _step_bar(row: Row, limits: Limits) -> Bar:
    *_, limit, label = row_cells(row, limits)
    s = row.step
    value = f"{report.time_text(s.time_us)}{f', {limit}' if limit else ''}"
    orders = {"time": -s.time_us, "bytes": -s.bytes_moved * s.runs, "as they run": float(row.first)}
    return Bar(label, {"read" if s.kind == "kernel" else "written": s.time_us}, value, s.kind, orders=orders)


# --- one graph ---


def _graph(graph: CompileRecord, number: int, sources: dict[str, str]) -> Iterator[str]:
    facts = f"target {escape(graph.target)}, cache {escape(graph.cache)}"
    if graph.sizes:
        facts += f"; any sizes, numbers are for {escape(report.sizes_text(graph.sizes))}"
    yield f"<section><h2>Graph {number}: {escape(graph.direction)}</h2><p>{facts}</p>"
    if graph.fallback:
        yield f"<p class=problem>Runs as eager: {escape(graph.fallback)}</p>"
    groups = _equal(graph.kernels)
    if graph.flow.steps:
        yield f'<div class=picture data-graph="{number - 1}"></div>'
        yield f'<h3>Memory over time</h3><div class=held data-graph="{number - 1}"></div>'
    yield from _pictures(graph, groups, number)
    for same in groups:
        yield from _kernel(same, graph, number, sources)
    if graph.externs:
        yield "<h3>Externs</h3>"
        yield _table(("operation", "bytes", "why", "line"), _extern_rows(graph))
    if graph.saved:
        yield f"<h3>Kept for backward: {report.byte_text(graph.saved_bytes)}</h3>"
        kept = [(what, report.byte_text(count), why, line) for count, what, why, line in report.saved_rows(graph)]
        yield _table(("operation", "bytes", "why", "line"), kept)
    if graph.orders:
        yield "<h3>Asked for</h3>" + _table(("what", "by", "line"), report.asked_rows(graph))
    yield from _decisions(graph)
    for title, text in (("Program", graph.program), ("Plan", graph.plan)):
        if text:
            yield f"<details><summary>{title}</summary><pre>{escape(_shortened(text))}</pre></details>"
    if graph.stage_seconds:
        times = [(name, f"{seconds * 1e3:.1f} ms") for name, seconds in graph.stage_seconds.items()]
        yield "<details><summary>Time per stage</summary>" + _table(("stage", "time"), times) + "</details>"
    yield "</section>"


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}\n... (all of it: to_json())"


def _equal(kernels: Sequence[KernelRecord]) -> list[list[KernelRecord]]:
    """Kernels with the same code and numbers together, in the order of the first of them."""
    found: dict[tuple[object, ...], list[KernelRecord]] = {}
    for k in kernels:
        operations = tuple(o.get("op", "") for o in k.operations)
        key = (_body(k.source), k.schedule, k.bytes_read, k.bytes_written, operations, k.tuning)
        found.setdefault(key, []).append(k)
    return list(found.values())


def _body(source: str) -> str:
    """A source without the comment that names its operations."""
    return _HEADING.sub("", source, count=1)


def _extern_rows(graph: CompileRecord) -> list[tuple[str, ...]]:
    """Equal calls as one row."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for e in graph.externs:
        row = e.op, report.byte_text(e.bytes_moved), e.why, report.user_line(e.line)
        counts[row] = counts.get(row, 0) + 1
    return [(f"{n} x {row[0]}" if n > 1 else row[0], *row[1:]) for row, n in counts.items()]


def _label(same: Sequence[KernelRecord]) -> str:
    number = f"{len(same)} x " if len(same) > 1 else ""
    return f"{number}{same[0].name} ({len(same[0].operations)} ops)"


def _pictures(graph: CompileRecord, groups: Sequence[list[KernelRecord]], number: int) -> Iterator[str]:
    """Each launch or call as a bar of its bytes, and the kernels by predicted time under the chip's limits."""
    steps: list[Bar] = []
    for same in groups:
        k, n = same[0], len(same)
        moved = n * (k.bytes_read + k.bytes_written)
        orders = {"as they run": float(len(steps)), "bytes": -moved, "predicted time": -n * k.predicted_us}
        parts = {"read": n * k.bytes_read, "written": n * k.bytes_written}
        steps.append(Bar(_label(same), parts, report.byte_text(moved), "kernel", orders=orders))
    calls: dict[str, int] = {}
    for e in graph.externs:
        calls[e.op] = calls.get(e.op, 0) + e.bytes_moved
    for op, count in calls.items():
        orders = {"as they run": float(len(steps)), "bytes": -count, "predicted time": 0.0}
        steps.append(Bar(op, {"read": count}, report.byte_text(count), "extern", orders=orders))
    if steps:
        yield bars(steps, "kernels and their bytes", f"graph{number}-")
        yield "<p class=legend><span class=read></span>read <span class=written></span>written</p>"
    if (target := targets().get(graph.target)) is not None:
        points = list(_predicted(groups))
        yield roofline(points, _limits(target, points), "kernels by predicted time under the chip's limits")


def _predicted(groups: Sequence[list[KernelRecord]]) -> Iterator[Point]:
    whole = sum(k.predicted_us for same in groups for k in same) or 1.0
    for same in groups:
        k = same[0]
        if (moved := k.bytes_read + k.bytes_written) and k.predicted_us:
            share = len(same) * k.predicted_us / whole
            yield Point(_label(same), "kernel", k.work / moved, k.work / k.predicted_us, share)


def _limits(target: Target, points: Sequence[Point]) -> Limits:
    """What plans are made with: of lanes, or of matrix units where a kernel needs them."""
    by_units = any(p.rate > target.operations_per_us for p in points) and target.products_per_us > 0
    top, what = (target.products_per_us, "matrix units") if by_units else (target.operations_per_us, "lanes")
    source = f"bytes and operations of {what} that {target.name} is planned with ({target.rates.source}); predicted"
    return Limits(target.memory_bytes_per_us, top, source)


def _kernel(same: Sequence[KernelRecord], graph: CompileRecord, number: int, sources: dict[str, str]) -> Iterator[str]:
    kernel = same[0]
    names = escape(" ".join(f"{number - 1}-{k.name}" for k in same))
    yield f'<article data-kernels="{names}">'
    yield f"<h3>{escape(kernel.name)}{f' x {len(same)}' if len(same) > 1 else ''}</h3>"
    yield f"<p>{report.kernel_facts(kernel)}<br><span class=schedule>{escape(kernel.schedule)}</span></p>"
    if resources := report.resources_text(kernel, graph.target):
        yield f"<p>{resources}</p>"
    if len(same) > 1:
        yield f"<p class=schedule>equal: {escape(', '.join(k.name for k in same[1:]))}</p>"
    if kernel.issue:
        yield f"<p>Issue: {escape(report.issue_text(kernel))}</p>"
    if kernel.tuning:
        yield f"<p>Tuning: {escape(kernel.tuning)}</p>"
    if kernel.trials:
        yield "<ul>" + "".join(f"<li>{escape(report.trial_line(t))}</li>" for t in kernel.trials) + "</ul>"
    shorts = [report.short_operation(o.get("op", "")).split(".")[-1] for o in kernel.operations]
    lines = [_lines(same, k) for k in range(len(kernel.operations))]
    once = ["" if k and line == lines[k - 1] else line for k, line in enumerate(lines)]
    rows = [(o.get("op", ""), o.get("node", ""), line) for o, line in zip(kernel.operations, once, strict=True)]
    yield _table(("operation", "node", "line"), rows, shorts)
    nodes = {o.get("node", "") for o in kernel.operations}
    if around := [d for d in report.rejected_by_size(graph.decisions) if {d.producer, d.consumer} & nodes]:
        items = "".join(f"<li>{escape(report.decision_line(d))}</li>" for d in around[:MOST_AROUND])
        yield f"<details><summary>Kept apart from it: {len(around)}</summary><ul>{items}</ul></details>"
    if body := _body(kernel.source):
        if (other := sources.setdefault(body, kernel.name)) == kernel.name:
            yield "<details class=generated><summary>Source</summary>"
            yield f"<pre class=source>{escape(kernel.source)}</pre></details>"
        else:
            yield f"<p class=schedule>source: as of {escape(other)}</p>"
    yield "</article>"


def _lines(same: Sequence[KernelRecord], position: int) -> str:
    """The lines of one operation of equal kernels."""
    lines = dict.fromkeys(report.user_line(k.operations[position].get("line", "")) for k in same)
    more = f" and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
    return "; ".join([*lines][:MOST_LINES]) + more


def _decisions(graph: CompileRecord) -> Iterator[str]:
    if not graph.decisions:
        return
    rejected = report.rejected_by_size(graph.decisions)
    accepted = [d for d in graph.decisions if d.accepted]
    yield f"<h3>Fusions: {len(accepted)} made, {len(rejected)} rejected</h3>"
    for title, decisions in (("Rejected", rejected), ("Made", accepted)):
        if decisions:
            items = [f"<li>{escape(report.decision_line(d))}</li>" for d in decisions[:MOST_DECISIONS]]
            if len(decisions) > MOST_DECISIONS:
                items.append(f"<li>and {len(decisions) - MOST_DECISIONS} more (all of them: to_json())</li>")
            opened = " open" if title == "Rejected" else ""
            yield f"<details{opened}><summary>{title}</summary><ul>{''.join(items)}</ul></details>"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], marks: Sequence[str] = ()) -> str:
    """`marks`: what the script finds each row by."""
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    starts = [f'<tr data-op="{escape(mark)}">' for mark in marks] or ["<tr>"] * len(rows)
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"{start}{row}</tr>" for start, row in zip(starts, cells, strict=True))
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
