"""Reports that fit the terminal: long lines are continued below, indented, and nothing is cut away."""

from __future__ import annotations

import re
import shutil
import sys

LEAST = 40  # columns; nothing is readable in fewer


def terminal_width() -> int:
    """Columns of the terminal that is printed to; 0 where it is none."""
    return max(LEAST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 0


def fitted(text: str, width: int | None = None) -> str:
    """The text with no line wider than so many columns, or than the terminal; 0: as it is."""
    columns = terminal_width() if width is None else width
    return "\n".join(part for line in text.split("\n") for part in _parts(line, columns)) if columns else text


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
