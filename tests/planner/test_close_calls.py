"""Close calls: who is asked, what about, and what the answer does. The times are made up."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tuning.planned import traced
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from onepass.ir.options import Options
from onepass.ir.plan import Decision, Group
from onepass.ir.program import Extern
from onepass.ir.record import CompileRecord
from onepass.ir.target import find_target
from onepass.ir.verify import verify_program
from onepass.pipeline import PlannedGraph, lower, plan_graph
from onepass.planner import close_calls, contractions
from onepass.planner.close_calls import CloseCalls, Times, Verdict
from onepass.planner.regions import Regions

KINDS = ("chain", "rows", "product", "beside")


@dataclass
class Asked:
    """Gives verdicts in order, the last one again and again; keeps the questions."""

    script: Sequence[Verdict]
    questions: list[tuple[Regions, Regions]] = field(default_factory=list)

    def __call__(self, together: Regions, apart: Regions, expected: tuple[float, float]) -> Verdict:
        assert min(expected) > 0
        if not apart.regions:  # products in kernels are not what lowering makes
            verify_program(apart.program)
        self.questions.append((together, apart))
        return self.script[min(len(self.questions), len(self.script)) - 1]


ONE_KERNEL, LIBRARY = Verdict(43.6, 94.5), Verdict(94.5, 43.6)


def planned(function: Callable[..., Any], judge: Asked | None, *shapes: tuple[int, ...]) -> PlannedGraph:
    with FakeTensorMode():
        graph = traced(function, *(torch.empty(s, dtype=torch.bfloat16) for s in shapes))
    return plan_graph(lower(graph, find_target("sm_90"), Options(), CompileRecord()), CompileRecord(), judge)


def decided(graph: PlannedGraph) -> list[Decision]:
    return [d for d in graph.plan.decisions if d.kind in KINDS]


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


GELU = (4096, 1024), (4096, 1024), (4096,)  # predicted 59.1 us in one kernel, 74.1 us apart


def predicted() -> tuple[str, str]:
    """The predicted times of GELU in one kernel and apart, as a reason writes them."""
    (decision,) = decided(planned(gelu, None, *GELU))
    times = re.match(r"predicted ([\d.]+) us in one kernel, ([\d.]+) us by the library", decision.reason)
    assert times, decision.reason
    return times[1], times[2]


@pytest.mark.parametrize("verdict", [ONE_KERNEL, LIBRARY])
def test_the_answer_decides(verdict: Verdict) -> None:
    judge = Asked([verdict])
    graph = planned(gelu, judge, *GELU)
    (decision,) = decided(graph)
    assert len(judge.questions) == 1 and decision.accepted == (verdict is ONE_KERNEL)
    times = f"{verdict.together_us} us in one kernel, {verdict.apart_us} us by the library and kernels around it"
    assert decision.reason == f"measured {times} (predicted {', '.join(predicted())})"
    assert decision.saved_us == pytest.approx(verdict.apart_us - verdict.together_us)
    steps = [type(s) for s in graph.plan.steps]
    assert steps == ([Group] if verdict is ONE_KERNEL else [Extern, Group])


def test_both_ways_are_asked_about() -> None:
    judge = Asked([ONE_KERNEL])
    planned(gelu, judge, *GELU)
    ((together, apart),) = judge.questions
    assert [r.members for r in together.regions] == [together.program.statements] and not apart.regions
    assert [type(s) for s in apart.program.statements] == [Extern, type(together.program.statements[1])]
    for regions in (together, apart):
        assert {b.name for b in regions.program.inputs} == {"a0", "a1", "a2"}  # type: ignore[union-attr]
        (result,) = regions.program.outputs
        assert result.is_whole and result.buffer.name == "b1"


def test_without_a_judge_prediction_decides() -> None:
    (decision,) = decided(planned(gelu, None, *GELU))
    one, apart = predicted()
    assert decision.accepted == (float(one) < float(apart)) and decision.accepted


def test_what_is_clear_is_not_asked_about() -> None:
    """Attention that is predicted to gain, rows that are predicted to lose, and what is mostly launching."""
    judge = Asked([LIBRARY])
    many = planned(lambda q, k, v: torch.softmax(torch.tanh(q @ k.mT), -1) @ v, judge, *[(4, 16, 1024, 64)] * 3)
    few = planned(lambda x, w: torch.softmax(x @ w, -1), judge, (4096, 64), (64, 4096))
    small = planned(gelu, judge, (64, 64), (64, 64), (64,))
    assert not judge.questions
    assert [{d.accepted for d in decided(graph)} for graph in (many, few, small)] == [{True}, {False}, {True}]


@pytest.mark.parametrize(
    ("together", "apart", "asked"),
    [(100, 170, True), (170, 100, True), (100, 180, False), (180, 100, False), (9, 9.9, False), (9, 10.1, True)],
)
def test_what_close_is(together: float, apart: float, asked: bool) -> None:
    assert Times(together, apart).are_close == asked


def test_a_problem_leaves_it_to_prediction() -> None:
    (decision,) = decided(planned(gelu, Asked([Verdict(problem="no memory")]), *GELU))
    assert decision.accepted and decision.reason.startswith(f"predicted {predicted()[0]} us in one kernel")
    assert decision.reason.endswith("; not measured: no memory")


def test_a_kernel_that_spills_loses() -> None:
    (decision,) = decided(planned(gelu, Asked([Verdict(lost="its kernel spills 64 bytes")]), *GELU))
    assert not decision.accepted and decision.reason.startswith(
        f"its kernel spills 64 bytes; predicted {predicted()[0]} us"
    )


def test_what_is_done_anyway_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over rows would compute GELU in passing: of what is measured apart, a trip through memory is its own."""
    monkeypatch.setattr(contractions, "REDUCED", ())

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return gelu(x, w, b).sum(0)

    target = find_target("sm_90")
    spared = target.launch_us + 2 * 4096 * 4096 * 2 / target.memory_bytes_per_us
    shapes = (4096, 4096), (4096, 4096), (4096,)
    for margin in (-0.2, 0.2):
        judge = Asked([Verdict(100.0, 100.0 + spared + margin)])
        last = [d for d in decided(planned(function, judge, *shapes)) if d.kind == "product"][-1]
        assert judge.questions and last.accepted == (margin > 0)
        assert f", {spared:.1f} us of it done anyway" in last.reason


