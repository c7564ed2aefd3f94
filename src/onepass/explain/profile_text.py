"""A profile as text: whole calls side by side, then a table of the steps, those that take longest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .measured import CallTime, Limits, Measured, OperationTime, StepTime
from .text import byte_text, counted, one_line, short_operation, time_text, user_line

SHOWN, LINES_SHOWN = 30, 3  # steps, and lines of each; the rest is in the JSON
LEAST_NAME = 24  # columns for the name of a step, for which others are left out
OPERATION_HEAD = ("exposed", "give or take", "operation", "line, or why there is no time")
_LEFT_OUT = (5, 3, 4, 2)  # columns that go first where the terminal is narrow: FLOP rate, bytes, bandwidth, prediction
HEAD = ("share", "time", "predicted", "moved", "GB/s", "GFLOP/s", "of limit", "step")


@dataclass(frozen=True, slots=True)
class Row:
    """Equal steps together: `count` of them, whose times are added in `step`. `first`: the place of the first one."""

    step: StepTime
    count: int
    share: float
    first: int


def grouped(profile: Measured) -> list[Row]:
    """Steps that do the same on the same lines as one row, those that take longest first."""
    equal: dict[tuple[object, ...], list[StepTime]] = {}
    first: dict[tuple[object, ...], int] = {}
    for number, s in enumerate(profile.steps):
        key: tuple[object, ...] = (
            s.entry,
            s.kind,
            s.direction,
            s.bytes_moved,
            s.flops,
            s.operations,
            s.predicted_us,
            len(s.parts),
        )
        equal.setdefault(key, []).append(s)
        first.setdefault(key, number)
    whole = profile.steps_us or 1.0
    rows = []
    for key, same in equal.items():
        total = sum(s.time_us for s in same)
        lines = tuple(dict.fromkeys(line for s in same for line in s.lines))
        step = replace(same[0], time_us=total, lines=lines, runs=sum(s.runs for s in same))
        rows.append(Row(step, len(same), total / whole, first[key]))
    return sorted(rows, key=lambda r: -r.share)


def render_profile(profile: Measured, width: int = 0) -> str:
    """The full table, with the columns that fit into a width; 0: with all."""
    lines = [f"onepass profile: {profile.device}, {counted(profile.rounds, 'round')} in turns"]
    lines += map(call_line, profile.calls, [profile.calls[0]] * len(profile.calls))
    lines += [f"  limits    {limits_text(profile.limits)}", ""]
    rows = grouped(profile)
    if not rows:
        return "\n".join([*lines, "  no step was seen: nothing of it runs compiled"])
    cells = [HEAD, *(row_cells(row, profile.limits) for row in rows[:SHOWN])]
    widths = {k: max(len(c[k]) for c in cells) for k in range(len(HEAD) - 1)}
    for k in _LEFT_OUT:
        if width and sum(w + 2 for w in widths.values()) + LEAST_NAME > width:
            del widths[k]
    for number, row in enumerate(cells):
        lines.append("  " + "  ".join([*(f"{row[k]:>{w}}" for k, w in widths.items()), row[-1]]))
        if number:
            lines += _about(rows[number - 1])
    if len(rows) > SHOWN:
        left = sum(r.step.time_us for r in rows[SHOWN:])
        lines.append(f"  and {counted(len(rows) - SHOWN, 'smaller step')}: {time_text(left)} (all: to_json())")
    lines.append(f"  steps together {time_text(profile.steps_us)}; {between_text(profile)}")
    return "\n".join(lines)


def call_line(call: CallTime, ours: CallTime) -> str:
    """One way to run the program, and how many times as long as ours it took."""
    if call.problem:
        return f"  {call.name:<9} {one_line(call.problem)}"
    ratio = "" if call is ours else f", {call.time_us / ours.time_us:.2f}x the time of onepass"
    wall = f" on the device, {time_text(call.wall_us)} until it is idle" if call.device_us else ""
    others = f"least {time_text(call.least_us)}, first call {call.first_s:.2f} s"
    return f"  {call.name:<9} {time_text(call.time_us)}{wall}{ratio} ({others})"


def limits_text(limits: Limits) -> str:
    """What the machine can do, and who says so."""
    return f"{limits.bytes_per_us / 1e3:.3g} GB/s, {limits.flops_per_us / 1e3:.3g} GFLOP/s ({limits.source})"


def between_text(profile: Measured) -> str:
    """What of a whole call is outside its steps: guards, Python, allocations, launches."""
    left = profile.call.time_us - profile.steps_us
    return f"outside them {time_text(max(0.0, left))} of {time_text(profile.call.time_us)}"


def row_cells(row: Row, limits: Limits) -> tuple[str, ...]:
    """The cells of one row; empty where nothing is known."""
    s = row.step
    number = f"{row.count} x " if row.count > 1 else ""
    label = f"{number}{one_line(short_operation(s.name) if s.kind == 'extern' else s.name)}"
    if not s.time_us:
        return "", "unmeasured", *_predicted(row), "", "", "", label
    part, which = _mean(row).limit(limits)
    rate = _mean(row).flops_per_us / 1e3
    return (
        f"{100 * row.share:.1f} %",
        time_text(s.time_us),
        *_predicted(row),
        f"{_mean(row).bytes_per_us / 1e3:.3g}" if s.bytes_moved else "",
        f"{rate:.3g}" if rate else "",
        f"{100 * part:.0f} % {which}" if part >= 0.005 else "",
        label,
    )


def _mean(row: Row) -> StepTime:
    """One of the equal steps, with the mean of their times."""
    return replace(row.step, time_us=row.step.time_us / row.count, runs=max(1, row.step.runs // row.count))


def _predicted(row: Row) -> tuple[str, str]:
    s = row.step
    return time_text(s.predicted_us * s.runs) if s.predicted_us else "", byte_text(s.bytes_moved * s.runs)


def _about(row: Row) -> Iterator[str]:
    for line in row.step.lines[:LINES_SHOWN]:
        yield f"      {user_line(line)}"
    if len(row.step.lines) > LINES_SHOWN:
        yield f"      and {len(row.step.lines) - LINES_SHOWN} more lines"
    if row.step.issue:
        yield f"      issue: {row.step.issue}"
    yield from map(_operation_line, _by_time(row.step.parts))
    if row.step.rest_us:
        alone, rest = time_text(row.step.alone_us), time_text(row.step.rest_us)
        yield f"        {rest:>13}  of {alone} by itself is left with a cheap operation in the place of each"


def _by_time(parts: Sequence[OperationTime]) -> list[OperationTime]:
    return sorted(parts, key=lambda p: -p.exposed_us)


def operation_cells(part: OperationTime) -> tuple[str, str, str, str]:
    """An operation inside a kernel: what it costs, give or take how much, its name, its line or why it has no time."""
    name, line = one_line(part.name), user_line(part.line)
    if part.problem:
        return "", "", name, one_line(part.problem)
    spread = time_text(part.spread_us)
    if abs(part.exposed_us) <= part.spread_us:
        return f"below {spread}", "", name, line
    return time_text(part.exposed_us), f"+- {spread}", name, line


def _operation_line(part: OperationTime) -> str:
    exposed, spread, name, about = operation_cells(part)
    return f"        {exposed:>13}  {spread:<10} exposed by {name}  {about}".rstrip()
