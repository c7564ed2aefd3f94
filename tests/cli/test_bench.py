"""The benchmark harness: it runs, checks what it measures, and reports what it found."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import compile_time, sweep, systems, timing
from benchmarks import measure as measuring
from benchmarks.kept import Kept
from benchmarks.plots import floor_plot, roofline_plot
from benchmarks.report import geometric_mean, markdown
from benchmarks.sets import CPU, GPU, SMALL, UNEQUAL, select
from benchmarks.workloads import Prepared, Workload, check_values

from onepass.cli import main

ROOT = Path(__file__).resolve().parents[2]
M = 1 << 20


def test_a_quick_run_writes_checked_numbers(tmp_path: Path) -> None:
    arguments = ["--quick", "--no-compile-time", "--device", "cpu", "--only", "log-softmax", "--out", str(tmp_path)]
    assert main(["bench", *arguments, "--systems", "eager,hand,onepass"]) == 0
    data = json.loads((tmp_path / "cpu.json").read_text())
    (workload,) = data["workloads"].values()
    assert set(workload["seconds"]) == {"eager", "onepass"} and not workload["problems"]
    assert workload["kernels"]["onepass"] >= 1 and workload["reference"] == "float64"
    assert data["facts"]["torch"] == torch.__version__ and "GPU" in data["missing"]["hand"]
    assert data["ceilings"]["bytes_per_second"] > 0 and data["ceilings"]["flops_per_second"] > 0
    text = (tmp_path / "cpu.md").read_text()
    assert "| log-softmax |" in text and "QUICK RUN" in text and "Not measured, hand" in text
    for plot in ("floor", "roofline"):
        assert ElementTree.parse(tmp_path / f"cpu-{plot}.svg").getroot().tag.endswith("svg")


@pytest.mark.rotating
def test_unusable_options_are_refused() -> None:
    for arguments in (["--systems", "eager,nothing"], ["--rounds", "0"], ["--only", "nothing"]):
        assert main(["bench", "--quick", "--no-compile-time", *arguments]) != 0


@pytest.mark.parametrize("workload", CPU + GPU, ids=lambda w: w.name)
def test_eager_passes_the_check_and_a_wrong_value_does_not(workload: Workload) -> None:
    prepared = Prepared(workload, 1 / 1024 if workload in GPU else 1 / 256)
    eager = prepared.call(workload.function)
    other, reference = prepared.call(workload.function), prepared.reference()
    assert check_values(prepared, other, eager, reference) == ""
    wrong = (other[0] * 1.1 + 0.01, *other[1:])
    assert check_values(prepared, wrong, eager, reference) != ""
    assert check_values(prepared, (other[0].double(), *other[1:]), eager, reference) != ""


def test_every_cpu_workload_has_an_input_of_64_mib() -> None:
    for workload in CPU:
        with torch.device("meta"):
            largest = max(a.nbytes for a in workload.build(1.0))
        assert largest >= 64 << 20 or workload.name == "Adam update of 150 small tensors", workload.name
    assert len(CPU) >= 12


def test_the_fewest_bytes_of_gpu_workloads() -> None:
    lists = [3 * 4 * sum(UNEQUAL) / M, 7 * 4 * sum(SMALL) / M]  # read and written
    counted_by_hand = [
        *lists,
        128,
        512,
        256,
        256,
        384,
        256,
        512,
        256,
        1024,
        256,
        512,
        640,
        640,
        8 * 448,
        2004,
        3 * 2004,
        640,
        384,
    ]
    for workload, mebibytes in zip(GPU, counted_by_hand, strict=True):
        prepared = Prepared(workload, 1.0, "meta")
        outputs = prepared.call(workload.function)
        assert prepared.minimum_bytes(outputs) / M == pytest.approx(mebibytes, rel=1e-3), workload.name
        assert prepared.minimum_flops() > 0


def test_beside_a_gpu_no_thread_is_bound_to_a_core() -> None:
    assert set(systems.THREADS) <= set(systems.environment("cpu"))
    assert not set(systems.THREADS) & set(systems.environment("cuda"))


def test_workloads_are_selected_by_words() -> None:
    assert [w.name for w in select("cuda", "SwiGLU;2048x")] == [
        "softmax 2048x131072", "SwiGLU forward + backward, 16384x14336"
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="no workload matches"):
        select("cpu", "nothing of the kind")


@pytest.mark.parametrize(("module", "field"), [("jax_functions", "jax"), ("hand", "hand")])
def test_named_functions_exist(module: str, field: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named = {getattr(w, field) for w in CPU + GPU} - {""}
    assert named <= defined
    assert {name for name in defined if not name.startswith("_")} <= named


_HAND = """
import torch
from benchmarks import functions, hand
def normal(*shape): return torch.randn(shape).to(torch.bfloat16)
torch.manual_seed(0)
cases = {
    "bias_gelu": (normal(37, 100), normal(100)),
    "layernorm": (normal(5, 100), normal(100), normal(100)),
    "softmax": (normal(5, 100),),
    "column_sum_of_product": (normal(37, 1500), normal(37, 1500)),
    "cross_entropy": (normal(7, 9000), torch.randint(0, 9000, (7,))),
}
for name, arguments in cases.items():
    exact = getattr(functions, name)(*(a.double() if a.is_floating_point() else a for a in arguments))
    got = getattr(hand, name)(*arguments)
    assert got.dtype is torch.bfloat16 and got.shape == exact.shape, name
    assert (got - exact).abs().max() <= 1e-2 * exact.abs().max(), name
