"""The examples run, quickly, and do what they say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> object:
    monkeypatch.setattr(sys, "argv", [name, "--quick", *options])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name).main()


@pytest.mark.rotating
def test_a_small_gpt_learns_as_eager_does(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = run("train_gpt", monkeypatch, "--device", "cpu")
    assert compiled == pytest.approx(run("train_gpt", monkeypatch, "--device", "cpu", "--eager"), abs=1e-3)
    assert compiled < 4.0  # from 4.5


@pytest.mark.rotating
def test_an_image_classifier_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("classify_images", monkeypatch) > 0.9
    assert "onepass profile" in capsys.readouterr().out


@pytest.mark.rotating
def test_a_serving_loop_answers_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("serve", monkeypatch) < 1e-5


def test_every_example_is_here() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == {"train_gpt.py", "classify_images.py", "serve.py"}
