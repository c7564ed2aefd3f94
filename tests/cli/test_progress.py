"""Progress is for terminals only."""

from __future__ import annotations

import io

from onepass.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_steps_and_a_clean_line_at_the_end() -> None:
    stream = _Terminal()
    with Progress(stream, 2) as progress:
        progress.step("one")
        progress.step("two")
    assert "[1/2, 0 s] one" in stream.getvalue() and "[2/2, 0 s] two" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_file_sees_nothing() -> None:
    stream = io.StringIO()
    with Progress(stream, 1) as progress:
        progress.step("one")
    assert stream.getvalue() == ""
