"""Where the time of a program goes: every step is there, timed where it stands, and nothing is left behind."""

from __future__ import annotations

import json
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.cli import main
from onepass.compilation import Compiled
from onepass.errors import UnusableProgram
from onepass.explain.capture import Lent
from onepass.explain.measured import CallTime, Limits, Measured, OperationTime, StepTime
from onepass.explain.profile_text import SHOWN, grouped, render_profile
from onepass.ir.record import CompileRecord, ExternRecord
from onepass.ir.source import Call, HostProgram, Launch, Live, Ref
from onepass.profiling.run import device_of, observed, steps_of
from onepass.runtime.clock import Clock, Span
from onepass.runtime.executable import Executable

SLEEP = 0.02


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x + self.down(F.gelu(self.up(self.norm(x))))).square().mean()


def profiled(function: Any, *args: Any, **options: Any) -> onepass.Profile:
    return onepass.profile(function, *args, seconds=0.01, **options)


def test_every_kernel_and_call_is_a_step_forward_and_backward() -> None:
    model, x = Block(), torch.randn(64, 32)
    report = onepass.explain(model, x)
    profile = profiled(model, x)
    steps = [(s.direction, s.name) for s in profile.steps if s.kind == "kernel"]
    assert sorted(steps) == sorted((g.direction, k.name) for g in report.graphs for k in g.kernels)
    calls = [(s.direction, s.name) for s in profile.steps if s.kind == "extern"]
    assert sorted(calls) == sorted((g.direction, e.op) for g in report.graphs for e in g.externs)
    assert {"forward", "backward"} == {s.direction for s in profile.steps}
    assert all(s.time_us > 0 and s.runs == 1 and s.lines for s in profile.steps)
    assert all("test_profile.py" in line for s in profile.steps for line in s.lines)
    assert {s.bytes_moved for s in profile.steps} >= {k.bytes_read + k.bytes_written for k in report.kernels}
    products = [s for s in profile.steps if "mm" in s.name]
    assert products and all(s.flops == 2 * 64 * 32 * 64 and s.flops_per_us > 0 for s in products)
    assert profile.steps_us == pytest.approx(sum(s.time_us for s in profile.steps))
    assert [c.name for c in profile.calls] == ["onepass", "eager"] and profile.beside("eager") is not None


