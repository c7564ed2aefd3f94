"""`onepass doctor` on a sound machine, and with each thing broken in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepass.cli import doctor
from onepass.cli.doctor import run_doctor


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))


def _lines() -> tuple[int, dict[str, str]]:
    shown: list[str] = []
    status = run_doctor(shown.append)
    return status, {line[9:21].strip(): line for line in shown}


def test_a_sound_machine() -> None:
    status, lines = _lines()
    assert status == 0, lines
    assert all(line.startswith("ok") for line in lines.values())
    assert "1 kernel" in lines["a kernel"]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    status, lines = _lines()
    assert status == 1
    assert lines["C compiler"].startswith("problem") and "Install gcc or clang" in lines["C compiler"]


def test_an_unusable_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "file"))
    status, lines = _lines()
    assert status == 1 and lines["cache"].startswith("problem")


def test_old_versions_and_two_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_OLDEST_TORCH", (99, 0))
    monkeypatch.setattr(doctor, "_openmp_runtimes", lambda: {"libgomp.so.1", "libiomp5.so"})
    status, lines = _lines()
    assert status == 1
    assert lines["torch"].startswith("problem") and lines["OpenMP"].startswith("problem")
