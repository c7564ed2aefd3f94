"""Progress of long work: one line on a terminal, rewritten in place; nothing elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
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
        if self._shown:
            elapsed = time.monotonic() - self._start
            self._stream.write(f"\r\x1b[K[{self._done}/{self._total}, {elapsed:.0f} s] {name} ...")
            self._stream.flush()

    def clear(self) -> None:
        """Take the line away, so that other output can be printed."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
