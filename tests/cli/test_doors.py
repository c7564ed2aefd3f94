"""The doors people come in by: fast help, names that are nearly right, torch's log, a file that shows a problem."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass.cli import main
from onepass.cli.program import random_inputs
from onepass.demo import run as demo
from onepass.errors import OnepassError, UnusableProgram
from onepass.explain.width import fitted, painted, terminal_width
from onepass.profiling.repro import repro_text

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from torch import nn

def forward(x):
    return torch.relu(x + 1)

def two_graphs(x):
    y = torch.sin(x) * 2
    torch._dynamo.graph_break()
    return (y @ y).exp()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(x))

net = Net()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "a_program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(path)


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)


def test_help_does_without_torch() -> None:
    code = """
import sys
sys.argv = ["/usr/bin/onepass", "--help"]
from onepass.cli import main
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules and "profile" in dir(sys.modules["onepass"])
"""
    result = child(code)
    assert result.returncode == 0 and "profile" in result.stdout and "repro" in result.stdout, result.stderr


def test_the_package_shows_what_is_public() -> None:
    assert dir(onepass) == [
        "Explanation", "FallbackWarning", "KernelWarning", "OnepassError", "Profile", "__version__", "explain",
        "export", "fuse", "jit", "keep", "kernel", "load", "no_fuse", "profile", "recompute", "replace", "save",
    ]  # fmt: skip
    assert all(getattr(onepass, name) is not None for name in dir(onepass))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        onepass.nothing  # noqa: B018


@pytest.mark.rotating
def test_torchs_log_has_our_name() -> None:
    code = "import torch; torch.compile(lambda x: x.sin() + 1, backend='onepass')(torch.randn(4))"
    assert "1 kernels" in (told := child(code, TORCH_LOGS="onepass").stderr) and "program(" not in told
    assert "program(a0: float32[4])" in (told := child(code, TORCH_LOGS="+onepass").stderr) and "op_" in told
    decisions = child(code, TORCH_LOGS="+onepass.planner").stderr
    assert "fused (vertical) sin -> add" in decisions and "1 kernels" not in decisions
    assert "aten.sin.default" in (told := child(code, TORCH_LOGS="+onepass.codegen").stderr) and "fused (" not in told


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "onepass: 1 graph\n  kernel k0: reads\n    add  model.py:3"
    assert painted(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert painted(text) == "\x1b[1monepass: 1 graph\x1b[0m\n\x1b[32m  kernel k0: reads\x1b[0m\n    add  model.py:3"
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted(text) == text


def test_names_that_are_nearly_right(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{program}:foward"]) == 1
    assert "Did you mean 'forward'? Functions there: forward, two_graphs, Net" in capsys.readouterr().err
    assert main(["explain", f"{program}:abc"]) == 1
    assert "has no function abc. Functions there: forward" in capsys.readouterr().err
    assert main(["explain", f"{program}:forward", "--input", "4", "--target", "sm_91"]) == 1
    assert "did you mean 'sm_90'" in capsys.readouterr().err


def test_short_names_of_types() -> None:
    found = [t.dtype for t in random_inputs(["2:bf16", "2:f16", "2:fp32", "2:i64", "2:u8", "2:float64"], train=False)]
    assert found == [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.float64]
    with pytest.raises(UnusableProgram, match="8x128:bf16"):
        random_inputs(["2:f31"], train=False)


def test_evaluation_and_no_gradients(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    def graphs(*options: str) -> tuple[list[str], list[str]]:
        assert main(["explain", f"{program}:net", "--input", "8x16", "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)["graphs"]
        operations = [o["op"] for g in found for k in g["kernels"] for o in k["operations"]]
        return [g["direction"] for g in found], operations

    directions, operations = graphs()
    assert directions == ["forward", "backward"] and "onepass.uniform.default" in operations
    directions, operations = graphs("--eval")
    assert directions == ["forward", "backward"] and "onepass.uniform.default" not in operations
    assert sys.modules["a_program"].net.training
    assert graphs("--no-grad")[0] == ["inference"] and torch.is_grad_enabled()


@pytest.mark.rotating
def test_a_wheel_has_all_doors(tmp_path: Path) -> None:
    """The package as it is installed, unpacked: none of its source folder is there."""
    pytest.importorskip("setuptools")
    pytest.importorskip("wheel")
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "benchmarks"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
        )
    code = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(unpacked)
    (tmp_path / "a_program.py").write_text(PROGRAM)

    def run(*arguments: str) -> str:
        variables = {**os.environ, "PYTHONPATH": str(unpacked)}
        command = [sys.executable, "-m", "onepass", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "| softmax |" in run(
        "bench", "--quick", "--only", "softmax", "--systems", "eager,onepass", "--no-compile-time"
    )
    program = ("a_program.py:forward", "--input", "8x8")
    assert "1 kernel" in run("explain", *program, "--html", "page.html") and (tmp_path / "page.html").exists()
    assert "onepass profile" in run("profile", *program, "--seconds", "0.01")
    run("repro", *program)
    assert "Graph 1 of 1" in (tmp_path / "repro.py").read_text()


def test_the_demo_says_where_it_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = onepass.explain(torch.sin, torch.randn(4))
    rows = [demo.Row("a", 1, explanation, 10.0, 11.0, ""), demo.Row("b", 1, explanation, 10.0, 9.0, "")]
    monkeypatch.setattr(demo, "WORKLOADS", demo.WORKLOADS[:2])
    monkeypatch.setattr(demo, "run_workload", lambda workload: rows[demo.WORKLOADS.index(workload)])
    shown: list[str] = []
    assert demo.run_demo(shown.append) == 0
    (line,) = [s for s in shown if s.startswith("SLOWER")]
    assert "SLOWER a: 11.0 ms against 10.0" in line


# --- width ---


def test_reports_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(onepass.explain(lambda x: torch.softmax(x, -1) @ x, torch.randn(64, 64)))
    narrow = fitted(text, 60)
    assert all(len(line) <= 60 for line in narrow.splitlines()) and any(len(line) > 60 for line in text.splitlines())
    assert narrow.split() == text.split() and fitted(text, 0) == text  # nothing is cut away
    long = fitted("  " + "x" * 200, 60)
    assert all(len(line) <= 60 for line in long.splitlines()) and long.count("x") == 200
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "72")
    assert terminal_width() == 72
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert terminal_width() == 0


# --- repro ---


def run_file(text: str, path: Path) -> str:
    path.write_text(text)
    result = child(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.rotating
def test_a_graph_becomes_a_file_that_runs(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "repro.py"
    arguments = ["repro", f"{program}:two_graphs", "--input", "16x16", "--out", str(out)]
    assert main([*arguments, "--graph", "2"]) == 0
    assert "Graph 2 of 2" in out.read_text() and "exp()" in out.read_text()
    shown = run_file(out.read_text(), out)
    assert "largest difference to eager" in shown and "onepass profile" in shown
    assert main([*arguments, "--graph", "3"]) == 1
    assert "Graphs are numbered 1 to 2" in capsys.readouterr().err


def test_the_failing_graph_is_taken_and_data_is_not_written() -> None:
    table = torch.randn(10, 4)

    def function(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(y) + table[i].t()

    def backend(graph: Any, _inputs: Any) -> Any:
        if "torch.cos" in graph.code and ".t()" in graph.code:  # no part of it that has one result fails
            raise OnepassError("too hard\nreally")
        return graph.forward

    x = torch.randn(4, 3).t().contiguous().t()
    text = repro_text(function, (torch.tensor([7, 2, 5]), x), {}, backend, "model.py:f")
    assert "Graph 2 of 2 of model.py:f: OnepassError: too hard." in text
    assert 'made((4, 3), (1, 4), torch.float32, "cpu")' in text and 'made((3,), (1,), torch.int64, "cpu", 2, 7)' in text
    namespace: dict[str, Any] = {"__name__": "a file"}
    exec(compile(text, "repro.py", "exec"), namespace)
    (result,) = namespace["Graph"]()(*namespace["inputs"]())
    assert result.shape == (4, 3)


def test_a_failing_graph_is_shrunk() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.sin(x) + 1
        y = torch.cos(x.t() @ w)
        return y.exp().softmax(-1).sum() + x.mean()

    def backend(graph: Any, inputs: Any) -> Any:
        assert len(inputs) == sum(n.op == "placeholder" for n in graph.graph.nodes)
        graph.forward(*inputs)  # what is left runs
        if "torch.cos" in graph.code and "matmul" in graph.code:
            raise OnepassError("too hard")
        return graph.forward

    text = repro_text(function, (torch.randn(8, 4), torch.randn(8, 3)), {}, backend, "model.py:f")
    title = text.splitlines()[0]
    assert "Graph 1 of 1 of model.py:f, " in title and "left out: OnepassError: too hard." in title
    assert text.count("torch.sin") == 0 and "cos" in text and "softmax" not in text and text.count(" made(") == 2
    namespace: dict[str, Any] = {"__name__": "a file"}
    exec(compile(text, "repro.py", "exec"), namespace)
    (result,) = namespace["Graph"]()(*namespace["inputs"]())
    assert result.shape == (4, 3)


def test_a_real_failure_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.backend import make_backend
    from onepass.lowering.registry import RULES

    def broken(*_: Any) -> Any:
        raise OnepassError("no such rule")

    monkeypatch.setitem(RULES, torch.ops.aten.erfinv.default, broken)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.erfinv(torch.tanh(torch.sin(x) * 2) * 0.5).exp().sum(-1)

    backend = make_backend({"strict": True, "cache": False})
    with torch.no_grad():
        text = repro_text(function, (torch.randn(8, 4),), {}, backend, "model.py:f")
    assert "erfinv(" in text and "torch.sin" not in text and "softmax" not in text and ".exp()" not in text


def test_random_programs_say_that_they_differ() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    text = repro_text(function, (torch.ones(4),), {}, lambda graph, _inputs: graph.forward, "model.py:f")
    assert "eager, which draws other random numbers:" in text


def test_nothing_to_reproduce() -> None:
    with pytest.raises(UnusableProgram, match="no tensor operation"):
        repro_text(lambda: 3, (), {}, lambda graph, _inputs: graph.forward, "model.py:f")
