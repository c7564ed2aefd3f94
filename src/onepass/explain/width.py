"""Reports that fit the terminal: long lines are continued below, indented, and nothing is cut away."""

from __future__ import annotations

import os
import re
import shutil
import sys

LEAST = 40  # columns; nothing is readable in fewer
BOLD, DIM, GREEN, YELLOW = "1", "2", "32", "33"
# What lines of a report look like, and their colour.
_COLOURS = ((r"(onepass|graph \d+ of|advice)\b.*", BOLD), (r"  kernel .*", GREEN), (r"  extern .*", YELLOW),
            (r" +(schedule|resources|predicted times:|fusions:|issue:) .*", DIM))  # fmt: skip


def terminal_width() -> int:
    """Columns of the terminal that is printed to; 0 where it is none."""
    return max(LEAST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 0


def fitted(text: str, width: int | None = None) -> str:
    """The text with no line wider than so many columns, or than the terminal; 0: as it is."""
    columns = terminal_width() if width is None else width
    return "\n".join(part for line in text.split("\n") for part in _parts(line, columns)) if columns else text


def painted(text: str) -> str:
    """The text with colours, if a terminal reads it that wants them."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return "\n".join(map(_painted, text.split("\n")))


def _painted(line: str) -> str:
    colour = next((c for pattern, c in _COLOURS if re.match(pattern, line)), "")
    return f"\x1b[{colour}m{line}\x1b[0m" if colour else line


def _parts(line: str, width: int) -> list[str]:
    parts: list[str] = []
    indent = len(line) - len(line.lstrip(" "))
    deeper = " " * min(indent + 4, width // 2)
    while len(line) > width:
        spaces = [m.start() for m in re.finditer(r"(?<=[^ ]) ", line[: width + 1])]
        at = spaces[-1] if spaces and spaces[-1] > len(deeper) else width
        parts.append(line[:at].rstrip(" "))
        line = deeper + line[at:].lstrip(" ")
    return [*parts, line]
