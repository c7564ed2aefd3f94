"""The documentation as a site: `make docs` writes `build/site/index.html` from the repository's own pages.

Every page keeps its path with another ending, so links between pages work here as they do in the repository. Links to
other files are copied, if they are pictures, or become names. Needs the package `markdown`, nothing else.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import sys
from pathlib import Path

import markdown

ROOT = Path(__file__).resolve().parent.parent
PICTURES = (".svg", ".png")
# A heading of the menu, and its pages: files, or patterns.
MENU: dict[str, tuple[str, ...]] = {
    "Start": ("README.md", "examples/fusion.ipynb", "docs/tour.md"),
    "Guides": ("docs/guide/inference.md", "docs/guide/training.md", "docs/guide/gpus.md", "docs/guide/*.md",
               "docs/steering.md"),
    "Reference": ("docs/api.md", "docs/options.md", "docs/operators.md", "docs/errors.md"),
    "Measured": ("docs/measured.md", "benchmarks/results/*.md"),
    "Inside": ("ARCHITECTURE.md", "docs/decisions/*.md", "CONTRIBUTING.md", "tests/README.md", "CHANGELOG.md"),
}  # fmt: skip
STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --accent: #3a9d6e; }
body { font: 16px/1.55 system-ui, sans-serif; margin: 0; display: grid; grid-template-columns: 16rem minmax(0, 52rem);
  gap: 2.5rem; background: Canvas; color: CanvasText; }
nav { padding: 1rem; border-right: 1px solid var(--line); font-size: 14px; max-height: 100vh; overflow: auto;
  position: sticky; top: 0; box-sizing: border-box; }
nav a { display: block; padding: .1rem 0; } nav b { display: block; margin: .8rem 0 .2rem; }
nav .here { font-weight: 600; }
main { padding: 1rem 1rem 4rem; min-width: 0; overflow-wrap: anywhere; }
a { color: var(--accent); text-decoration: none; } img { max-width: 100%; }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; border-radius: 4px; overflow-wrap: normal;
  font: 13px/1.45 ui-monospace, monospace; }
code { font-family: ui-monospace, monospace; font-size: .92em; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 14px; overflow-wrap: normal; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
@media (max-width: 800px) { body { display: block; }
  nav { position: static; max-height: 14rem; border: 0; border-bottom: 1px solid var(--line); } }
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - onepass</title><style>{style}</style></head>
<body><nav>{menu}</nav><main>{body}</main></body></html>
"""


def pages() -> dict[str, list[Path]]:
    """The pages under each heading, relative to the repository, each once."""
    seen: set[Path] = set()
    found: dict[str, list[Path]] = {}
    for heading, patterns in MENU.items():
        for pattern in patterns:
            for path in sorted(ROOT.glob(pattern)):
                if path not in seen:
                    seen.add(path)
                    found.setdefault(heading, []).append(path.relative_to(ROOT))
    return found


def address(path: Path) -> Path:
    """Where a page is in the site."""
    return Path("index.html") if path == Path("README.md") else path.with_suffix(".html")


def title(text: str, path: Path) -> str:
    first = re.search(r"^# (.+)$", text, re.MULTILINE)
    return first[1].replace("`", "") if first else path.stem


def text_of(path: Path) -> str:
    """A page as Markdown; of a notebook, its cells."""
    text = (ROOT / path).read_text("utf-8")
    if path.suffix != ".ipynb":
        plots = [p for p in sorted((ROOT / path).parent.glob("*.svg")) if p.stem.rpartition("-")[0] == path.stem]
        return text + "".join(f"\n\n![{p.stem}]({p.name})" for p in plots)
    cells = [("".join(c["source"]), c["cell_type"]) for c in json.loads(text)["cells"]]
    return "\n\n".join(f"```python\n{source}\n```" if kind == "code" else source for source, kind in cells)


def linked(body: str, path: Path, known: dict[Path, Path], out: Path) -> str:
    """Links to pages lead to them in the site; pictures come along; other files of the repository are names."""

    def changed(found: re.Match[str]) -> str:
        attribute, target = found[1], html.unescape(found[2])
        file, _, place = target.partition("#")
        if "://" in target or not file:
            return found[0]
        wanted = Path(os.path.normpath(path.parent / file))
        here = address(path).parent
        if wanted in known:
            to = os.path.relpath(known[wanted], here) + (f"#{place}" if place else "")
            return f'{attribute}="{html.escape(to)}"'
        if wanted.suffix in PICTURES and (ROOT / wanted).is_file():
            (out / wanted).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / wanted, out / wanted)
            return f'{attribute}="{html.escape(os.path.relpath(wanted, here))}"'
        return f'title="{html.escape(str(wanted))}"'

    return re.sub(r'\b(href|src)="([^"]*)"', changed, body)


def build(out: Path) -> list[Path]:
    """Write the site; what was written."""
    menu = pages()
    known = {path: address(path) for own in menu.values() for path in own}
    texts = {path: text_of(path) for path in known}
    slug = lambda value, separator: re.sub(r"[^\w\- ]", "", value.lower()).replace(" ", separator)  # noqa: E731
    written = []
    for path, place in known.items():
        settings = {"toc": {"slugify": slug}}
        made = markdown.markdown(texts[path], extensions=["tables", "fenced_code", "toc"], extension_configs=settings)
        links = ""
        for heading, own in menu.items():
            links += f"<b>{heading}</b>"
            for other in own:
                to = html.escape(os.path.relpath(known[other], place.parent))
                here = " class=here" if other == path else ""
                links += f'<a href="{to}"{here}>{html.escape(title(texts[other], other))}</a>'
        body = linked(made, path, known, out)
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        page = PAGE.format(title=html.escape(title(texts[path], path)), style=STYLE, menu=links, body=body)
        (out / place).write_text(page, "utf-8")
        written.append(out / place)
    return written


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    print(f"wrote {len(build(folder))} pages: {folder / 'index.html'}")