def test_what_the_program_holds_is_left_as_it_was() -> None:
    model, x = Block(), torch.randn(64, 32)
    model(x).backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    profiled(model, x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@torch.library.custom_op("onepass_tests::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    time.sleep(SLEEP)
    return x.clone()


@slow.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_the_step_that_takes_the_time_is_the_one_that_is_named() -> None:
    profile = profiled(lambda x: slow(x * 2 + 1).exp(), torch.randn(8, 8))
    first = grouped(profile)[0]
    assert first.step.name == "onepass_tests.slow.default" and first.step.time_us >= 1e6 * SLEEP
    assert first.share > 0.5 and profile.call.time_us >= 1e6 * SLEEP
    assert "onepass_tests.slow" in str(profile).splitlines()[6]


def test_observing_ends_with_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.runtime.executable import Executable

    made: list[Executable] = []
    original = Executable.__init__

    def remember(self: Executable, *args: Any) -> None:
        original(self, *args)
        made.append(self)

    monkeypatch.setattr(Executable, "__init__", remember)
    profiled(lambda x: x * 2 + 1, torch.randn(64))
    (executable,) = made
    assert not executable.call.__globals__["is_profiling"]() and executable._with_clock is None


def test_a_time_line_has_the_names_of_the_profiler(tmp_path: Path) -> None:
    x = torch.randn(64, 64)

    def function(x: Tensor) -> Tensor:
        return torch.softmax(x @ x, -1)

    profile = profiled(function, x)
    path = tmp_path / "trace.json"
    profile.save_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    compiled = torch.compile(function, backend="onepass")
    compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        compiled(x)
    known = {e.name for e in profiler.events()}
    assert {e["name"] for e in events} <= known and any(e["name"].startswith("onepass_") for e in events)
    assert all(e["dur"] > 0 for e in events) and [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert events[-1]["args"]["bytes"] == 2 * x.nbytes


def test_tensors_without_memory_are_refused() -> None:
    with FakeTensorMode(), pytest.raises(UnusableProgram, match="explain plans"):
        profiled(torch.sin, torch.randn(4))


def test_chips_that_are_absent_are_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(UnusableProgram, match="sm_90 do not run here"):
        profiled(torch.sin, torch.randn(4), target="sm_90")


def test_an_unknown_system_is_an_error() -> None:
    with pytest.raises(UnusableProgram, match="Choose from eager, inductor"):
        profiled(torch.sin, torch.randn(4), beside=("abacus",))


def test_a_system_that_fails_is_named_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.profiling import run

    def compiled(function: Any, backend: Any) -> Any:
        if backend == "inductor":
            raise_it = RuntimeError("no compiler\nat all")

            def fail(*_: Any) -> Any:
                raise raise_it

            return fail
        return torch.compile(function, backend=backend)

    monkeypatch.setattr(run, "freshly_compiled", compiled)
    profile = profiled(lambda x: x * 2, torch.randn(4), beside=("eager", "inductor"))
    assert [(c.name, c.problem) for c in profile.calls] == [
        ("onepass", ""), ("eager", ""), ("inductor", "RuntimeError: no compiler"),
    ]  # fmt: skip
    assert "inductor  RuntimeError: no compiler" in str(profile) and profile.beside("inductor") is None


def _step(name: str, time_us: float, **changes: Any) -> StepTime:
    return StepTime(0, "forward", name, "onepass_add", "kernel", time_us, 1, 5.0, 1 << 20, 2.0, ("add",), **changes)


def _measured(steps: list[StepTime]) -> Measured:
    limits = Limits(10_000.0, 1e6, "by hand")
    return Measured([CompileRecord()], steps, [CallTime("onepass", 1000.0)], limits, "cpu", 7)


def test_equal_steps_are_one_row_and_the_largest_come_first() -> None:
    steps = [_step(f"k{n}_add", 100.0, lines=(f"model.py:{n}",)) for n in range(8)]
    steps.append(StepTime(0, "forward", "aten.mm.default", "aten::mm", "extern", 900.0, flops=45e7))
    steps.append(StepTime(0, "forward", "late", "late", "extern", 0.0))
    text = render_profile(_measured(steps))
    lines = text.splitlines()
    assert lines[4].split() == [
        "share", "time", "predicted", "moved", "GB/s", "GFLOP/s", "of", "limit", "step"
    ]  # fmt: skip
    assert lines[5].split()[:3] == ["52.9", "%", "900"] and lines[5].endswith("50 % products  mm")
    assert "8 x k0_add" in lines[6] and lines[6].split()[:7] == ["47.1", "%", "800", "us", "40", "us", "8.0"]
    assert "105 % memory" in lines[6]  # 1 MiB in 100 us of 10 GB/s
    assert "and 5 more lines" in text and any("unmeasured" in line for line in lines)
    narrow = render_profile(_measured(steps), 64).splitlines()
    assert narrow[4].split() == ["share", "time", "of", "limit", "step"] and len(narrow[6]) <= 64
    many = _measured([StepTime(0, "forward", f"k{n}", f"e{n}", "kernel", 1.0) for n in range(SHOWN + 7)])
    assert "and 7 smaller steps: 7 us" in render_profile(many)


def test_a_step_that_the_host_was_late_for_has_no_time() -> None:
    host = HostProgram(("a0",), (Call("x0", "aten.relu.default", (Ref("a0"),), {}),), (Ref("x0"),))
    executable = Executable(host, [])
    record = CompileRecord(externs=[ExternRecord("relu", "aten.relu.default", "", "", 8)])
    compiled = [Compiled(executable.call, record, executable=executable)]
    spans = [Span(id(host), 0, 0.0, time_us, counts) for time_us, counts in ((5.0, True), (900.0, False), (7.0, True))]
    (step,), _ = steps_of([record], compiled, [[s] for s in spans])
    assert step.time_us == 6.0
    (late,), _ = steps_of([record], compiled, [spans[1:2]])
    assert late.time_us == 0.0 and "unmeasured" in render_profile(_measured([late]))


def test_a_program_is_where_its_kernels_are() -> None:
    own = Lent(torch.sin, (torch.randn(2),), {}, False)
    assert device_of(own, []) == torch.device("cpu")
    launch = Launch(0, (), (), "1", "cuda:1")
    executable = Executable(HostProgram((), (), ()), [])
    executable.host = HostProgram((), (launch,), ())
    compiled = Compiled(executable.call, CompileRecord(), executable=executable)
    assert device_of(own, [compiled]) == torch.device("cuda:1")  # an optimiser's step takes no arguments


def test_what_dynamo_gives_up_on_has_no_steps() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    profile = profiled(function, torch.randn(4))
    assert profile.steps == [] and "nothing of it runs compiled" in str(profile)
    profile.to_html()


def test_chunks_of_a_loop_are_steps_of_their_own() -> None:
    """The loop's own time is without that of its chunks."""
    body = CompileRecord(direction="rows", repeats=3)
    host = HostProgram(("a0",), (Call("x0", "aten.relu.default", (Ref("a0"),), {}),), (Ref("x0"),))
    inner = Executable(host, [])
    loop = Live("loop")
    outer = Executable(
        HostProgram(
            ("a0",), (Call("x0", loop, (Ref("a0"),), {}),), (Ref("x0"),),
            live={"loop": lambda x: [time.sleep(SLEEP), *(inner.call([x]) for _ in range(3))][-1][0]},
        ),
        [],
    )  # fmt: skip
    extern = [ExternRecord("loop", "loop", "", "", 0)]
    whole = CompileRecord(externs=extern)
    body.externs = [ExternRecord("relu", "aten.relu.default", "", "", 8)]
    compiled = [Compiled(inner.call, body, executable=inner), Compiled(outer.call, whole, executable=outer)]
    clock = Clock(torch.device("cpu"))
    with observed([inner, outer], clock):
        clock.restart()
        outer.call([torch.randn(8)])
    steps, marks = steps_of([body, whole], compiled, [clock.spans()])
    chunk, own = steps
    assert (chunk.runs, chunk.name, chunk.entry) == (3, "aten.relu.default", "aten::relu")
    assert own.runs == 1 and own.time_us >= 1e6 * SLEEP and chunk.time_us < own.time_us
    assert [m.step for m in marks] == [0, 0, 0, 1] and marks[-1].duration_us >= own.time_us + chunk.time_us - 1


def test_the_page_of_a_profile() -> None:
    steps = [_step(f"k{n}_add", 100.0, lines=(f"model.py:{n}",)) for n in range(8)]
    steps.append(StepTime(0, "forward", "aten.mm.default", "aten::mm", "extern", 900.0, 1, 0.0, 1 << 20, flops=45e7))
    measured = _measured(steps)
    profile = onepass.Profile(*(getattr(measured, f.name) for f in fields(measured)))
    page = profile.to_html()
    assert "Where the time goes" in page and "8 x k0_add" in page and page.count("<circle") == 2
    parts = (OperationTime("exp", "model.py:3", 7.0, 1.0), OperationTime("add", "", problem="too cheap"))
    text = str(replace(profile, steps=[replace(steps[0], parts=parts, issue="exp 40 %"), *steps[1:]]))
    assert re.search(r"7 us +\+- 1 us +exposed by exp  model.py:3\n", text) and "issue: exp 40 %" in text
    assert "exposed by add  too cheap" in text and "below" not in text
    assert "GFLOP/s</th>" in page and "steps0" in page and "by hand" in page and "</svg>" in page


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    file = tmp_path / "program_to_profile.py"
    file.write_text("import torch\ndef forward(x):\n    return torch.relu(x + 1)\n")
    trace = tmp_path / "trace.json"
    options = ["--input", "8x16:bf16", "--seconds", "0.01", "--trace", str(trace)]
    assert main(["profile", f"{file}:forward", *options]) == 0
    captured = capsys.readouterr()
    assert "onepass profile" in captured.out and "program_to_profile.py:3" in captured.out
    assert "traceEvents" in json.loads(trace.read_text())
    assert main(["profile", f"{file}:forward", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["time_us"] > 0
    assert main(["profile", f"{file}:forward", *options, "--beside", "nothing"]) == 1
    assert "Choose from eager" in capsys.readouterr().err
