"""Advice: ten programs with a known cause, each named with its number; five good programs are met with silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass
from onepass.explain import Explanation
from onepass.explain.measured import StepTime
from onepass.explain.text import advice_text
from onepass.ir.record import CompileRecord, Decision, KernelRecord


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"test_advice.py:{function.__code__.co_firstlineno + offset}"


def one_sentence(advice: list[str]) -> str:
    assert len(advice) == 1, advice
    return advice[0]


# --- records ---


def test_a_graph_break_is_named_with_its_line_and_bytes() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.sin(x) * 2
        torch._dynamo.graph_break()
        return torch.cos(y) + 1

    advice = one_sentence(onepass.explain(function, torch.randn(64, 64)).advice)
    assert "graph break ends graph 1" in advice and line_of(function, 2) in advice
    assert "16.0 KiB of results are written and read again" in advice


def test_float64_in_a_chain_is_named_with_its_line() -> None:
    weights = torch.linspace(0, 1, 64, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        y = torch.sin(x)
        return (y * weights).exp().sum(-1)

    advice = one_sentence(onepass.explain(function, torch.randn(64, 64)).advice)
    assert "float64 enters at " in advice and line_of(function, 2) in advice and "3 operations" in advice
    assert not onepass.explain(lambda x: (x * weights).exp().sum(-1), torch.randn(64, 64).double()).advice


def test_sizes_that_change_are_named() -> None:
    def inner(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.softmax(x * 2, -1)

    def function(x: Tensor) -> list[Tensor]:
        return [inner(x[:n]) for n in (10, 20, 30)]

    advice = onepass.explain(function, torch.randn(64, 64)).advice
    assert any("3 graphs are the same operations at other sizes" in a and "dynamic=True" in a for a in advice), advice


def test_a_graph_that_runs_as_eager_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_STRICT", "0")

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such thing\nmore")

    monkeypatch.setattr("onepass.backend.compile_graph", fail)
    with pytest.warns(onepass.FallbackWarning):
        advice = one_sentence(onepass.explain(torch.sin, torch.randn(4)).advice)
    assert advice == "graph 1 of 1 runs as eager does: RuntimeError: no such thing"


def test_an_operation_that_cuts_a_chain_is_named_with_its_bytes() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.sin(x) * 2
        return torch.sort(y, -1).values.exp() + 1

    advice = one_sentence(onepass.explain(function, torch.randn(64, 64)).advice)
    assert advice.startswith("sort at ") and line_of(function, 2) in advice and "% of all that moves" in advice


def test_nothing_to_fuse() -> None:
    advice = one_sentence(onepass.explain(lambda x: x + 1, torch.randn(64, 64)).advice)
    assert advice == "nothing is saved by fusing: 32.0 KiB move either way (1 graph, 1 kernel, 0 externs)"


def test_a_limit_that_costs_much_and_a_spill() -> None:
    kernel = KernelRecord("k0", [], 100, 100, "", "", 100.0, registers=255, spilled_bytes=512)
    costly = Decision("a", "b", "sibling", False, "49 buffers, limit 48", 30.0, 0)
    cheap = Decision("c", "d", "sibling", False, "49 buffers, limit 48", 3.0, 0)
    record = CompileRecord(kernels=[kernel], decisions=[costly, cheap], bytes_moved=200, bytes_unfused=900)
    assert Explanation([record]).advice == [
        "a and b are kept apart (49 buffers, limit 48): predicted to save 30 us of 100 us",
        "k0 spills 512 bytes per thread at 255 registers",
    ]


# --- measurements ---


def profiled(function: Any, *args: Any) -> onepass.Profile:
    return onepass.profile(function, *args, seconds=0.01)


def timed(profile: onepass.Profile, ours_us: float, eager_us: float, first_s: float = 0.0) -> onepass.Profile:
    """The profile with other times of the whole calls; its steps take nine tenths of ours."""
    ours, eager = profile.calls
    calls = [replace(ours, wall_us=ours_us, least_us=ours_us, first_s=first_s, device_us=0.0)]
    calls.append(replace(eager, wall_us=eager_us, least_us=eager_us, first_s=0.0, device_us=0.0))
    part = 0.9 * ours_us / profile.steps_us
    return replace(profile, calls=calls, steps=[replace(s, time_us=s.time_us * part) for s in profile.steps])


def chain(x: Tensor) -> Tensor:
    return torch.sigmoid(torch.sin(x) * 2).exp() + 1


def test_library_products_are_named_with_their_share() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    profile = profiled(model.requires_grad_(False), torch.randn(64, 512))
    assert [bool(s.flops) for s in profile.steps if s.kind == "extern"] == [True, True]
    steps = [replace(s, time_us=40.0 if s.kind == "extern" else 20.0) for s in profile.steps]
    profile = timed(replace(profile, steps=steps), 100.0, 101.0)
    wanted = "80 % of the time is library products: expect at most 1.25x from fusing the rest"
    assert wanted in profile.advice and str(profile).count(wanted) == 1
    few = [replace(s, time_us=1.0) if s.kind == "extern" else replace(s, time_us=90.0) for s in steps]
    assert not any("library" in a for a in replace(profile, steps=few).advice)


def test_when_compiling_pays() -> None:
    profile = timed(profiled(chain, torch.randn(64, 64)), 100.0, 300.0, first_s=0.5)
    assert one_sentence(profile.advice) == (
        "compiling pays after 2500 calls: it took 0.50 s, and a call takes 200 us less than eager"
    )
    assert not timed(profile, 100.0, 300.0, first_s=0.01).advice


def test_slower_than_eager() -> None:
    profile = timed(profiled(chain, torch.randn(64, 64)), 400.0, 300.0, first_s=0.5)
    assert one_sentence(profile.advice) == "slower than eager here: 400 us against 300 us; do not compile this"
    assert not timed(profile, 310.0, 300.0).advice


def test_a_call_of_almost_nothing() -> None:
    profile = timed(profiled(chain, torch.randn(4)), 100.0, 200.0)
    small = replace(profile, steps=[replace(s, time_us=5.0) for s in profile.steps])
    assert one_sentence(small.advice).startswith("95 us of 100 us are spent outside kernels and calls")


def test_copies_are_named() -> None:
    profile = timed(profiled(chain, torch.randn(64, 64)), 100.0, 200.0)
    copies = StepTime(0, "inference", "aten::copy_", "aten::copy_", "copy", 30.0)
    sentence = one_sentence(replace(profile, steps=[*profile.steps, copies]).advice)
    assert sentence == "25 % of the time (30 us) is copies into inputs that are changed"


# --- silence ---


def gelu_dropout(x: Tensor, bias: Tensor) -> Tensor:
    return F.dropout(F.gelu(x + bias), 0.1)


GOOD: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), lambda: (torch.randn(64, 64),)),
    "bias + GELU + dropout": (gelu_dropout, lambda: (torch.randn(64, 64), torch.randn(64))),
    "LayerNorm, training": (nn.LayerNorm(64), lambda: (torch.randn(64, 64, requires_grad=True),)),
    "cross-entropy, training": (
        F.cross_entropy, lambda: (torch.randn(64, 64, requires_grad=True), torch.randint(0, 64, (64,)))
    ),
    "SwiGLU": (lambda a, b: F.silu(a) * b + a, lambda: (torch.randn(64, 64), torch.randn(64, 64))),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_programs_are_met_with_silence(name: str) -> None:
    function, inputs = GOOD[name]
    report = onepass.explain(function, *inputs())
    assert report.advice == [] and "advice:" not in str(report)
    profile = timed(profiled(function, *inputs()), 100.0, 300.0)
    assert profile.advice == [] and "advice:" not in str(profile)


def test_advice_ends_the_report_and_is_in_the_json() -> None:
    report = onepass.explain(lambda x: x + 1, torch.randn(64, 64))
    assert str(report).endswith("advice:\n  " + report.advice[0]) and report.to_dict()["advice"] == report.advice
    assert advice_text([]) == ""


def test_a_cache_hit_gives_the_same_advice() -> None:
    weights = torch.linspace(0, 1, 64, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return (torch.sin(x) * weights).exp()

    first, second = (onepass.explain(function, torch.randn(64, 64)) for _ in range(2))
    assert second.graphs[0].cache == "hit" and first.advice == second.advice != []
