"""Price against measurement without a GPU: a stopwatch that makes times up shows what is kept, counted and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks import prices
from benchmarks.kept import Kept
from tests.oracle.planning import NoCompiler, without_compilers

from onepass.ir.source import Launch, Trial
from onepass.ir.target import find_target
from onepass.runtime.kernels import LoadedKernel
from onepass.runtime.stopwatch import Timing

SM_90 = find_target("sm_90")
PROGRAMS = "count/softmax;sum(relu(2x))"
FACTS = {"device": "a chip", "date": "today"}


class MadeUp:
    """Every launch takes as many us as it has programs; `refuses` fails instead."""

    chip = "a chip"

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.launches: list[Launch] = []

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = 0.0) -> Timing:
        (launch,) = trial.launches
        self.launches.append(launch)
        return Timing(problem="out of memory") if self.refuses else Timing(float(launch.programs))


@pytest.fixture
def builder() -> Iterator[NoCompiler]:
    with without_compilers() as found:
        yield found


def run(builder: NoCompiler, stopwatch: Any, kept: Path | None = None, only: str = PROGRAMS) -> dict[str, Any]:
    settings = {"facts": FACTS, "target": "sm_90"}
    return prices.run(only, SM_90, "cpu", builder, stopwatch, Kept(kept, settings), lambda _: None)


def test_every_kernel_is_timed_alone(builder: NoCompiler) -> None:
    stopwatch = MadeUp()
    result = run(builder, stopwatch)
    assert list(result["programs"]) == [
        "count/softmax",
        "count/softmax and logsumexp",
        "count/softmax by hand",
        "memory gpu/sum(relu(2x)) 16384x8192",
    ]
    first, finish = result["programs"]["memory gpu/sum(relu(2x)) 16384x8192"]["kernels"]
    assert (first["kernel"][-8:], finish["kernel"][-7:]) == ("_partial", "_finish")
    assert first["bytes_moved"] > 16384 * 8192 * 2 and first["measured_us"] == first["programs"] > 100
    assert finish["programs"] == finish["measured_us"] == 1 and finish["warps"] > 0
    assert len(stopwatch.launches) == 5


def test_a_run_goes_on_where_it_stopped(builder: NoCompiler, tmp_path: Path) -> None:
    run(builder, MadeUp(), tmp_path / "kept", "count/softmax by hand")
    again = MadeUp()
    result = run(builder, again, tmp_path / "kept", "count/softmax")
    assert len(result["programs"]) == 3 and len(again.launches) == 2


def test_what_cannot_be_timed_is_no_measurement(builder: NoCompiler) -> None:
    result = run(builder, MadeUp(refuses=True), only="count/softmax by hand")
    (kernel,) = result["programs"]["count/softmax by hand"]["kernels"]
    assert (kernel["measured_us"], kernel["problem"]) == (0.0, "out of memory")
    assert not prices.distinct(result)


def kernel(content: str, price_us: float, measured_us: float) -> dict[str, Any]:
    row = prices.Priced("forward", "k0", content, "c0[8]: grid", price_us, measured_us, 8_000_000, 32, 0, 0, 4, 132)
    return prices.asdict(row)


MEASURED = {
    "facts": FACTS,
    "target": "sm_90",
    "programs": {
        "sweep/a": {"kernels": [kernel("1", 20, 24), kernel("2", 20, 60)], "problems": []},
        "layer/b": {"kernels": [kernel("1", 20, 24), kernel("3", 30, 10), kernel("5", 2, 8)], "problems": []},
    },
}


def test_the_summary_counts_each_kernel_once() -> None:
    kernels = list(prices.distinct(MEASURED).values())
    assert [k["program"] for k in kernels] == ["sweep/a", "sweep/a", "layer/b", "layer/b"]
    # ratios 1.2, 3, 1/3 and 4, the last of a short kernel
    assert prices.summary(kernels) == ["4", "25 %", "1.48", "3", "33 %", "3.00"]
    assert [prices.half_of(k) for k in kernels] == ["reported", "fitted", "reported", "reported"]


def test_the_report_and_the_plot_show_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "facts_lines", lambda _: [])
    found = prices.files("chip", MEASURED)
    assert set(found) == {"chip-prices.json", "chip-prices.md", "chip-prices.svg"}
    assert json.loads(found["chip-prices.json"]) == MEASURED
    assert "| fitted | 1 | 0 % | 3.00 | 1 | 0 % | 3.00 |" in found["chip-prices.md"]
    assert "| sweep/a | forward k0 | 60.0 | 20.0 | 3.00 | 8.0 | 32 | 0 | 132 | c0[8]: grid |" in found["chip-prices.md"]
    assert found["chip-prices.svg"].count("<circle") == 4 and "layer/b: 8.0 us, price 2.0" in found["chip-prices.svg"]


def test_the_sets_have_kernels_enough() -> None:
    assert len(prices.chosen("")) > 180
