"""The notebook runs from top to bottom, and its counts by hand are what is planned."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "fusion.ipynb"


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and {c["cell_type"] for c in notebook["cells"]} == {"markdown", "code"}
    module = ModuleType("fusion_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dynamo looks globals up by the name of their module
    names = vars(module)
    shown: Any = None
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None  # results are of the reader's machine
            shown = run_cell("".join(cell["source"]), cell["id"], names)
    assert shown._repr_html_().startswith("<iframe")  # the last cell shows a page
    text = capsys.readouterr().out
    assert text.count("times as fast") == 7 and "nothing is saved by fusing" in text and "by hand: 24.0 MiB" in text


def run_cell(text: str, name: str, names: dict[str, Any]) -> Any:
    """The value of a last line that is an expression, as a notebook shows it."""
    *statements, last = ast.parse(text).body
    with torch.random.fork_rng():
        exec(compile(ast.Module(statements, []), name, "exec"), names)
        if isinstance(last, ast.Expr):
            return eval(compile(ast.Expression(last.value), name, "eval"), names)
        exec(compile(ast.Module([last], []), name, "exec"), names)
    return None
