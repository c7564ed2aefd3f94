"""Nothing that a test plugs in stays for the next."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import onepass
from onepass import plugging
from tests.steering import kernels


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", onepass.KernelWarning)
        yield
    plugging.unplug()


@pytest.fixture
def triton_norm(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The norm's launchers, forward and backward, run by Triton's interpreter."""
    if kernels.triton is None:
        pytest.skip("no Triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return kernels.norm_launchers()


@pytest.fixture(scope="session")
def c_softmax(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return kernels.c_launchers(tmp_path_factory.mktemp("c"))
