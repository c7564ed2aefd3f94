"""The picture of README is that of today's plan."""

from __future__ import annotations

from pathlib import Path

import picture
import pytest


def test_the_picture_is_up_to_date() -> None:
    pytest.importorskip("triton")
    drawn = picture.drawn(picture.record())
    assert drawn == picture.PICTURE.read_text(), "python tools/picture.py draws it again"
    assert "reads 64.0 MiB" in drawn and drawn.count("<rect ") == 7
    assert (
        f"]({picture.PICTURE.relative_to(Path(__file__).resolve().parents[2])})"
        in (picture.PICTURE.parent.parent / "README.md").read_text()
    )
