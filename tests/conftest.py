"""What every test sees: a private kernel cache, internal errors raised, compile caches reset between tests."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

_CACHE = "ONEPASS_CACHE_DIR"
_made: list[str] = []
PERIOD = 5  # a rotating test runs once in as many seeds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")
    parser.addoption("--rotate", metavar="SEED", help="of the tests marked rotating, a sample drawn by SEED")


def pytest_configure(config: pytest.Config) -> None:
    # The controller of a parallel run sets these before workers start, so all share one cache.
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="onepass-tests-")
        _made.append(folder)
        os.environ[_CACHE] = folder
    os.environ.setdefault("ONEPASS_STRICT", "1")
    # Two test processes on two cores: threads that spin while waiting would starve each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under --rotate, one in `PERIOD` of the tests marked rotating runs: those whose turn it is by the seed."""
    if (seed := config.getoption("--rotate")) is None:
        return
    now: list[pytest.Item] = []
    later: list[pytest.Item] = []
    for item in items:
        waits = item.get_closest_marker("rotating") and crc32(f"{seed} {item.nodeid}".encode()) % PERIOD
        (later if waits else now).append(item)
    if later:
        items[:] = now
        config.hook.pytest_deselected(items=later)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if (seed := config.getoption("--rotate")) is not None:
        terminalreporter.write_line(f"of rotating tests one in {PERIOD} ran, drawn by --rotate {seed}")


def pytest_unconfigure(config: pytest.Config) -> None:
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nothing compiled by one test is seen by the next, and random numbers start from one place."""
    import torch

    torch.manual_seed(0)
    yield
    if plugging := sys.modules.get("onepass.plugging"):
        plugging.unplug()
    dynamo = getattr(torch, "_dynamo", None)
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are made for a CPU of two cores of Intel, whatever this machine has."""
    from onepass.ir.target import targets

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("onepass.ir.target._has_wide_products", lambda: False)
    targets.cache_clear()
    yield
    targets.cache_clear()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: compare with the file beside the test, or write it under --update-golden."""
    folder = Path(request.path).parent
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = folder / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"{path} is missing; run `make golden` and read it before committing"
        assert text == path.read_text(), f"{path} differs; if the change is meant, run `make golden`"

    return compare
