"""The limits of the package, which may only go down: lines of code, of a file, of a function; import cycles.

A number above its limit fails. A limit that is higher than it needs to be is named, so that it is lowered in the same
change. Complexity is ruff's to judge (C901); functions that ask ruff to look away are counted here.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from module_graph import cycles, modules_of

# Of all Python files, without blank lines, comments and docstrings. The aim is 15,000 and what later capabilities add:
# backward of attention has about 650 of these lines, losses in chunks of rows 1,080, masks known at compile time,
# undefined tangents and sizes of 1 together 330, masks from data that are asked before 330, what is kept for backward
# 460, scans 550, recurrences 970, tensors in one launch 930, CUDA graphs 870, attention in training and its rows 226,
# what users ask of a plan 380, kernels and rewrites that they plug in 1,370, exported programs and many processes
# 1,150, profiles 960, advice 160, the command line and files that show a problem 190, the page 530, issue times 270.
CODE_LINES = 30970
FILE_LINES = 600
FUNCTION_LINES = 60
DOCSTRING_LINES = 12
COMPLEX_FUNCTIONS = 0  # with `noqa: C901`; the aim is none
# Functions longer than FUNCTION_LINES, and how long they may be. The list may only shrink.
LONG_FUNCTIONS: dict[str, int] = {}
# Modules that import each other, imports for type checking and inside functions counted. The list may only shrink.
CYCLES: tuple[set[str], ...] = ()
PACKAGE = Path(__file__).resolve().parent.parent / "src" / "onepass"
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Lines of a file that hold code: no blank lines, no comments, no docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(ast.parse(text))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def excesses(path: Path, name: str) -> Iterator[str]:
    """One message for each limit that the file breaks. `name`: the file's path in the package."""
    text = path.read_text()
    if (lines := len(text.splitlines())) > FILE_LINES:
        yield f"{path}: {lines} lines, at most {FILE_LINES}"
    tree = ast.parse(text)
    if (docstring := len((ast.get_docstring(tree) or "").splitlines())) > DOCSTRING_LINES:
        yield f"{path}: module docstring of {docstring} lines, at most {DOCSTRING_LINES}"
    for function, length in functions(tree):
        limit = LONG_FUNCTIONS.get(f"{name}: {function.name}", FUNCTION_LINES)
        if length > limit:
            yield f"{path}:{function.lineno}: {function.name} has {length} lines, at most {limit}"


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Every function of a file and the number of its lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, (node.end_lineno or node.lineno) - node.lineno + 1


def ratchet(what: str, count: int, limit: int, constant: str) -> tuple[list[str], list[str]]:
    """What is wrong with a count, and what may be lowered."""
    if count > limit:
        return [f"{what}: {count}, at most {limit}"], []
    return [], [f"{what}: {count}, lower {constant} from {limit}"] if count < limit else []


def over_cycles(found: list[set[str]], known: tuple[set[str], ...] = CYCLES) -> tuple[list[str], list[str]]:
    """Cycles that are not part of a known one, and known ones that became smaller or are gone."""
    wrong = [f"import cycle: {', '.join(sorted(c))}" for c in found if not any(c <= k for k in known)]
    loose = [f"import cycle smaller or gone, change CYCLES: {', '.join(sorted(k))}" for k in known if k not in found]
    return wrong, loose


def main() -> int:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    texts = {name: path.read_text() for name, path in files.items()}
    wrong = [message for name, path in files.items() for message in excesses(path, name)]
    total, complex_functions = sum(map(code_lines, texts.values())), sum(t.count("noqa: C901") for t in texts.values())
    results = [
        ratchet("code lines of the package", total, CODE_LINES, "CODE_LINES"),
        ratchet("functions with `noqa: C901`", complex_functions, COMPLEX_FUNCTIONS, "COMPLEX_FUNCTIONS"),
        over_cycles(cycles(modules_of(PACKAGE))),
    ]
    wrong += [message for result in results for message in result[0]]
    loose = [message for result in results for message in result[1]]
    lengths = {f"{name}: {f.name}": n for name, text in texts.items() for f, n in functions(ast.parse(text))}
    loose += [
        f"shorter or gone, change LONG_FUNCTIONS: {k}" for k, n in LONG_FUNCTIONS.items() if lengths.get(k, 0) < n
    ]
    print("\n".join([*wrong, *loose, f"code lines: {total}, at most {CODE_LINES}", *([] if wrong else ["limits: ok"])]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
