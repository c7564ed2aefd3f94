"""The benchmark of whole models: they build, their values are checked, runs go on where they stopped."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import timing
from benchmarks.kept import Kept
from benchmarks.models import report, run
from benchmarks.models.cases import INFERENCE, MODES, ROWS, STEP, TINY_ROWS, TRAINING, Case, Row, find_case
from benchmarks.models.process import Measuring, first_calls
from benchmarks.models.profiles import kernels_by_time, prices
from benchmarks.models.subject import Subject
from benchmarks.turns import turn as take_turn

from onepass.cli import main

TINY = {row.case.name: row.case for row in TINY_ROWS}
SETTINGS = run.Settings("cpu", ["eager", "inductor", "onepass"], 3, compile_time=False)
FACTS = {"facts": {"date": "today"}, "device": "cpu"}


def subject_of(name: str, mode: str) -> Subject:
    case = TINY[name]
    if library := run.absent_library(Row(case, mode)):
        pytest.skip(f"{library} is not installed")
    subject = Subject(case, "cpu")
    subject.set_mode(mode)
    return subject


def problem_of(subject: Subject, mode: str) -> str:
    eager = subject.runner(mode, "eager").values()
    gradients = {name: value for name, value in eager.items() if name.startswith("gradient")}
    ours = subject.runner(mode, "onepass", gradients).values()
    return subject.problem(ours, eager, subject.reference(mode, gradients))


@pytest.mark.rotating
@pytest.mark.parametrize("name", TINY)
def test_inference_of_every_model_is_right(name: str) -> None:
    assert problem_of(subject_of(name, INFERENCE), INFERENCE) == ""


@pytest.mark.rotating
@pytest.mark.parametrize("name", TINY)
def test_gradients_of_every_model_are_right(name: str) -> None:
    subject = subject_of(name, TRAINING)
    values = subject.runner(TRAINING, "eager").values()
    with_gradient = {n.removeprefix("gradient of ") for n in values if n.startswith("gradient")}
    assert {n for n, _ in subject.model.named_parameters()} <= with_gradient | {"model.encoder.embed_tokens.weight"}
    assert problem_of(subject, TRAINING) == ""


def test_a_training_step_is_checked_and_leaves_the_parameters() -> None:
    subject = subject_of("Recommender, tiny, float32", STEP)
    before = [p.detach().clone() for p in subject.model.parameters()]
    assert problem_of(subject, STEP) == ""
    assert all(torch.equal(p, b) for p, b in zip(subject.model.parameters(), before, strict=True))
    subject.runner(STEP, "onepass").call()
    assert not torch.equal(next(iter(subject.model.parameters())), before[0])


def test_a_wrong_gradient_and_a_missing_one_are_problems() -> None:
    subject = subject_of("U-Net, tiny, float32", TRAINING)
    eager, exact = subject.runner(TRAINING, "eager").values(), subject.reference(TRAINING)
    assert subject.problem(eager, eager, exact) == ""
    for wrong, name in (("gradient of enter.weight", "enter"), ("output 0", "output 0")):
        assert name in subject.problem({**eager, wrong: eager[wrong] * 1.001}, eager, exact)
    assert "missing" in subject.problem({"output 0": eager["output 0"]}, eager, exact)


def test_a_measured_row_has_every_number() -> None:
    name = "Recommender, tiny, float32"
    row = Measuring(Subject(TINY[name], "cpu"), ["eager", "onepass", "xla"], 2, "").measure(INFERENCE)
    assert not row["problems"] and row["wall_seconds"].keys() == row["by_time"].keys() == {"eager", "onepass"}
    assert row["kernels"]["onepass"] >= 1 and "jax" in row["skipped"]["xla"].lower()
    first = first_calls(Subject(TINY[name], "cpu"), "onepass", [INFERENCE, "no such mode"])
    assert first[INFERENCE]["first_seconds"] > first[INFERENCE]["later_seconds"] > 0


def test_cases_have_names_of_their_own_and_every_model_has_every_mode() -> None:
    for rows in (*ROWS.values(), TINY_ROWS):
        assert len({row.name for row in rows}) == len(rows)
        assert {row.mode for row in rows} == set(MODES)
    assert find_case("Llama, large, bf16", "cuda").extra == ("inductor-max", "xla")
    autotuned = {row.case.model.name for row in ROWS["cuda"] if "inductor-max" in row.case.extra}
    assert autotuned == {"Llama", "BERT", "ViT", "ResNet"}
    assert sum(row.case.dtype is torch.float32 for row in ROWS["cuda"]) == 2 * len(MODES)


# --- runs in parts ---


def measured(problem: str = "") -> dict[str, Any]:
    systems = {"eager": 0.03, "inductor": 0.02, "onepass": 0.01}
    row: dict[str, Any] = {key: {} for key in ("device_seconds", "kernels", "peak_bytes", "by_time", "skipped")}
    return {
        **row,
        "wall_seconds": systems,
        "best_seconds": systems,
        "load": 1.5,
        "problems": {"onepass": problem} if problem else {},
    }


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    rows = [row for row in TINY_ROWS if not row.case.model.needs][:6]
    seen: list[tuple[str, list[str]]] = []
    said: list[str] = []

    def measure(case: Case, modes: list[str], settings: run.Settings) -> dict[str, dict[str, Any]]:
        seen.append((case.name, modes))
        return {mode: measured() for mode in modes}

    path = tmp_path / "kept.json"
    first = run.run_rows(rows[:1], SETTINGS, Kept(path, FACTS), 0, said.append, measure)
    assert list(first["rows"]) == [rows[0].name] and not first["left"]
    stopped = run.run_rows(rows, SETTINGS, Kept(path, FACTS), 1e-9, said.append, measure)
    assert len(stopped["rows"]) == 3 and len(stopped["left"]) == 3 and any("stopped before" in s for s in said)
    rest = run.run_rows(rows, SETTINGS, Kept(path, FACTS), 0, said.append, measure)
    assert list(rest["rows"]) == [row.name for row in rows] and not rest["left"]
    one, other = rows[0].case.name, rows[3].case.name
    assert seen == [(one, [INFERENCE]), (one, [TRAINING, STEP]), (other, list(MODES))]


def test_cases_that_compile_side_by_side_measure_in_turns(tmp_path: Path) -> None:
    """Two processes of one lock: no time of one lies in the turn of the other."""
    lock, turns = tmp_path / "lock", list[str]()

    def turn(name: str) -> None:
        for _ in range(20):
            with take_turn(str(lock)):
                turns.append(name)
                time.sleep(0.001)
                turns.append(name)

    threads = [threading.Thread(target=turn, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(turns) == 80 and all(one == other for one, other in zip(turns[::2], turns[1::2], strict=True))

    rows = [row for row in TINY_ROWS if not row.case.model.needs][:6]
    both = threading.Barrier(2, timeout=60)

    def measure(case: Case, modes: list[str], settings: run.Settings) -> dict[str, dict[str, Any]]:
        both.wait()  # passed only if two cases are under way
        return {mode: measured() for mode in modes}

    settings = replace(SETTINGS, at_once=2, lock=str(lock))
    found = run.run_rows(rows, settings, Kept(tmp_path / "kept.json", FACTS), 0, lambda _: None, measure)
    assert list(found["rows"]) == [row.name for row in rows] and not found["left"]


def test_a_missing_library_is_reported_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "timm" else real(name, *rest))
    rows = [row for row in TINY_ROWS if row.case.model.needs == "timm"]
    kept = Kept(tmp_path / "kept.json", FACTS)
    found = run.run_rows(rows, SETTINGS, kept, 0, lambda _: None)
    assert set(found["absent"].values()) == {"timm is not installed"} and not found["rows"] and not kept.rows


def test_a_model_that_fails_to_build_is_a_problem_of_its_row() -> None:
    broken = {"problem": "ValueError: no such model"}
    row = run._row(broken, INFERENCE, {"onepass, cold": {INFERENCE: {"problem": "the same"}}})
    assert row["problems"] == {"the model": "ValueError: no such model"}


def test_shards_have_every_case_once() -> None:
    rows = ROWS["cuda"]
    parts = [run.part_of(rows, f"{k}/4") for k in (1, 2, 3, 4)]
    assert sorted(r.name for part in parts for r in part) == sorted(r.name for r in rows)
    with pytest.raises(SystemExit):
        run.part_of(rows, "5/4")


# --- what is said ---


def test_the_report_has_ratios_problems_and_first_calls() -> None:
    compiled = {
        "aot_eager, cold": {"first_seconds": 3.0, "later_seconds": 1.0},
        "inductor, cold": {"first_seconds": 13.0, "later_seconds": 1.0},
        "onepass, cold": {"first_seconds": 8.0, "later_seconds": 1.0},
        "onepass, warm": {"first_seconds": 3.5, "later_seconds": 1.0},
    }
    names = [Row(TINY["Llama, tiny, float32"], INFERENCE).name, Row(TINY["BERT, tiny, float32"], INFERENCE).name]
    rows = {names[0]: {**measured(), "compile": compiled}, names[1]: {**measured("error 1"), "compile": {}}}
    facts: dict[str, Any] = dict.fromkeys(
        ("date", "processor", "cores", "threads", "memory_gib", "system", "python", "torch", "compiler", "onepass"), "?"
    )
    text = report.markdown(
        {"facts": facts, "device": "cpu", "rounds": 3, "systems": ["eager", "inductor", "onepass"], "rows": rows,
         "absent": {"ViT": "timm is not installed"}, "left": ["T5"]}
    )  # fmt: skip
    assert "| Llama, tiny, float32 | 30.00 | 20.00 | 10.00 | 2.00 | 2.00 | 3.00 | 3.00 | 1.50 |" in text
    assert "10.00 WRONG" in text and "**BERT, tiny, float32, inference, onepass: error 1**" in text
    assert "geometric mean **2.00** over 2 models" in text and "ratio **0.50**" in text and "+0.50 s" in text
    assert "timm is not installed" in text and "Left for the next run: 1 rows" in text


def test_kernels_are_paired_with_their_prices() -> None:
    def kernel(name: str, entry: str, price: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, source=f"def {entry}(x):", predicted_us=price)

    records = [
        SimpleNamespace(direction="backward", kernels=[kernel("k0", "onepass_mul", 4.0)]),
        SimpleNamespace(
            direction="forward", kernels=[kernel("k0", "onepass_sum", 1.0), kernel("k1", "onepass_mul", 2.0)]
        ),
    ]
    spans = [("onepass_sum", 0.0, 10.0), ("gemm", 10.0, 20.0), ("onepass_mul", 20.0, 50.0), ("onepass_mul", 60.0, 65.0)]
    found = prices([spans], records)
    assert [(k["graph"], k["measured_us"], k["price_us"]) for k in found] == [
        ("forward", 10.0, 1.0), ("forward", 30.0, 2.0), ("backward", 5.0, 4.0)
    ]  # fmt: skip
    assert [k["measured_us"] for k in report.far_kernels({"prices": found})] == [30.0]
    by_name = prices([spans[2:]], records)
    assert [(k["kernel"], k["measured_us"], k["price_us"]) for k in by_name] == [("onepass_mul", 17.5, 3.0)]
    assert kernels_by_time(spans)[0] == {"name": "onepass_mul", "calls": 2, "us": 35.0}


def test_overlapping_kernels_are_counted_once() -> None:
    spans = [("a", 0.0, 10.0), ("b", 5.0, 12.0), ("c", 6.0, 7.0), ("d", 20.0, 21.0)]
    assert timing.busy_seconds(spans) == pytest.approx(13e-6)
    assert timing.own_spans(spans) == [("a", 0.0, 10.0), ("b", 10.0, 12.0), ("c", 7.0, 7.0), ("d", 20.0, 21.0)]


def test_a_kernel_that_starts_early_is_not_charged_for_waiting() -> None:
    """It waits for the last one inside: 48 of 67 us in one profile."""
    waits = SimpleNamespace(name="k0", source="def onepass_mul(x):", predicted_us=18.0)
    record = SimpleNamespace(direction="inference", kernels=[waits])
    spans = [("gemm", 0.0, 53.0), ("onepass_mul", 5.0, 72.0)]
    (found,) = prices([spans], [record])
    assert found["measured_us"] == 19.0 and kernels_by_time(spans)[1]["us"] == 19.0


@pytest.mark.rotating
def test_a_quick_run_writes_a_table(tmp_path: Path) -> None:
    arguments = ["--set", "models", "--quick", "--no-compile-time", "--device", "cpu", "--out", str(tmp_path)]
    chosen = ["--only", "Recommender, tiny, float32, inference", "--systems", "eager,onepass"]
    assert main(["bench", *arguments, *chosen]) == 0
    (row,) = json.loads((tmp_path / "cpu-models.json").read_text())["rows"].values()
    assert not row["problems"] and row["wall_seconds"].keys() == {"eager", "onepass"}
    assert "| Recommender, tiny, float32 |" in (tmp_path / "cpu-models.md").read_text()
