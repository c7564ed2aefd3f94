"""The examples of docs/steering.md run, in order, as one program."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "steering.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_STRICT", "0")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert blocks
    program = tmp_path / "examples.py"  # a file, so that lines of it can be shown
    program.write_text("\n".join(blocks))
    runpy.run_path(str(program), run_name="__main__")
