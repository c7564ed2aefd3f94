"""The command line: what it prints, its exit status, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onepass.cli import main

PROGRAM = """
import torch
from torch import nn

def forward(x):
    return torch.relu(x + 1)

def forward_inputs():
    return torch.randn(8, 16)

def pair(x, *, scale):
    return x * scale

def pair_inputs():
    return {"x": torch.randn(4, requires_grad=True), "scale": 2.0}

def used_once(x=torch.ones(7)):
    return torch.sin(x * 3.75) - 0.125

def unknown(x, y):
    return x + y

def defaults(n=4):
    return torch.arange(n) * 2

def failing(x=1):
    raise ValueError("first line\\nsecond line")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LayerNorm(16)

    def forward(self, x):
        return self.layer(x)

Net_inputs = forward_inputs
net = Net()
net_inputs = forward_inputs
constant = 3
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "program_of_the_user.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))
    return str(path)


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


def test_explain_prints_the_report(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{program}:forward"]) == 0
    captured = capsys.readouterr()
    assert "1 graph" in captured.out and "unfused" in captured.out
    assert captured.err == ""  # not a terminal: no progress


def test_explain_json_has_forward_and_backward(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{program}:pair", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [graph["direction"] for graph in data["graphs"]] == ["forward", "backward"]


def test_explain_writes_html(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", f"{program}:forward", "--html", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert capsys.readouterr().err == f"wrote {page}\n"
    assert (
        "cannot write" in _error(capsys, "explain", f"{program}:forward", "--html", str(tmp_path / "no" / "x")).lower()
    )


@pytest.mark.parametrize(("name", "graphs"), [("Net", 2), ("net", 2), ("defaults", 1)])
def test_explain_takes_modules_classes_and_defaults(
    name: str, graphs: int, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{program}:{name}", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["graphs"]) == graphs


def test_explain_with_inputs_of_the_command_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", f"{program}:unknown", "--input", "4x8", "--input", "4x8:bfloat16", "--train", "--json"]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert [graph["direction"] for graph in data["graphs"]] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unknown", "unknown_inputs()"),
        ("absent", "Functions there: forward, forward_inputs"),
        ("constant", "has no function constant"),
        ("failing", "ValueError: first line (ONEPASS_DEBUG=1 shows where)"),
    ],
)
def test_explain_errors(name: str, expected: str, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in _error(capsys, "explain", f"{program}:{name}")


def test_explain_errors_about_the_file_and_options(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not FILE.py:NAME" in _error(capsys, "explain", "program.py")
    assert "no file nowhere.py" in _error(capsys, "explain", "nowhere.py:f")
    assert "SHAPE[:DTYPE]" in _error(capsys, "explain", f"{program}:unknown", "--input", "4xx")
    assert "SHAPE[:DTYPE]" in _error(capsys, "explain", f"{program}:unknown", "--input", "4:nothing")
    assert "Known targets" in _error(capsys, "explain", f"{program}:forward", "--target", "abacus")


def test_debug_shows_the_traceback(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEPASS_DEBUG", "1")
    assert main(["explain", f"{program}:failing"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_cache(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "cache")
    assert main(["cache"]) == 0
    assert "0 B (0 graphs, 0 kernels)" in capsys.readouterr().out
    main(["explain", f"{program}:used_once"])
    capsys.readouterr()
    main(["cache", "size"])
    assert "(1 graph, 1 kernel)" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "freed" in capsys.readouterr().out
    main(["cache", "size"])
    assert "0 B" in capsys.readouterr().out


def test_cache_folder_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be used"):
        assert main(["cache", "size"]) == 1
    assert "set ONEPASS_CACHE_DIR" in capsys.readouterr().err


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0 and capsys.readouterr().out.startswith("onepass ")
    with pytest.raises(SystemExit) as exit_:
        main(["explode"])
    assert exit_.value.code == 2
    with pytest.raises(SystemExit) as exit_:
        main(["cache", "size", "--loud"])
    assert exit_.value.code == 2 and "--loud" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(program: str) -> None:
    code = "import sys; from onepass.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "explain", f"{program}:forward"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
