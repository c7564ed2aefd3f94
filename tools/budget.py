"""Line budgets: a file of the package has at most 600 lines, a function at most 80, a docstring at most 12."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 600
FUNCTION_LINES = 80
DOCSTRING_LINES = 12
PACKAGE = Path(__file__).resolve().parent.parent / "src" / "onepass"


def excesses(path: Path) -> Iterator[str]:
    """One message per budget the file breaks."""
    text = path.read_text()
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, at most {FILE_LINES}"
    tree = ast.parse(text)
    docstring = len((ast.get_docstring(tree) or "").splitlines())
    if docstring > DOCSTRING_LINES:
        yield f"{path}: module docstring of {docstring} lines, at most {DOCSTRING_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def main() -> int:
    found = [message for path in sorted(PACKAGE.rglob("*.py")) for message in excesses(path)]
    print("\n".join(found) or "line budgets: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
