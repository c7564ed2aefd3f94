"""`make docs`: every page is in the menu, links lead somewhere, pictures come along."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_site(tmp_path: Path) -> None:
    pytest.importorskip("markdown")
    import site_pages

    written = site_pages.build(tmp_path)
    assert tmp_path / "index.html" in written and tmp_path / "docs" / "guide" / "training.html" in written
    root = site_pages.ROOT
    assert {p.relative_to(root) for p in root.glob("docs/**/*.md")} <= {
        p for own in site_pages.pages().values() for p in own
    }
    pictures = 0
    for page in written:
        for kind, target in re.findall(r'\b(href|src)="([^"#]*)', page.read_text()):
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
                pictures += kind == "src"
    assert pictures >= 5 and "<table>" in (tmp_path / "index.html").read_text()
    assert "Kernel fusion, step by step" in (tmp_path / "examples" / "fusion.html").read_text()