print("right")
"""


@pytest.mark.rotating
def test_hand_written_kernels_by_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", _HAND]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout == "right\n", result.stderr


@pytest.mark.parametrize("workload", [w for w in CPU + GPU if w.jax], ids=lambda w: w.name)
def test_xla_gives_the_same_values(workload: Workload) -> None:
    pytest.importorskip("jax")
    prepared = Prepared(workload, 1 / 1024)
    values = systems.runner("xla", prepared).values()
    assert check_values(prepared, values, prepared.call(workload.function), prepared.reference()) == ""


def _measure(names: list[str]) -> dict[str, Any]:
    workload = Workload("softmax", lambda x: x.softmax(-1), lambda scale: (torch.randn(8, 64),), 5)
    return measuring.measure(workload, names, 1.0, 1, "cpu", "")


def test_a_failing_or_wrong_system_is_reported_and_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(system: str, function: Any) -> Any:
        if system == "inductor":
            raise RuntimeError("no compiler here\nat all")
        return function if system == "eager" else lambda x: function(x) * 1.01

    monkeypatch.setattr(systems, "compiled", compiled)
    found = _measure(["inductor", "inductor-max", "xla", "eager"])
    assert found["problems"]["inductor"] == "RuntimeError: no compiler here"
    assert "error" in found["problems"]["inductor-max"]
    assert found["skipped"] == {"xla": "not written in JAX"}
    assert set(found["seconds"]) == {"eager"}


def test_compile_time_comes_from_a_fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    environment = {**os.environ, **systems.cache_variables(str(tmp_path), "onepass"), "PYTHONPATH": str(ROOT / "src")}
    found = compile_time._child("onepass", "cpu", "full sum", 1 / 256, environment)
    assert found["seconds"]["full sum"] > 0 and found["started"] and not found["problems"]
    assert any((tmp_path / "onepass" / "onepass").iterdir()), "the cache folder is the one given"

    def late(*arguments: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired("python", 1800)

    monkeypatch.setattr(subprocess, "run", late)
    assert compile_time.compile_times("onepass", "cpu", "", 1.0)["warm"] == {"problem": "not finished after 1800 s"}


def test_a_workload_that_eager_cannot_run_is_reported() -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("too large")

    workload = Workload("too large", refuse, lambda scale: (torch.randn(8),), 1)
    found = measuring.measure(workload, ["eager"], 1.0, 1, "cpu", "")
    assert found["problems"] == {"the workload": "RuntimeError: too large"} and not found["seconds"]
    result = _result()
    result["workloads"]["too large"] = found
    assert "**too large, the workload: RuntimeError: too large**" in markdown(result)
    assert "too large" in floor_plot(result) and "too large" not in roofline_plot(result)


class _Device:
    """Stands in for the GPU's clock: each call takes as many milliseconds as it says, a flush is noted."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick  # what passes at every look at the clock
        self.log: list[str] = []

    def call(self, name: str, milliseconds: float) -> Any:
        def run() -> None:
            self.log.append(name)
            self.now += milliseconds

        return run

    def zero_(self) -> None:
        self.log.append("flush")
        self.now += 1000

    def event(self, enable_timing: bool) -> Any:
        made = SimpleNamespace(at=-1.0, elapsed_time=lambda end: end.at - made.at)

        def record() -> None:
            made.at = self.now
            self.now += self.tick

        made.record = record
        return made


