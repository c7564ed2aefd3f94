"""The import rule: ir < analysis < stages < explain < pipeline < {tuning, resources} < judging < building < compilation
< plugging < backend. Stages stay apart.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "onepass"
STAGES = {"lowering", "autograd", "planner", "schedule", "codegen", "runtime"}
RANK = {
    "errors": 0,
    "ir": 1,
    "analysis": 2,
    **dict.fromkeys(STAGES, 3),
    "explain": 4,
    "pipeline": 5,
    "tuning": 6,
    "resources": 6,
    "judging": 7,
    "building": 8,
    "compilation": 9,
    "plugging": 10,
    "backend": 11,
}
TOP = 12  # the package itself, the command line, the demo: may import everything
STAGES_WITH_PRIVATE_TORCH = ("autograd", "explain", "lowering", "runtime")
PRIVATE_TORCH = {"backend.py", *(f"{stage}/torch_private.py" for stage in STAGES_WITH_PRIVATE_TORCH)}


def unit(relative: Path) -> str:
    """The folder or module of the layer picture that a file belongs to."""
    return relative.parts[0].removesuffix(".py")


def imported(path: Path, relative: Path) -> Iterator[str]:
    """Units of onepass that the file imports at module level or inside functions, type checking excluded."""
    here = ["onepass", *relative.parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            if module == ["onepass"]:
                yield from (name.name for name in node.names)
            elif module[:1] == ["onepass"]:
                yield module[1]
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("onepass."):
                    yield name.name.split(".")[1]


def rank(name: str) -> int:
    return RANK.get(name, TOP)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    mine = unit(relative)
    if rank(mine) == TOP:
        return
    for other in set(imported(path, relative)) - {mine}:
        assert (PACKAGE / other).exists() or (PACKAGE / f"{other}.py").exists() or other == "__version__", other
        assert rank(other) < rank(mine), f"{relative} imports {other}: {mine} must not know it"


def test_the_rule_can_fail(tmp_path: Path) -> None:
    wrong = tmp_path / "cost.py"
    wrong.write_text("from ..schedule import x\nfrom onepass import backend\nimport onepass.runtime.cache\n")
    assert set(imported(wrong, Path("planner/cost.py"))) == {"schedule", "backend", "runtime"}


def test_private_torch_is_in_one_place() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = str(path.relative_to(PACKAGE))
        if relative in PRIVATE_TORCH:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [n.name for n in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                private = parts[0] == "torch" and any(p.startswith("_") for p in parts[1:])
                assert not private, f"{relative}: {name} is private to torch; import it in {sorted(PRIVATE_TORCH)}"
