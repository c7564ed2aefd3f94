"""Plots as SVG text: time over floor per workload, the roofline, price against measurement. Axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from .report import floor_seconds, measured_systems

COLOURS = {
    "eager": "#888888",
    "inductor": "#d55e00",
    "inductor-max": "#e69f00",
    "xla": "#0072b2",
    "hand": "#cc79a7",
    "sdpa-cudnn": "#0072b2",
    "sdpa-flash": "#56b4e9",
    "flex": "#cc79a7",
    "cublas": "#f0e442",
    "cublaslt": "#b8a800",
    "onepass": "#009e73",
}
_ROW, _LEFT, _RIGHT, _TOP, _WIDTH = 22, 300, 30, 60, 900
_SIDE, _HEIGHT = 80, 560


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        part = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 of every decade; of many decades only the powers of ten."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1,) if last - first > 3 else (1, 2, 5)
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def floor_plot(result: dict[str, Any]) -> str:
    """A line per workload, a dot per system: how many times the floor it takes."""
    ratios = {
        name: {s: t / floor_seconds(w, result["ceilings"]) for s, t in w["seconds"].items()}
        for name, w in result["workloads"].items()
    }
    values = [ratio for row in ratios.values() for ratio in row.values()] or [1.0]
    bottom = _TOP + _ROW * len(ratios)
    axis = Axis(min(0.9, *values) / 1.1, max(2.0, *values) * 1.1, _LEFT, _WIDTH - _RIGHT)
    shapes = _legend(measured_systems(result), _LEFT)
    for tick in axis.ticks():
        shapes += [
            _line(axis.at(tick), _TOP, axis.at(tick), bottom, "#333333" if tick == 1 else "#dddddd"),
            _text(axis.at(tick), bottom + 18, f"{tick:g}", "middle"),
        ]
    for number, (name, row) in enumerate(ratios.items()):
        y = _TOP + _ROW * (number + 0.5)
        shapes.append(_text(_LEFT - 12, y + 4, name, "end"))
        if row:
            shapes.append(_line(axis.at(min(row.values())), y, axis.at(max(row.values())), y, "#cccccc"))
        shapes += [_dot(axis.at(ratio), y, s, f"{name}, {s}: {ratio:.2f} x floor") for s, ratio in row.items()]
    return _page(f"Time over floor, {result['facts']['device']}", shapes, bottom + 40)


def roofline_plot(result: dict[str, Any]) -> str:
    """Arithmetic intensity against the rate reached, under the two ceilings."""
    bandwidth, peak = (result["ceilings"][key] for key in ("bytes_per_second", "flops_per_second"))
    points = [
        (w["minimum_flops"] / w["minimum_bytes"], w["minimum_flops"] / seconds, system, name)
        for name, w in result["workloads"].items()
        for system, seconds in w["seconds"].items()
    ]
    ridge = peak / bandwidth
    lowest = min([ridge, *(p[0] for p in points)]) / 2
    across = Axis(lowest, max([ridge, *(p[0] for p in points)]) * 4, _SIDE, _WIDTH - _RIGHT)
    low = min([bandwidth * lowest, *(p[1] for p in points)]) / 2
    up = Axis(low, max([peak, *(p[1] for p in points)]) * 2, _HEIGHT - 50, _TOP)
    shapes = _legend(measured_systems(result), _SIDE)
    for tick in across.ticks():
        shapes += [
            _line(across.at(tick), _TOP, across.at(tick), _HEIGHT - 50, "#eeeeee"),
            _text(across.at(tick), _HEIGHT - 32, f"{tick:g}", "middle"),
        ]
    for tick in up.ticks():
        shapes += [
            _line(_SIDE, up.at(tick), _WIDTH - _RIGHT, up.at(tick), "#eeeeee"),
            _text(_SIDE - 8, up.at(tick) + 4, f"{tick / 1e9:g}", "end"),
        ]
    shapes += [
        _line(across.at(lowest), up.at(bandwidth * lowest), across.at(ridge), up.at(peak), "#333333"),
        _line(across.at(ridge), up.at(peak), _WIDTH - _RIGHT, up.at(peak), "#333333"),
        _text(_WIDTH / 2, _HEIGHT - 10, "FLOPs per byte", "middle"),
        _text(_SIDE - 8, _TOP - 8, "GFLOP/s", "end"),
    ]
    shapes += [_dot(across.at(x), up.at(y), s, f"{name}, {s}: {y / 1e9:.4g} GFLOP/s") for x, y, s, name in points]
    return _page(f"Roofline, {result['facts']['device']}", shapes, _HEIGHT)


def price_plot(title: str, kernels: list[tuple[float, float, str]], near: float) -> str:
    """Price and measured time of kernels, in us, with their program; lines where they agree and where they are near."""
    times = [time for price, measured, _ in kernels for time in (price, measured)] or [1.0]
    low, high = min(times) / 1.2, max(times) * 1.2
    across, up = Axis(low, high, _SIDE, _WIDTH - _RIGHT), Axis(low, high, _HEIGHT - 50, _TOP)
    shapes = []
    for tick in across.ticks():
        shapes += [
            _line(across.at(tick), _TOP, across.at(tick), _HEIGHT - 50, "#eeeeee"),
            _line(_SIDE, up.at(tick), _WIDTH - _RIGHT, up.at(tick), "#eeeeee"),
            _text(across.at(tick), _HEIGHT - 32, f"{tick:g}", "middle"),
            _text(_SIDE - 8, up.at(tick) + 4, f"{tick:g}", "end"),
        ]
    for factor, colour in ((1.0, "#333333"), (near, "#bbbbbb"), (1 / near, "#bbbbbb")):
        first, last = max(low, low / factor), min(high, high / factor)
        shapes.append(_line(across.at(first), up.at(first * factor), across.at(last), up.at(last * factor), colour))
    for price, measured, program in kernels:
        title_text = escape(f"{program}: {measured:.1f} us, price {price:.1f}")
        at = f'cx="{across.at(price):.1f}" cy="{up.at(measured):.1f}"'
        shapes.append(f'<circle {at} r="3" fill="{COLOURS["onepass"]}"><title>{title_text}</title></circle>')
    shapes += [
        _text(_WIDTH / 2, _HEIGHT - 10, "price, us", "middle"),
        _text(_SIDE - 8, _TOP - 8, "measured, us", "end"),
    ]
    return _page(title, shapes, _HEIGHT)


def curve_plot(result: dict[str, Any]) -> str:
    """The loss of each step, and below it how far two curves are apart: eager from eager, and from onepass."""
    runs, steps = result["runs"], result["steps"]
    apart = {
        name: [sum(abs(r["eager"][k] - r[other][k]) for r in runs) / len(runs) for k in range(steps)]
        for name, other in (("eager", "turned"), ("onepass", "onepass"))
    }
    seen = [v for line in apart.values() for v in line if v > 0] or [1.0]
    up = Axis(min(seen) / 1.5, max(seen) * 1.5, 2 * _HEIGHT - 50, _HEIGHT + 20)
    highest = max(max(r["eager"]) for r in runs)

    def right(step: int) -> float:
        return _SIDE + (_WIDTH - _RIGHT - _SIDE) * step / max(1, steps - 1)

    def path(values: list[float], height: Callable[[float], float], system: str) -> str:
        points = " ".join(f"{right(k):.1f},{height(v):.1f}" for k, v in enumerate(values))
        return f'<polyline points="{points}" fill="none" stroke="{COLOURS[system]}"/>'

    def loss_at(value: float) -> float:
        return _HEIGHT - 40 - (_HEIGHT - 40 - _TOP) * value / highest

    shapes = _legend(["eager", "onepass"], _SIDE)
    for tick in range(math.floor(highest) + 1):
        shapes += [
            _line(_SIDE, loss_at(tick), _WIDTH - _RIGHT, loss_at(tick), "#eeeeee"),
            _text(_SIDE - 8, loss_at(tick) + 4, f"{tick}", "end"),
        ]
    for value in up.ticks():
        shapes += [
            _line(_SIDE, up.at(value), _WIDTH - _RIGHT, up.at(value), "#eeeeee"),
            _text(_SIDE - 8, up.at(value) + 4, f"{value:g}", "end"),
        ]
    for run in runs:
        shapes += [path(run[system], loss_at, system) for system in ("eager", "onepass")]
    shapes += [path([max(v, up.low) for v in line], up.at, system) for system, line in apart.items()]
    shapes += [
        _text(_WIDTH / 2, _HEIGHT - 16, f"loss, {steps} steps, {len(runs)} runs", "middle"),
        _text(
            _WIDTH / 2, 2 * _HEIGHT - 20, "mean distance from eager: of eager in another order, of onepass", "middle"
        ),
    ]
    return _page(f"Training, {result['facts']['device']}", shapes, 2 * _HEIGHT)


def _legend(systems: list[str], left: float) -> list[str]:
    shapes = []
    step = min(105.0, (_WIDTH + _RIGHT - left) / max(1, len(systems)))
    for number, system in enumerate(systems):
        x = left + step * number
        shapes += [_dot(x + 6, 42, system, system), _text(x + 16, 46, system, "start")]
    return shapes


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(x: float, y: float, system: str, title: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[system]}"><title>{escape(title)}</title></circle>'


def _page(title: str, shapes: list[str], height: float) -> str:
    size = f'width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    body = [
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="22" font-size="15">{escape(title)}</text>',
    ]
    return "\n".join([head, *body, *shapes, "</svg>"])
