"""The benchmark's contractions: they run, count what they should, and wrong values are problems, wherever they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import contractions, libraries, systems
from benchmarks import measure as measuring
from benchmarks.contractions import CONTRACTIONS
from benchmarks.plots import floor_plot, roofline_plot
from benchmarks.report import markdown
from benchmarks.sets import SETS, select
from benchmarks.workloads import Prepared, Workload, check_values
from torch.nn.attention import SDPBackend

from onepass.cli import main

QUICK = 1 / 64


def _named(word: str) -> Workload:
    return select("cuda", word, "contractions")[0]


@pytest.mark.rotating
def test_a_quick_run_writes_checked_numbers(tmp_path: Path) -> None:
    arguments = ["--set", "contractions", "--quick", "--device", "cpu", "--only", "soft-cap;bias + GELU;1 query"]
    chosen = "eager,sdpa-cudnn,flex,cublas,onepass"
    assert main(["bench", *arguments, "--systems", chosen, "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "cpu-contractions.json").read_text())
    assert data["set"] == "contractions" and len(data["workloads"]) == 3 and "compile" not in data
    assert set(data["missing"]) == {"sdpa-cudnn", "flex", "cublas"}
    for workload in data["workloads"].values():
        assert set(workload["seconds"]) == {"eager", "onepass"} and not workload["problems"]
        assert workload["reference"] == "float64" and workload["minimum_flops"] > 0
    text = (tmp_path / "cpu-contractions.md").read_text()
    assert "# CPU speed, contractions" in text and "QUICK RUN" in text and "First calls, which compile" in text
    assert "| attention, soft-cap + causal |" in text and (tmp_path / "cpu-contractions-floor.svg").exists()


@pytest.mark.rotating
def test_what_the_set_does_not_measure_is_refused() -> None:
    chosen = ["bench", "--set", "contractions", "--device", "cpu"]
    for arguments in ([], ["--quick", "--systems", "xla"], ["--quick", "--sweep"], ["--quick", "--only", "Adam"]):
        assert main([*chosen, *arguments]) != 0
    assert main(["bench", "--quick", "--systems", "flex"]) != 0, "the other set has no use for it"
    assert "inductor-max" in SETS["contractions"].available and "inductor-max" not in SETS["contractions"].systems


@pytest.mark.parametrize("workload", CONTRACTIONS, ids=lambda w: w.name)
def test_eager_passes_the_check_and_a_wrong_value_does_not(workload: Workload) -> None:
    prepared = Prepared(workload, QUICK)
    eager = prepared.call(workload.function)
    reference = prepared.reference()
    assert check_values(prepared, eager, eager, reference) == ""
    scaled = (eager[0].float() * 1.1).to(eager[0].dtype)
    assert "error" in check_values(prepared, (scaled, *eager[1:]), eager, reference)
    transposed = eager[0].mT.contiguous().mT
    assert "eager" in check_values(prepared, (transposed, *eager[1:]), eager, reference) or 1 in eager[0].shape[-2:]
    assert check_values(prepared, (transposed, *eager[1:]), eager, reference, same_layout=False) == ""


def test_the_check_sees_late_rows_and_heads_beside_the_sample() -> None:
    prepared = Prepared(_named("attention, causal"), 1 / 4)
    eager = prepared.call(prepared.workload.function)
    reference = prepared.reference()
    heads, rows = eager[0].shape[1:3]
    assert reference[0].shape[1] < heads and rows == 1024
    for head, where in ((0, "allowed"), (1, "from eager")):
        wrong = eager[0].clone()
        wrong[0, head, rows - 1] += 0.2 * wrong[0, head, rows - 1].abs().max()  # small beside the first row
        assert where in check_values(prepared, (wrong,), eager, reference)
        wrong[0, head, rows - 1, 5] = torch.nan
        assert where in check_values(prepared, (wrong,), eager, reference)


def test_a_wrong_system_is_a_problem_and_a_ceiling_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(system: str, function: Any) -> Any:
        return function if system == "eager" else lambda *given: function(*given) * 1.1

    monkeypatch.setattr(systems, "compiled", compiled)
    names = ["eager", "onepass", "cublas", "flex"]
    found = measuring.measure(_named("linear + bias + GELU"), names, QUICK, 1, "cpu", "")
    assert set(found["seconds"]) == {"eager", "cublas"} and found["skipped"] == {"flex": "no call of this library"}
    assert "error" in found["problems"]["onepass"]
    result = {
        "facts": dict.fromkeys(
            ("date", "processor", "cores", "threads", "memory_gib", "system", "python", "torch", "compiler", "onepass",
             "device", "huge_pages", "device_memory_gib"), "x",
        ),
        "device": "cuda", "set": "contractions", "rounds": 1, "scale": 1.0, "systems": names, "missing": {},
        "ceilings": {"bytes_per_second": 4e12, "flops_per_second": 7e14, "matmul": "bfloat16 8192^3"},
        "workloads": {"linear": {**found, "wall_seconds": {}}},
    }  # fmt: skip
    text = markdown(result)
    assert "# GPU speed, contractions" in text and "| cublas* ms |" in text and "not the same work" in text
    assert "over cublas" not in text and "**linear, onepass: output 0: error" in text
    for plot in (floor_plot, roofline_plot):
        assert "cublas" in plot(result)


def test_a_wrong_result_ends_the_command_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(system: str, function: Any) -> Any:
        return function if system == "eager" else lambda *given: torch.zeros_like(function(*given))

    monkeypatch.setattr(systems, "compiled", compiled)
    monkeypatch.setattr(command, "same_environment", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    words = ["--set", "contractions", "--quick", "--device", "cpu", "--only", "window", "--systems", "eager,onepass"]
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    assert command.main() == 1
    assert "**attention, window 512, onepass: output 0: error 1 of a row's largest value" in capsys.readouterr().out


@pytest.mark.parametrize("workload", CONTRACTIONS, ids=lambda w: w.name)
@pytest.mark.filterwarnings("ignore")
def test_libraries_are_asked_for_the_same(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "inductor", lambda function: function)
    prepared = Prepared(workload, QUICK)
    eager = prepared.call(workload.function)
    reference = prepared.reference()
    for system, make in workload.libraries.items():
        if system != "sdpa-cudnn":  # the same call as sdpa-flash
            values = prepared.call(make(prepared.arguments))
            wrong = check_values(prepared, values, eager, reference, same_layout=False)
            assert wrong == "" or system == systems.CEILING, f"{system}: {wrong}"
    assert set(workload.libraries) <= set(systems.LIBRARIES)
    assert libraries.BACKENDS["sdpa-cudnn"] is SDPBackend.CUDNN_ATTENTION


def test_the_fewest_flops_and_bytes() -> None:
    attention = 4 * 64 * 4096 * 4096 * 128
    counted_by_hand = {
        "attention, causal": (attention / 2, 256), "attention, full": (attention, 256),
        "ALiBi": (attention / 2, 256), "soft-cap": (attention / 2, 256), "RoPE": (attention / 2, 258),
        "window": (attention * (512 * 4096 - 512 * 256) / 4096**2, 256), "64 wide": (attention / 4, 128),
        "1 query": (4 * 32 * 32768 * 128, 128), "linear": (2 * 8192 * 4096 * 16384, 64 + 128 + 256),
        "SwiGLU": (4 * 8192 * 4096 * 14336, 64 + 224 + 224), "int8 weights": (2 * 16 * 8192**2, 64.5),
        "int8 linear": (2 * 16 * 8192**2, 64.5),
        "dequantise": (2 * 4096**3, 48), "Q, K, V": (2 * 4096 * 2048 * 3072, 16 + 12 + 24),
        "residual": (2 * 65536 * 1024 * 512, 128 + 64 + 64 + 1),
        "block": (2 * 16384 * 12 * 2048**2 + 2 * 8 * 2048**3, 64 + 96 + 64),
    }  # fmt: skip
    assert len(counted_by_hand) == len(CONTRACTIONS)
    for word, (flops, mebibytes) in counted_by_hand.items():
        prepared = Prepared(_named(word), 1.0, "meta")
        outputs = prepared.call(prepared.workload.function)
        assert prepared.minimum_flops() == pytest.approx(flops, rel=2e-3), word
        assert prepared.minimum_bytes(outputs) / 2**20 == pytest.approx(mebibytes, rel=2e-3), word


def test_a_window_is_narrower_than_its_sequence() -> None:
    prepared = Prepared(_named("window"), 1 / 4)
    q, k, v = prepared.arguments
    banded, causal = contractions.window_attention(q, k, v), contractions.causal_attention(q, k, v)
    assert torch.equal(banded[..., :512, :], causal[..., :512, :]) and not torch.equal(banded, causal)
