"""Pictures of a report as HTML and SVG: bars, a waterfall of bytes, the roofline. No scripts; every name escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from ..ir.record import CompileRecord
from .measured import Limits
from .text import byte_text, ratio_text, total

_WIDE, _HIGH, _LEFT, _BELOW, _TOP = 480, 300, 52, 34, 12  # of the roofline, in units of about a pixel
_LEAST_RADIUS, _MOST_RADIUS = 3.0, 10.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a chart: a label, parts by the kind of their colour, and what stands behind them.

    `orders`: the places of the row by what rows can be sorted by. `gap`: what the parts are shifted by.
    """

    label: str
    parts: Mapping[str, float]
    value: str
    kind: str = ""
    gap: float = 0.0
    orders: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    """One kernel of the roofline: operations per byte, operations per microsecond, and its part of the time."""

    label: str
    kind: str
    intensity: float
    rate: float
    share: float


def bars(rows: Sequence[Bar], title: str, name: str = "") -> str:
    """Rows of bars; `name`: of the choice by what to sort them, where they have orders."""
    largest = max((b.gap + sum(b.parts.values()) for b in rows), default=0.0) or 1.0
    sorts = list(rows[0].orders) if rows else []
    choices = "".join(
        f'<input type=radio class="by{k}" name="{escape(name)}" id="{escape(name)}{k}"{" checked" if not k else ""}>'
        f'<label for="{escape(name)}{k}">{escape(how)}</label>'
        for k, how in enumerate(sorts)
    )
    places = [_places(rows, how) for how in sorts]
    made = []
    for number, b in enumerate(rows):
        style = ";".join(f"--o{k}:{place[number]}" for k, place in enumerate(places))
        made.append(f'<div class=row style="{style}">{_bar(b, largest)}</div>')
    head = f'<div class=chart role=img aria-label="{escape(title)}">{choices}'
    return f"{head}<div class=rows>{''.join(made)}</div></div>"


def _places(rows: Sequence[Bar], how: str) -> list[int]:
    """The place of each row, sorted by one of its orders."""
    places = [0] * len(rows)
    for place, k in enumerate(sorted(range(len(rows)), key=lambda k: rows[k].orders[how])):
        places[k] = place
    return places


def _bar(b: Bar, largest: float) -> str:
    parts = f'<i style="width:{100 * b.gap / largest:.2f}%"></i>' if b.gap else ""
    for kind, size in b.parts.items():
        parts += f'<i class="{kind}" style="width:{100 * size / largest:.2f}%"></i>'
    label = f'<span class="label {b.kind}" title="{escape(b.label)}">{escape(b.label)}</span>'
    return f"{label}<span class=track>{parts}</span><span class=value>{escape(b.value)}</span>"


def waterfall(graphs: Sequence[CompileRecord]) -> str:
    """Bytes: unfused, what fusing saves, what moves, what is above the minimum, the minimum."""
    moved, unfused, least = (total(graphs, f"bytes_{name}") for name in ("moved", "unfused", "minimum"))
    rows = [
        Bar("unfused", {"unfused": unfused}, f"{byte_text(unfused)} {ratio_text(unfused, moved)}"),
        Bar("saved by fusing", {"less": max(0, unfused - moved)}, byte_text(unfused - moved), gap=min(moved, unfused)),
        Bar("moved", {"moved": moved}, byte_text(moved)),
        Bar("above the minimum", {"less": max(0, moved - least)}, byte_text(moved - least), gap=min(moved, least)),
        Bar("minimum", {"minimum": least}, f"{byte_text(least)} {ratio_text(least, moved)}"),
    ]
    if saved := total(graphs, "saved_bytes"):
        rows.append(Bar("saved for backward", {"saved": saved}, byte_text(saved)))
    return bars(rows, "bytes unfused, moved and at least")


def roofline(points: Iterable[Point], limits: Limits, title: str) -> str:
    """Every kernel under the chip's limits, on logarithmic axes; empty where there is nothing to place."""
    shown = [p for p in points if p.intensity > 0 and p.rate > 0]
    if not shown or not limits.bytes_per_us:
        return ""
    ridge = limits.flops_per_us / limits.bytes_per_us
    xs = [p.intensity for p in shown] + [ridge or 1.0]
    x = _Scale(min(xs) / 2, max(xs) * 4, _LEFT, _WIDE - 8)
    roofs = [min(limits.bytes_per_us * x.low, limits.flops_per_us or math.inf), limits.flops_per_us]
    ys = [p.rate for p in shown] + [r for r in roofs if r]
    y = _Scale(min(ys) / 2, max(ys) * 2, _HIGH - _BELOW, _TOP)
    shapes = [*_grid(x, y), _roof(x, y, limits)]
    for p in sorted(shown, key=lambda p: -p.share):
        radius = _LEAST_RADIUS + (_MOST_RADIUS - _LEAST_RADIUS) * math.sqrt(min(1.0, p.share))
        about = f"{p.label}: {p.rate / 1e3:.3g} G operations/s, {p.intensity:.3g} per byte, {100 * p.share:.1f} %"
        place = f'cx="{x.at(p.intensity):.1f}" cy="{y.at(p.rate):.1f}" r="{radius:.1f}"'
        shapes.append(f'<circle class="{p.kind}" {place}><title>{escape(about)}</title></circle>')
    middle = (_LEFT + _WIDE) / 2
    shapes.append(f'<text x="{middle:.0f}" y="{_HIGH - 4}" text-anchor="middle">operations per byte</text>')
    shapes.append(f'<text x="{_LEFT + 6}" y="{_TOP + 10}">G operations per second</text>')
    head = f'<svg class=roofline viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="{escape(title)}">'
    legend = (
        "<p class=legend><span class=kernel></span>kernel <span class=extern></span>library; area: part of the time"
    )
    return f"{head}{''.join(shapes)}</svg>{legend}<br>limits: {escape(limits.source)}</p>"


@dataclass(frozen=True, slots=True)
class _Scale:
    """A logarithmic scale from values to places."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        part = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.first + (self.last - self.first) * min(1.0, max(0.0, part))

    def decades(self) -> list[float]:
        return [10.0**k for k in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)]


def _grid(x: _Scale, y: _Scale) -> Iterable[str]:
    for value in x.decades():
        place = f"{x.at(value):.1f}"
        yield f'<line class=grid x1="{place}" x2="{place}" y1="{_TOP}" y2="{_HIGH - _BELOW}"/>'
        yield f'<text x="{place}" y="{_HIGH - _BELOW + 14}" text-anchor="middle">{value:g}</text>'
    for value in y.decades():
        place = f"{y.at(value):.1f}"
        yield f'<line class=grid x1="{_LEFT}" x2="{_WIDE - 8}" y1="{place}" y2="{place}"/>'
        yield f'<text x="{_LEFT - 4}" y="{place}" text-anchor="end" dy="4">{value / 1e3:g}</text>'


def _roof(x: _Scale, y: _Scale, limits: Limits) -> str:
    top = limits.flops_per_us or math.inf
    corners = [x.low, *([top / limits.bytes_per_us] if top < math.inf else []), x.high]
    places = [f"{x.at(v):.1f},{y.at(min(top, v * limits.bytes_per_us)):.1f}" for v in corners]
    return f'<polyline class=roof points="{" ".join(places)}"/>'
