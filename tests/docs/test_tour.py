"""The tour shows what the compiler really makes of softmax."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import onepass

TOUR = Path(__file__).resolve().parents[2] / "docs" / "tour.md"


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def test_program_and_plan_are_the_real_ones(request: pytest.FixtureRequest) -> None:
    (record,) = onepass.explain(softmax, torch.randn(4096, 4096)).graphs
    program = re.sub(r"(# \S+)  \S.*", r"\1", record.program)  # without this file's own lines
    text = page = TOUR.read_text()
    for name, content in (("program", program), ("plan", record.plan)):
        text = re.sub(
            rf"(<!-- {name} -->\n```\n).*?\n```", lambda m, c=content: f"{m[1]}{c}\n```", text, flags=re.DOTALL
        )
    if request.config.getoption("--update-golden"):
        TOUR.write_text(text)
    else:
        assert text == page, "docs/tour.md differs; if the change is meant, run pytest --update-golden tests/docs"
