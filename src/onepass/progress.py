"""Progress of long work: one line on a terminal, rewritten in place; nothing elsewhere."""

from __future__ import annotations

import time
from typing import TextIO


class Progress:
    """`step(name)` shows what runs now, out of `total` steps, with the seconds so far."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream, self._total, self._done = stream, total, 0
        self._shown = stream.isatty()
        self._start = time.monotonic()

    def step(self, name: str) -> None:
        """Announce the next step."""
        self._done += 1
        self._show(f"[{self._done}/{self._total}, {time.monotonic() - self._start:.0f} s] {name} ...")

    def clear(self) -> None:
        """Take the line away, so that other output can be printed."""
        self._show("")

    def _show(self, line: str) -> None:
        if self._shown:
            self._stream.write(f"\r\x1b[K{line}")
            self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
