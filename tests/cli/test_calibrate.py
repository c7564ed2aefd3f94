"""Numbers of a chip are fitted to measured kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from benchmarks import calibrate
from benchmarks.candidates import distinct

from onepass.analysis.price import price
from onepass.ir.rates import H200
from onepass.ir.target import find_target
from onepass.ir.time import total_us

ONLY = "memory gpu/softmax 16384x4096"


def test_a_chip_with_other_rates_is_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times as of a chip that starts programs slowly and issues operations slowly."""
    target = find_target("sm_90")
    slow = replace(target, rates=replace(H200, start_us=0.4, issue_us=0.004, load_us=0.9))
    found = distinct(ONLY, target)
    times = {k: {"measured_us": total_us(price(kernel, slow) for kernel in c.group.kernels)} for k, c in found.items()}
    (tmp_path / "measured.json").write_text(json.dumps(times))
    known = calibrate.samples(times, target, ONLY)
    assert len(known) == len(found) >= 4
    rates = calibrate.fitted(known, target)
    before, after = (calibrate.distance(known, t) for t in (target, replace(target, rates=rates)))
    assert after < 0.3 * before
    with mock.patch("sys.argv", ["calibrate", str(tmp_path / "measured.json"), "--only", ONLY, "--source", "a test"]):
        assert calibrate.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Rates(") and "'a test'" in printed and "other half" in printed


def test_kernels_of_another_version_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "measured.json").write_text(json.dumps({"0123": {"measured_us": 1.0}}))
    with mock.patch("sys.argv", ["calibrate", str(tmp_path / "measured.json"), "--only", ONLY]):
        assert calibrate.main() == 1
    assert "too few to fit" in capsys.readouterr().err
