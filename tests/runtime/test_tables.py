"""Tables of a launch: found again by their words, never changed, kept for captured graphs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from onepass.runtime import tables
from onepass.runtime.tables import MOST_TABLES, DeviceTables


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    state = {"now": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["now"])
    monkeypatch.setattr(tables, "_captured", [])
    return state


def words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def test_equal_words_have_one_table(capturing: dict[str, bool]) -> None:
    table = DeviceTables("cpu", (7, 8), 2)
    first = table((32, 64), 0)
    assert words_at(first, 4) == [32, 64, 7, 8]
    assert table((32, 64), 0) == first
    other = table((32, 80), 0)
    assert other != first and words_at(first, 4) == [32, 64, 7, 8]


def test_another_stream_has_a_table_of_its_own(capturing: dict[str, bool]) -> None:
    table = DeviceTables("cpu", (), 1)
    assert table((16,), 0) != table((16,), 1)


def test_an_address_that_is_not_aligned_shows_in_the_tables_own(capturing: dict[str, bool]) -> None:
    table = DeviceTables("cpu", (3,), 2)
    assert table((32, 64), 0) % 16 == 0
    odd = table((32, 68), 0)
    assert odd % 16 == 8 and words_at(odd, 3) == [32, 68, 3]
    assert table((32, 64), 5) % 16 == 0
    assert DeviceTables("cpu", (5,), 1)((32, 7), 0) % 16 == 0  # a number need not be


def test_few_tables_are_kept(capturing: dict[str, bool]) -> None:
    table = DeviceTables("cpu", (), 1)
    for k in range(3 * MOST_TABLES):
        table((16 * k,), 0)
    assert len(table._known) == MOST_TABLES


def test_what_a_capture_made_stays_and_is_not_used_outside(capturing: dict[str, Any]) -> None:
    table = DeviceTables("cpu", (1,), 1)
    before = table((16,), 0)
    capturing["now"] = True
    inside = table((16,), 0)
    assert inside != before and len(tables._captured) == 1
    capturing["now"] = False
    assert table((16,), 0) == before