def test_regions_of_one_product_are_asked_about_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shorter tail of a product would be another question."""
    monkeypatch.setattr(close_calls, "CLOSE", 1e9)

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        for k in range(6):
            y = torch.cos(y) * (k + 2)
        return y

    judge = Asked([LIBRARY])
    found = decided(planned(function, judge, (4096, 1024), (1024, 4096)))
    assert len(judge.questions) == close_calls.MOST_LOST < len(found) and not any(d.accepted for d in found)
    assert "measured and lost" in found[-1].reason
    spent = Asked([LIBRARY, Verdict(problem="the time is spent")])
    assert not any(d.accepted for d in decided(planned(function, spent, (4096, 1024), (1024, 4096))))


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contractions, "REDUCED", (contractions.ROWS,))
    for verdict in (ONE_KERNEL, LIBRARY):
        judge = Asked([verdict])
        found = [
            d
            for d in decided(planned(lambda x, w: torch.logsumexp(x @ w, -1), judge, (8192, 128), (128, 2048)))
            if d.kind == "rows"
        ]
        assert judge.questions and found[0].accepted == (verdict is ONE_KERNEL)
        assert found[0].reason.startswith(f"measured {verdict.together_us} us in one kernel")


def heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, q), torch.relu(F.linear(x, k)), F.linear(x, v)


HEADS = (4096, 2048), (2048, 2048), (512, 2048), (512, 2048)


@pytest.mark.parametrize("accepted", [True, False])
def test_side_by_side(accepted: bool) -> None:
    """One product is a kernel with its epilogue by then; the alternative keeps that."""
    judge = Asked([ONE_KERNEL, ONE_KERNEL if accepted else LIBRARY])
    graph = planned(heads, judge, *HEADS)
    (decision,) = [d for d in decided(graph) if d.kind == "beside"]
    assert decision.accepted == accepted and decision.reason.startswith("measured ")
    assert "us side by side in one launch, " in decision.reason and " us in 3 (predicted " in decision.reason
    together, apart = judge.questions[-1]
    (joined,) = together.regions
    assert joined.chosen and len(joined.chosen.schedule.shares) == 3 and len(together.program.outputs) == 3
    assert [len(r.members) for r in apart.regions] == [2]
    assert [type(s) for s in apart.program.statements].count(Extern) == 2
    assert len(graph.plan.steps) == (1 if accepted else 3)


def test_what_is_computed_again_is_read_where_others_store_it() -> None:
    """Apart, a mask that others store is an input; one that only this region reads has to be made."""

    def function(x: Tensor, w: Tensor, s: Tensor, shared: bool) -> tuple[Tensor, ...]:
        scaled = w * s
        result = x @ scaled
        return (result, scaled) if shared else (result,)

    for shared in (True, False):
        judge = Asked([Verdict(problem="none")])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(close_calls, "CLOSE", 1e9)
            planned(lambda *a: function(*a, shared), judge, (4096, 1024), (1024, 4096), (1, 4096))  # noqa: B023
        together, apart = judge.questions[0]
        assert len(together.program.statements) == 2 and len(together.regions[0].again) == 1
        assert len(apart.program.statements) == (1 if shared else 2)
        assert len(apart.program.outputs) == 1


def test_a_question_is_made_only_where_it_is_asked() -> None:
    calls = CloseCalls(None)
    decision = Decision("a", "b", "product", True, "predicted")
    assert calls.settle(decision, Times(100, 100), lambda: pytest.fail("nobody asks")) is decision
