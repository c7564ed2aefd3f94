"""The module graph of a package and its cycles; every import counts, for type checking and inside functions, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, set[str]]


def modules_of(package: Path) -> Graph:
    """The modules of a package, named from inside it (`ir.expr`), with the modules that each imports.

    The package's own `__init__` is "". A package is not counted as imported by its modules, although Python imports it.
    """
    files = {_name(path.relative_to(package)): path for path in package.rglob("*.py")}
    return {name: set(_imported(name, path, package.name, set(files))) - {name} for name, path in files.items()}


def _name(relative: Path) -> str:
    return ".".join(relative.with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def _imported(name: str, path: Path, package: str, known: set[str]) -> Iterator[str]:
    inside = [package, *name.split(".")] if name else [package]
    here = inside if path.name == "__init__.py" else inside[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = [*base, *(node.module.split(".") if node.module else [])]
            targets = [[*source, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        else:
            continue
        for first, *rest in targets:
            if first == package:
                whole, parent = ".".join(rest), ".".join(rest[:-1])
                yield whole if whole in known else parent


def cycles(graph: Graph) -> list[set[str]]:
    """Largest sets of two or more modules each of which reaches all the others."""
    reached = {name: _reachable(name, graph) for name in graph}
    found: list[set[str]] = []
    for name in graph:
        cycle = {other for other in reached[name] if name in reached.get(other, ())}
        if len(cycle) > 1 and cycle not in found:
            found.append(cycle)
    return found


def _reachable(name: str, graph: Graph) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[name])
    while waiting:
        other = waiting.pop()
        if other not in seen:
            seen.add(other)
            waiting.extend(graph.get(other, ()))
    return seen