def test_gpu_times_are_device_times_with_the_cache_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device()
    monkeypatch.setattr(timing, "_flush_buffer", lambda: device)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "kernel_spans", lambda call, flushed: [("a", 5.0, 7.0), ("b", 8.0, 12.0)])
    calls = {"eager": device.call("eager", 4.0), "xla": device.call("xla", 9.0), "onepass": device.call("onepass", 2.0)}
    seconds, wall, waiting = timing.times(calls, 6, "cuda").values()
    assert waiting == pytest.approx({"eager": 4e-3, "onepass": 2e-3})
    assert seconds == pytest.approx({"eager": 4e-3, "xla": 7e-6, "onepass": 2e-3})
    assert list(seconds) == list(wall) == list(calls)
    assert all(before == "flush" for before, now in zip(device.log, device.log[1:], strict=False) if now != "flush")
    monkeypatch.setattr(timing, "kernel_spans", lambda call, flushed: [])
    seconds, wall, _ = timing.times(calls, 6, "cuda").values()
    assert seconds["xla"] == wall["xla"], "without a profile the wall time counts"


def test_a_gpu_run_from_end_to_end_on_a_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, properties = _Device(tick=0.1), SimpleNamespace(total_memory=141 << 30)
    ceilings = {"bytes_per_second": 4e12, "flops_per_second": 7e14, "matmul": "bfloat16 8192^3"}
    for name, stand_in in {
        "Event": device.event, "synchronize": lambda: None,
        "get_device_name": lambda: "A Chip 9", "get_device_properties": lambda number: properties,
        "reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 5, "max_memory_allocated": lambda: 5 + M,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(timing, "_flush_buffer", lambda: device)
    monkeypatch.setattr(timing, "kernel_spans", lambda call: [("a kernel", 1.0, 2.0)])
    monkeypatch.setattr(timing, "ceilings", lambda device, quick: ceilings)
    monkeypatch.setattr(measuring, "Prepared", lambda workload, scale, device: Prepared(workload, scale, "cpu"))
    monkeypatch.setattr(command, "same_environment", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    arguments = SimpleNamespace(
        device="cuda", only="softmax", systems=["eager", "hand"], quick=True, rounds=None, no_compile_time=True,
        sweep=False, out=tmp_path, set="memory", resume=None, at_once=1, lock="",
    )  # fmt: skip
    monkeypatch.setattr(command, "_arguments", lambda: arguments)
    monkeypatch.setattr(command, "missing", lambda system, device: "")
    with monkeypatch.context() as patch:  # the kernels need a real GPU
        patch.setitem(sys.modules, "benchmarks.hand", SimpleNamespace(softmax=lambda x: x.softmax(-1) * 2))
        assert command.main() == 1
    data = json.loads((tmp_path / "a-chip-9.json").read_text())
    first, second = data["workloads"].values()
    assert data["facts"]["device"] == "A Chip 9" and data["facts"]["device_memory_gib"] == 141
    assert first["seconds"] == pytest.approx({"eager": 1e-4}) and "error" in first["problems"]["hand"]
    assert second["skipped"] == {"hand": "no kernel written by hand"}
    assert first["kernels"] == {"eager": 1} and first["peak_bytes"] == {"eager": M} and first["wall_seconds"]
    assert "# GPU speed" in (tmp_path / "a-chip-9.md").read_text()
    assert (tmp_path / "a-chip-9-floor.svg").exists() and (tmp_path / "a-chip-9-roofline.svg").exists()


def test_launches_are_the_device_s_kernels() -> None:
    def event(name: str, device: Any, start: float, end: float, label: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=device, time_range=span, is_user_annotation=label)

    host, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        event("cudaLaunchKernel", host, 0, 50), event("Memset (Device)", cuda, 10, 12), event("first", cuda, 12, 20),
        event("second", cuda, 22, 30), event("a region", cuda, 5, 40, label=True), event("## Call", cuda, 5, 40),
    ]  # fmt: skip
    spans = timing.device_spans(events)
    if not torch.cuda.is_available():
        assert timing.kernel_spans(lambda: torch.ones(4)) == [], "nothing is seen, and nothing raised"
    assert timing.launches(spans) == 2 and timing.span_seconds(spans) == pytest.approx(20e-6)


def _result(device: str = "cpu") -> dict[str, Any]:
    def workload(inductor: float, ours: float) -> dict[str, Any]:
        seconds = {"eager": 0.2, "inductor": inductor, "onepass": ours}
        return {
            "seconds": seconds, "wall_seconds": dict(seconds), "problems": {}, "skipped": {},
            "kernels": {"onepass": 3}, "peak_bytes": {"onepass": 64 * M},
            "minimum_bytes": 10**8, "minimum_flops": 4 * 10**7,
        }  # fmt: skip

    def process(*seconds: float, started: int = 0) -> dict[str, Any]:
        return {"seconds": dict(zip("ab", seconds, strict=True)), "started": ["cc"] * started, "import_seconds": 1.0}

    facts = dict.fromkeys(
        ("date", "processor", "cores", "threads", "memory_gib", "system", "python", "torch", "compiler", "onepass"), "x"
    )
    return {
        "facts": {**facts, "device": "A <chip>", "device_memory_gib": 9, "environment": {}, "huge_pages": "never"},
        "device": device,
        "set": "memory",
        "rounds": 9,
        "scale": 1.0,
        "systems": list(systems.SYSTEMS),
        "missing": {"xla": "no jax"},
        "ceilings": {"bytes_per_second": 1e10, "flops_per_second": 1e12, "matmul": "float32 2048^3"},
        "workloads": {"one": workload(0.04, 0.02), "two": workload(0.01, 0.02)},
        "compile": {
            "aot_eager": {"cold": process(0.2, 0.2), "warm": process(0.2, 0.2)},
            "inductor": {"cold": process(10, 4, started=9), "warm": process(1, 1)},
            "onepass": {"cold": process(1, 2, started=3), "warm": process(0.5, 0.4)},
        },
    }


def test_the_report_compares() -> None:
    text = markdown(_result())
    assert "| one | 10.0 | 200.0 | 40.0 | 20.0 | 2.00 | 2.00 | 10.00 |" in text
    assert "onepass over inductor: geometric mean **1.00** over 2 workloads, lowest 0.50 (two)" in text
    assert "first workload 0.10 of Inductor's time, the others 0.50" in text
    assert "+0.50 s over aot_eager for all workloads (+0.30 s for the first); no program was started" in text
    bound_by_flops = _result()
    bound_by_flops["ceilings"]["flops_per_second"] = 1e9
    assert "| one | 40.0 | 200.0 | 40.0 | 20.0 | 0.50 |" in markdown(bound_by_flops)


def test_the_report_of_a_gpu() -> None:
    result = _result("cuda")
    result["workloads"]["two"]["skipped"] = {"hand": "no kernel written by hand"}
    result["workloads"]["one"]["seconds"] |= {"hand": 0.01, "inductor-max": 0.03}
    result["workloads"]["two"]["problems"] = {"inductor-max": "OutOfMemoryError"}
    result["host"] = {"one kernel": {"eager": 14.1e-6, "onepass": 24e-6}}
    text = markdown(result)
    assert "A <chip> (9 GiB)" in text and "Not measured, xla: no jax." in text
    assert "| two | 10.0000 | 200.0000 | 10.0000 | failed | – | 20.0000 | 2.00 | 0.50 |" in text
    assert "onepass over inductor-max: geometric mean **1.50** over 1 workloads, lowest 1.50 (one)" in text
    assert "onepass over hand: geometric mean **0.50**" in text
    assert "20.000 / 3 / 64 |" in text
    assert "Host time per call, one kernel: eager 14.1 us, onepass 24.0 us." in text
    assert "**two, inductor-max: OutOfMemoryError**" in text


def test_the_report_does_not_hide_problems() -> None:
    result = _result()
    result["workloads"]["one"]["problems"] = {"onepass": "error 3"}
    del result["workloads"]["one"]["seconds"]["onepass"]
    result["compile"]["onepass"]["warm"] = {"problem": "it crashed"}
    text = markdown(result)
    assert "**one, onepass: error 3**" in text and "failed" in text
    assert "**onepass, warm: it crashed**" in text
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_the_plots_show_every_number() -> None:
    result = _result("cuda")
    circle = "{http://www.w3.org/2000/svg}circle"
    for plot, title in ((floor_plot, "one, onepass: 2.00 x floor"), (roofline_plot, "one, onepass: 2 GFLOP/s")):
        dots = {dot[0].text: dot for dot in ElementTree.fromstring(plot(result)).iter(circle)}
        assert len(dots) == 2 * 3 + 3 and title in dots  # two workloads, three systems, and a legend
    floor = {dot[0].text: float(dot.get("cx", 0)) for dot in ElementTree.fromstring(floor_plot(result)).iter(circle)}
    assert floor["one, onepass: 2.00 x floor"] < floor["one, inductor: 4.00 x floor"]
    result["workloads"]["one"]["seconds"] = result["workloads"]["two"]["seconds"] = {}
    for plot in (floor_plot, roofline_plot):
        ElementTree.fromstring(plot(result))


def test_the_sweep_covers_what_it_should() -> None:
    assert len(set(sweep.CASES)) == 60
    for operation in sweep.OPERATIONS:
        cases = [case for case in sweep.CASES if case.operation == operation]
        assert {case.columns for case in cases} == {1, 7, 1000, 4097, 50257, 262144}
        assert {case.rows for case in cases} == {3, 132, 10**6}
        assert {case.dtype for case in cases} == {torch.float32, torch.float16}
        assert {case.layout for case in cases} == {"contiguous", "sliced", "transposed"}
    for case in sweep.CASES:
        prepared = Prepared(case.workload(1 << 12), 1.0)
        matrix = prepared.arguments[0]
        assert matrix.shape == (min(case.rows, max(1, (1 << 12) // case.columns)), case.columns)
        assert matrix.dtype is case.dtype
        if min(matrix.shape) > 1:
            assert matrix.is_contiguous() == (case.layout == "contiguous")
        assert prepared.call(prepared.workload.function)


def test_the_sweep_reports_ratios_and_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(workload: Workload, *rest: Any) -> dict[str, Any]:
        if workload.name.startswith("row sum"):
            return {**_result()["workloads"]["one"], "seconds": {}, "problems": {"the workload": "eager cannot"}}
        ours = 1.0 if "softmax, 3x" in workload.name else 4.0
        return {**_result()["workloads"]["one"], "seconds": {"inductor": 2.0, "onepass": ours}}

    monkeypatch.setattr(sweep, "measure", measure)
    said: list[str] = []
    result, text = sweep.run_sweep(_result(), Kept(None, {"facts": {}}), "softmax;row sum, 3x", False, said.append)
    assert len(said) == len(result["cases"]) > 10
    lowest = next(name for name, case in result["cases"].items() if case["ratio"] == 0.5)
    assert f"lowest 0.50 ({lowest})" in text and "row sum" not in lowest
    assert text.count(": eager cannot**") == sum(name.startswith("row sum") for name in result["cases"]) > 0


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, settings = tmp_path / "rows.json", {"facts": {"date": "today", "torch": "2.0"}, "rounds": 3}
    made: list[str] = []

    def row(name: str) -> dict[str, Any]:
        made.append(name)
        return {"seconds": {"eager": len(made) / 10}}

    first = Kept(path, settings)
    rows = {name: first.row(name, lambda name=name: row(name)) for name in ("a", "b")}  # type: ignore[misc]
    later = Kept(path, {"facts": {"date": "tomorrow", "torch": "2.0"}, "rounds": 3})
    assert {name: later.row(name, lambda: row("again")) for name in ("a", "b")} == rows and made == ["a", "b"]
    assert later.row("c", lambda: row("c")) == {"seconds": {"eager": 0.3}}
    assert set(Kept(path, settings).rows) == {"a", "b", "c"} and [p.name for p in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.parametrize(("text", "said"), [("nonsense", "holds no measurements"), ("{}", "holds no measurements")])
def test_a_file_without_measurements(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=said):
        Kept(path, {"facts": {}})
    assert path.read_text() == text


def test_measurements_of_another_kind_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    Kept(path, {"facts": {"torch": "2.0"}, "rounds": 3}).row("a", dict)
    with pytest.raises(SystemExit, match="other facts, rounds"):
        Kept(path, {"facts": {"torch": "2.1"}, "rounds": 5})
