"""Measuring a region both ways: what is built and run, what is kept, and what it may take."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

import onepass
from onepass import building, judging
from onepass.backend import record_compilations
from onepass.compilation import Compiled, compile_graph
from onepass.errors import KernelBuildError
from onepass.ir.options import Options
from onepass.ir.record import CompileRecord, Decision
from onepass.ir.source import Call, KernelSource, Trial
from onepass.ir.target import find_target
from onepass.pipeline import lower
from onepass.planner import close_calls
from onepass.runtime import kernels as built_kernels
from onepass.runtime.builders import InterpretedBuilder
from onepass.runtime.cache import default_cache
from onepass.runtime.kernels import LoadedKernel
from onepass.runtime.stopwatch import Run, Timing
from onepass.runtime.triton_kernels import Built
from tests.judging.racing import Running, Scripted
from tests.tuning.planned import traced

KINDS = ("chain", "rows", "tiles", "product", "beside")


@pytest.fixture(autouse=True)
def _everything_is_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What interpreters can run is far from ten microseconds. A cache and a memory of the test's own."""
    monkeypatch.setattr(close_calls, "CLOSE", 1e9)
    monkeypatch.setattr(close_calls, "SMALLEST_US", 0.0)
    monkeypatch.setattr(judging, "_known", {})
    monkeypatch.setattr(judging, "FAR", 1e9)
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))
    yield


def compiled(function: Callable[..., Any], stopwatch: Scripted, *inputs: Tensor, **settings: Any) -> Compiled:
    options = Options.make({"strict": True, "tune": "quick", **settings})
    graph = traced(function, *inputs, dynamic=False)
    return compile_graph(graph, find_target("triton-interpret"), options, "inference", stopwatch)


def decided(result: Compiled) -> list[Decision]:
    return [d for d in result.record.decisions if d.kind in KINDS]


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.2, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lower = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.softmax((q @ k.mT * 0.2).masked_fill(~lower, -torch.inf), -1) @ v


def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, q), torch.relu(F.linear(x, k)), F.linear(x, v) * 2


def rows(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1)


