"""`--rotate SEED`: a sample of the tests marked rotating, and all of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import PERIOD, pytest_collection_modifyitems


def kept(seed: str | None, names: list[str], marked: bool = True) -> set[str]:
    """The tests of these names that run."""
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config: Any = SimpleNamespace(getoption=lambda _: seed, hook=hook)
    items: list[Any] = [SimpleNamespace(nodeid=n, get_closest_marker=lambda _: marked or None) for n in names]
    pytest_collection_modifyitems(config, items)
    assert sorted(i.nodeid for i in (*items, *left_out)) == sorted(names)
    return {i.nodeid for i in items}


NAMES = [f"tests/a.py::test_b[{k}]" for k in range(1000)]


def test_a_sample_of_the_marked_ones() -> None:
    assert 0.8 < len(kept("2026-320", NAMES)) * PERIOD / len(NAMES) < 1.2
    assert kept("2026-320", NAMES) == kept("2026-320", NAMES) != kept("2026-321", NAMES)
    assert set().union(*(kept(f"2026-{day:03}", NAMES) for day in range(1, 61))) == set(NAMES)


def test_all_of_the_others() -> None:
    assert kept("2026-320", NAMES, marked=False) == set(NAMES)
    assert kept(None, NAMES) == set(NAMES)
