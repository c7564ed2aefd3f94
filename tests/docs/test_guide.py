"""The guide's pages run: Python blocks in order, commands by the command line, files where a comment names them."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from onepass.cli import main

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
BLOCK = re.compile(r"(?:<!-- file: (\S+) -->\n)?```(python|sh)\n(.*?)\n```", re.DOTALL)


@pytest.mark.parametrize("page", sorted(GUIDE.glob("*.md")), ids=lambda p: p.stem)
def test_every_block_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "sm_90" in page.read_text():
        pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    names: dict[str, object] = {"__name__": page.stem}
    before = set(sys.modules)
    blocks = BLOCK.findall(page.read_text())  # files of two pages have different names: dynamo remembers modules
    assert {kind for _, kind, _ in blocks} == {"python", "sh"}
    for file, kind, text in blocks:
        if file:
            (tmp_path / file).write_text(text)
        elif kind == "sh":
            for line in text.splitlines():
                command, *arguments = shlex.split(line)
                assert command == "onepass" and main(arguments) == 0, (line, capsys.readouterr().err)
        else:
            exec(compile(text, f"{page.name} block", "exec"), names)
    for module in {Path(file).stem for file, _, _ in blocks if file} & (set(sys.modules) - before):
        del sys.modules[module]


def test_the_profile_page_shows_the_tables_head() -> None:
    from onepass.explain.profile_text import HEAD

    shown = (GUIDE / "profile.md").read_text()
    assert re.search(r"\s+".join(map(re.escape, HEAD)), shown)