def statistics(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scores = x @ w
    return torch.logsumexp(scores, -1), scores.argmax(-1)


def scaled_weights(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return x @ (w * s)


def normal(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(s) for s in shapes)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "gelu": (gelu, normal((37, 24), (19, 24), (19,)), "product"),
    "transposed": (lambda x, w, b: gelu(x.t(), w, b), normal((24, 37), (19, 24), (19,)), "product"),
    "attention": (attention, normal((2, 37, 16), (2, 41, 16), (2, 41, 24)), "chain"),
    "masked": (masked, normal((2, 37, 16), (2, 41, 16), (2, 41, 24)), "chain"),
    "projections": (projections, normal((37, 24), (32, 24), (19, 24), (16, 24)), "beside"),
    "rows": (rows, normal((37, 24), (24, 50)), "rows"),
    "statistics": (statistics, normal((37, 24), (24, 50)), "tiles"),
    "computed again": (scaled_weights, normal((37, 24), (24, 19), (1, 19)), "product"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_ways_compute_what_eager_does(name: str) -> None:
    """On what stands in for inputs: shapes tell which is which, and one region is the whole program."""
    function, inputs, kind = PROGRAMS[name]
    stopwatch, whole = Running(name), 0
    result = compiled(function, stopwatch, *inputs)
    assert any(d.kind == kind and d.reason.startswith("measured ") for d in decided(result))
    for (runs, peak), values, taken in zip(stopwatch.races, stopwatch.values, stopwatch.taken, strict=True):
        together, apart = runs
        assert peak > 0 and together.host != apart.host
        assert _calls(together) == 0 and (_calls(apart) > 0 or kind == "beside")
        for mine, others in zip(*values, strict=True):
            torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-4)
        by_shape = {t.shape: t for i in taken for t in i}
        if by_shape.keys() == {t.shape for t in inputs}:
            eager = _tuple(function(*(by_shape[t.shape] for t in inputs)))
            if len(eager) == len(values[0]):
                whole += 1
                for way in values:
                    for mine, theirs in zip(way, eager, strict=True):
                        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert whole > 0
    for mine, theirs in zip(result.call(list(inputs)), _tuple(function(*inputs)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def _calls(run: Run) -> int:
    """Calls of the library."""
    return sum(isinstance(i, Call) for i in run.host.instructions)


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize(("times", "externs"), [((40.0, 50.0), 0), ((50.0, 40.0), 1)])
def test_the_faster_one_is_taken(times: tuple[float, float], externs: int) -> None:
    function, inputs, _ = PROGRAMS["gelu"]
    stopwatch = Scripted("taken", [times])
    result = compiled(function, stopwatch, *inputs)
    (decision,) = decided(result)
    assert len(result.record.externs) == externs and decision.accepted == (not externs)
    assert f"measured {times[0]} us in one kernel, {times[1]} us by the library" in decision.reason
    torch.testing.assert_close(result.call(list(inputs))[0], function(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("script", "kept", "races"),
    [
        ([(40.0, 96.9), (41.0, 28.5)], (40.0, 28.5), 2),  # one and the same product: the host was measured
        ([(40.0, 96.9), (39.0, 97.0), (41.0, 96.0)], (39.0, 96.0), 3),  # it is as slow as that
        ([(40.0, 59.0)], (40.0, 59.0), 1),
        ([(40.0, 96.9), "out of memory"], None, 2),
    ],
)
def test_a_time_far_above_its_price_is_doubted(
    script: list[Any], kept: tuple[float, float] | None, races: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, inputs, _ = PROGRAMS["gelu"]
    monkeypatch.setattr(judging, "FAR", 2.0)
    stopwatch = Scripted(f"doubt {script}", script)
    judge = judging.Judge._race
    monkeypatch.setattr(judging.Judge, "_race", lambda self, runs, most, _: judge(self, runs, most, (30.0, 30.0)))
    (decision,) = decided(compiled(function, stopwatch, *inputs))
    assert len(stopwatch.races) == races
    if kept is None:
        assert decision.reason.endswith("not measured: out of memory")
    else:
        assert decision.reason.startswith(f"measured {kept[0]} us in one kernel, {kept[1]} us by the library")
        assert decision.accepted == (kept[0] < kept[1])


@dataclass
class Slow(Scripted):
    """Every kernel takes a second."""

    def time(self, trial: Trial, kernels: Sequence[LoadedKernel], worst_us: float = math.inf) -> Timing:
        return Timing(1e6)


@pytest.mark.parametrize(("times", "externs"), [((1e6, 40.0), 1), ((1e6, 2e6), 0)])
def test_a_product_far_above_its_price_is_compared_with_the_library(
    times: tuple[float, float], externs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although prediction leaves no doubt."""
    monkeypatch.setattr(close_calls, "CLOSE", 0.0)
    monkeypatch.setattr("onepass.tuning.SMALLEST_US", 0.0)
    function, inputs, _ = PROGRAMS["gelu"]
    stopwatch = Slow(f"slow {externs}", [times])
    result = compiled(function, stopwatch, *inputs)
    assert len(stopwatch.races) == 1 and len(result.record.externs) == externs
    assert decided(result)[0].reason.startswith(f"measured {times[0]:.1f} us in one kernel, {times[1]:.1f} us by")
    torch.testing.assert_close(result.call(list(inputs))[0], function(*inputs), rtol=1e-4, atol=1e-4)


def layers(x: Tensor, b: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = torch.sin(gelu(x, w, b).sum(-1, keepdim=True) * x)
    return x


def test_equal_layers_are_measured_once() -> None:
    stopwatch = Scripted("layers")
    result = compiled(layers, stopwatch, *normal((37, 24), (24,), *[(24, 24)] * 5))
    asked = [d for d in decided(result) if d.reason.startswith("measured ")]
    assert len(asked) == 5 and len(stopwatch.races) == 1


def test_a_question_that_an_equal_layer_foresaw_is_measured_with_the_buffers_of_that_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first layer asks; kernels were planned for the second, whose question is the same one."""
    foresee, asked = judging.Judge._foresee, set()

    def of_a_later_layer(self: judging.Judge, key: str, *rest: Any) -> Any:
        if key in asked:
            return foresee(self, key, *rest)
        asked.add(key)
        return rest[-1]

    monkeypatch.setattr(judging.Judge, "_foresee", of_a_later_layer)
    stopwatch = Running("another layer")
    result = compiled(layers, stopwatch, *normal((37, 24), (24,), *[(24, 24)] * 5))
    assert sum(d.reason.startswith("measured ") for d in decided(result)) == 5 and len(stopwatch.races) == 1


def test_later_graphs_and_processes_do_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs, _ = PROGRAMS["gelu"]
    stopwatch = Scripted("kept", [(50.0, 40.0), (1.0, 2.0)])
    reasons = [decided(compiled(function, stopwatch, *inputs))[0].reason]
    reasons.append(decided(compiled(lambda *a: (function(*a), a[0] * 2), stopwatch, *inputs))[0].reason)
    assert len(stopwatch.races) == 1
    monkeypatch.setattr(judging, "_known", {})  # as in a new process
    reasons.append(decided(compiled(lambda *a: (function(*a), a[0] + 1), stopwatch, *inputs))[0].reason)
    assert len(stopwatch.races) == 1 and len(set(reasons)) == 1
    another = Scripted("another chip", [(50.0, 40.0)])
    compiled(function, another, *inputs)
    assert len(another.races) == 1


@pytest.mark.parametrize("damage", [b"", b"[1.0]", b"not times"])
def test_a_damaged_entry_is_measured_again(damage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs, _ = PROGRAMS["gelu"]
    stopwatch = Scripted("damaged", [(50.0, 40.0), (30.0, 60.0)])
    compiled(function, stopwatch, *inputs)
    cache = default_cache()
    (path,) = (cache.root / "times").glob("*.json")
    if damage == b"[1.0]":  # whole, but no pair
        cache.write("times", path.stem, [1.0])
    else:
        path.write_bytes(damage)
    monkeypatch.setattr(judging, "_known", {})
    result = compiled(lambda *a: (function(*a), a[0] + 1), stopwatch, *inputs)
    assert len(stopwatch.races) == 2 and decided(result)[0].reason.startswith("measured 30.0 us")
    assert cache.read_times(path.stem) == (30.0, 60.0)


def test_a_warm_start_knows_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs, _ = PROGRAMS["gelu"]
    stopwatch = Scripted("warm", [(50.0, 40.0)])
    cold = compiled(function, stopwatch, *inputs)
    monkeypatch.setattr(building, "Judge", None)  # nobody is there to be asked
    monkeypatch.setattr(built_kernels, "_functions", {})
    warm = compiled(function, stopwatch, *inputs)
    assert warm.record.cache == "hit" and decided(warm) == decided(cold) and len(stopwatch.races) == 1


def test_without_the_cache_nothing_is_stored() -> None:
    function, inputs, _ = PROGRAMS["gelu"]
    compiled(function, Scripted("no cache"), *inputs, cache=False)
    assert default_cache().count()["times"] == 0


def test_off_never_asks() -> None:
    function, inputs, _ = PROGRAMS["gelu"]
    stopwatch = Scripted("off")
    (decision,) = decided(compiled(function, stopwatch, *inputs, tune="off"))
    assert not stopwatch.races and decision.reason.startswith("predicted ")


def test_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = Scripted("budget", [(50.0, 40.0)], seconds=2.0)
    workshop = judging.Workshop
    monkeypatch.setattr("onepass.building.Workshop", lambda *parts: workshop(*parts, stopwatch.now))

    def function(x: Tensor, b: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(gelu(x[: n + 16], w, b) for n, w in enumerate(weights))

    result = compiled(function, stopwatch, *normal((37, 24), (24,), *[(24, 24)] * 4))
    reasons = [d.reason for d in decided(result) if d.kind == "product"]
    assert len(stopwatch.races) == 2  # 3 seconds a graph
    assert [r.startswith("measured ") for r in reasons] == [True, True, False, False]
    assert all(r.endswith("not measured: the time for measuring is spent") for r in reasons[2:])


def test_what_is_no_longer_built_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next plan of a graph foresees its own questions; builds that were given up are over."""
    monkeypatch.setitem(judging.EFFORTS, "quick", replace(judging.EFFORTS["quick"], graph_seconds=0.5))
    graph = lower(
        traced(gelu, *PROGRAMS["gelu"][1]), find_target("triton-interpret"), Options.make({}), CompileRecord()
    )
    judge, slow = (
        judging.Judge(graph, judging.Workshop(InterpretedBuilder(), None, Scripted("slow"))),
        threading.Event(),
    )

    def choose() -> None:
        assert judge._foreseen is not None
        judge._building += [judge._foreseen[0].submit(slow.wait) for _ in range(100)]

    judge.foresee(choose)
    slow.set()
    start = time.monotonic()
    judge.foresee(lambda: None)
    assert time.monotonic() - start < 0.4


def test_a_problem_is_not_kept() -> None:
    function, inputs, _ = PROGRAMS["gelu"]
    stopwatch = Scripted("problem", ["out of memory", (50.0, 40.0)])
    first = compiled(function, stopwatch, *inputs, cache=False)
    second = compiled(function, stopwatch, *inputs, cache=False)
    assert decided(first)[0].reason.endswith("; not measured: out of memory") and decided(first)[0].accepted
    assert decided(second)[0].reason.startswith("measured 50.0 us")


def test_a_plan_that_another_time_may_change_is_not_kept() -> None:
    """Memory was short, or time was: the next process asks again."""
    function, inputs, _ = PROGRAMS["gelu"]
    stopwatch = Scripted("problem again", ["out of memory", (50.0, 40.0)])
    first, second, third = (compiled(function, stopwatch, *inputs) for _ in range(3))
    assert [r.record.cache for r in (first, second, third)] == ["not kept", "miss", "hit"]
    assert decided(second)[0].reason.startswith("measured 50.0 us") and len(stopwatch.races) == 2


def test_states_of_tiles_and_swept_rows_are_two_questions() -> None:
    """The same operations as another kernel."""
    stopwatch = Scripted("tiles", [(90.0, 50.0), (40.0, 50.0)])

    def norms(x: Tensor, w: Tensor) -> Tensor:
        return torch.linalg.vector_norm((x @ w).float(), dim=-1)

    result = compiled(norms, stopwatch, *normal((64, 32), (32, 3000)))
    assert {d.kind: d.accepted for d in decided(result) if d.kind in ("tiles", "rows")} == {
        "tiles": False,
        "rows": True,
    }
    assert len(stopwatch.races) == 2


def with_products(monkeypatch: pytest.MonkeyPatch, built: Built | None) -> None:
    """Kernels with products say this of themselves; None: they cannot be built."""
    load = InterpretedBuilder.load

    def claimed(self: InterpretedBuilder, path: Path, source: KernelSource) -> Any:
        function = load(self, path, source)
        if "tl.dot" in source.text and built is None:
            raise KernelBuildError("the assembler", "it crashed", "")
        if "tl.dot" in source.text:
            function.built = built  # type: ignore[attr-defined]
        return function

    monkeypatch.setattr(built_kernels, "_functions", {})
    monkeypatch.setattr(InterpretedBuilder, "load", claimed)


@pytest.mark.parametrize(
    ("built", "reason"),
    [
        (Built("", 0, 0, 255, 64, b""), "its kernel spills 64 bytes at 255 registers"),
        (Built("", 1 << 30, 0, 1, 0, b""), "its kernel needs 1073741824 bytes of shared memory"),
        (None, "its kernel cannot be built: "),
    ],
)
def test_a_kernel_nobody_would_run_loses(built: Built | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_products(monkeypatch, built)
    function, inputs, _ = PROGRAMS["gelu"]
    stopwatch = Scripted("spills")
    result = compiled(function, stopwatch, *inputs, cache=False)
    (decision,) = decided(result)
    assert not stopwatch.races and not decision.accepted and decision.reason.startswith(reason)
    torch.testing.assert_close(result.call(list(inputs))[0], function(*inputs), rtol=1e-4, atol=1e-4)


def test_the_schedule_that_would_run_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one spills: the next one races, and runs."""
    load, spilling = InterpretedBuilder.load, []

    def claimed(self: InterpretedBuilder, path: Path, source: KernelSource) -> Any:
        function = load(self, path, source)
        if "tl.dot" in source.text:
            spilling.append(source.warps)
            function.built = Built("", 0, 128, 255, 64 if source.warps == spilling[0] else 0, b"")  # type: ignore[attr-defined]
        return function

    monkeypatch.setattr(built_kernels, "_functions", {})
    monkeypatch.setattr(InterpretedBuilder, "load", claimed)
    stopwatch = Running("next schedule")
    inputs = normal((128, 64), (128, 64), (128,))
    result = compiled(gelu, stopwatch, *inputs, cache=False)
    (decision,) = decided(result)
    assert decision.accepted and decision.reason.startswith("measured ") and len(set(spilling)) == 2
    assert "schedule 0 spills 64 bytes" in result.record.decisions[0].reason
    assert stopwatch.races[0][0][0].kernels[0].function.built.spills == 0  # type: ignore[attr-defined]
    torch.testing.assert_close(result.call(list(inputs))[0], gelu(*inputs), rtol=1e-4, atol=1e-4)


def test_what_reads_by_computed_indices_is_not_measured() -> None:
    stopwatch = Scripted("indices")

    def function(x: Tensor, w: Tensor, i: Tensor, t: Tensor) -> Tensor:
        return torch.relu(x @ w + t[i * 2 + 1])

    inputs = (*normal((37, 24), (24, 19)), torch.zeros(37, dtype=torch.long), *normal((5, 19)))
    reasons = [d.reason for d in decided(compiled(function, stopwatch, *inputs))]
    assert not stopwatch.races and any(r.endswith("not measured: what it reads depends on values") for r in reasons)


def test_sizes_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known only at run time: measured as they were when the graph was traced."""
    stopwatch = Running("sizes")
    graph = traced(gelu, *PROGRAMS["gelu"][1], dynamic=True)
    options = Options.make({"strict": True, "tune": "quick"})
    result = compile_graph(graph, find_target("triton-interpret"), options, "inference", stopwatch)
    assert len(stopwatch.races) == 1 and decided(result)[0].reason.startswith("measured ")
    (mine,), (others,) = stopwatch.values[0]
    assert mine.shape == (37, 19)
    torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-4)


def test_a_mistake_of_ours_costs_nothing_but_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs, _ = PROGRAMS["gelu"]

    def broken(*_: Any) -> Any:
        raise AssertionError("a mistake")

    monkeypatch.setattr(judging, "emit_host", broken)
    (decision,) = decided(compiled(function, Scripted("mistake"), *inputs, strict=False))
    assert decision.reason.endswith("not measured: AssertionError: a mistake")
    with pytest.raises(AssertionError):
        compiled(function, Scripted("mistake"), *inputs, cache=False)


def test_explain_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = Scripted("explain", [(94.5, 43.6)])
    monkeypatch.setattr("onepass.compilation.stopwatch_for", lambda *_: stopwatch)
    function, inputs, _ = PROGRAMS["gelu"]
    with torch.no_grad():
        text = str(onepass.explain(function, *inputs, target="triton-interpret", options={"cache": False}))
    assert "measured 94.5 us in one kernel, 43.6 us by the library and kernels around it (predicted " in text
    assert len(stopwatch.races) == 1


def test_tensors_without_memory_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    stopwatch = Scripted("fake")
    monkeypatch.setattr("onepass.compilation.stopwatch_for", lambda *_: stopwatch)
    with FakeTensorMode(), torch.no_grad(), record_compilations() as records:
        onepass.explain(gelu, torch.empty(37, 24), torch.empty(19, 24), torch.empty(19), target="triton-interpret")
    assert not stopwatch.races and not any("measured" in d.reason for r in records for d in r.decisions)
