"""The oracle itself: what it records of a program, which flips it sees, and which it takes as meant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.oracle.compare import (
    FUSIONS,
    GROUPS,
    NUMBERS,
    SCHEDULE,
    Flip,
    answer,
    changed_texts,
    flips,
    read_meant,
    with_recorded,
)
from tests.oracle.corpus import corpus
from tests.oracle.planning import plan
from tests.oracle.program import Program
from tests.oracle.recording import (
    Graphs,
    Line,
    decisions,
    read_decisions,
    read_texts,
    texts,
    written_decisions,
    written_texts,
)

SOFTMAX = Program("softmax", lambda x: x.softmax(-1), lambda: (torch.empty(4096, 1000),))
TRAINED = Program("gelu", lambda x, b: F.gelu(x @ b), lambda: (torch.empty(64, 64), torch.empty(64, 64)), train=True)


def test_a_plan_is_made_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a compiler was started")

    monkeypatch.setattr("subprocess.Popen.__init__", started)
    for target in ("cpu", "sm_90"):
        (record,) = plan(SOFTMAX, target).records
        (kernel,) = record.kernels
        assert kernel.bytes_read == kernel.bytes_written == 4096 * 1000 * 4
        assert kernel.registers == 0 and record.target == target


def test_a_kernel_is_named_by_its_operations() -> None:
    (graph,) = decisions(plan(SOFTMAX, "sm_90")).values()
    (kernel,) = [line for line in graph.values() if line.subject.startswith("kernel")]
    assert kernel.subject == "kernel amax div exp sub sum_1"
    assert "c0[4096]: grid" in kernel.value
    assert kernel.numbers.endswith("16384000 read, 16384000 written")


def test_both_graphs_of_a_training_step_are_recorded() -> None:
    graphs = decisions(plan(TRAINED, "cpu"))
    assert list(graphs) == ["forward", "backward"]
    assert [s for s in graphs["backward"] if s.startswith("library")] == [
        "library mm_1 aten.mm.default",
        "library mm_2 aten.mm.default",
    ]


def test_files_are_read_as_they_were_written() -> None:
    planned = {"a": plan(SOFTMAX, "sm_90"), "b, c": plan(TRAINED, "sm_90")}
    decided = {name: decisions(p) for name, p in planned.items()}
    assert read_decisions(written_decisions(decided)) == decided
    keys = {name: texts(p) for name, p in planned.items()} | {"none": ()}
    assert read_texts(written_texts(keys)) == keys
    assert len(keys["a"]) == 1


def test_the_corpus_has_every_table() -> None:
    folders = {name.split("/")[0] for name in corpus()}
    assert folders >= {"spelling", "near miss", "states", "count", "memory gpu", "sweep", "contraction", "layer"}
    assert len(corpus()) > 350


# --- flips ---

KERNEL = Line("kernel add mul", "c0[64]: grid; 4 warps", "3 us, 8 read, 8 written")
PAIR = Line("+ vertical add > mul", "shares a load of 8 bytes", "3 us, 8 bytes")


def one(*lines: Line) -> dict[str, Graphs]:
    return {"p": {"inference": {line.subject: line for line in lines}}}


def layers(before: dict[str, Graphs], after: dict[str, Graphs]) -> list[str]:
    return [flip.layer for flip in flips("cpu", before, after)]


def test_equal_recordings_have_no_flips() -> None:
    assert layers(one(KERNEL, PAIR), one(KERNEL, PAIR)) == []


@pytest.mark.parametrize(
    ("after", "layer"),
    [
        ((replace(KERNEL, subject="kernel add"), PAIR), GROUPS),
        ((replace(KERNEL, value="c0[64]: grid; 8 warps"), PAIR), SCHEDULE),
        ((replace(KERNEL, numbers="4 us, 8 read, 8 written"), PAIR), NUMBERS),
        ((KERNEL, replace(PAIR, subject="- vertical add > mul")), FUSIONS),
        ((KERNEL, replace(PAIR, value="another step lies between them")), FUSIONS),
        ((KERNEL, replace(PAIR, value="shares a load of 16 bytes")), NUMBERS),
        ((KERNEL,), FUSIONS),
    ],
)
def test_a_flip_has_a_layer(after: tuple[Line, ...], layer: str) -> None:
    assert layers(one(KERNEL, PAIR), one(*after)) == [layer]


def test_a_graph_that_fell_back_is_a_flip_of_groups() -> None:
    assert layers(one(KERNEL), one(Line("fallback", "no", ""))) == [GROUPS]


def test_new_texts_are_counted() -> None:
    assert changed_texts({"a": ("1", "2"), "b": ("3",)}, {"a": ("1", "4"), "b": ("3",), "c": ("5",)}) == (1, 3, 1)


# --- what is meant ---

PAGE = """# Flips

## Meant

- `schedule numbers` `sm_90` `layer/*`: wider tiles
- `groups` `*` `count/*`: one kernel less

## Recorded

- `groups` `*` `*`: recorded long ago (1 groups)
"""


def flip(program: str, target: str, layer: str) -> Flip:
    return Flip(program, target, "inference", layer, "before", "after")


def test_an_entry_answers_for_its_flips_alone() -> None:
    found = [
        flip("layer/a", "sm_90", SCHEDULE),
        flip("layer/a", "sm_90", GROUPS),
        flip("layer/a", "sm_80", SCHEDULE),
        flip("count/a", "sm_80", GROUPS),
    ]
    left, answered = answer(found, read_meant(PAGE))
    assert left == found[1:3]
    assert list(answered.values()) == [found[:1], found[3:]]


def test_recording_moves_the_entries_that_were_used() -> None:
    _, answered = answer([flip("count/a", "sm_80", GROUPS)] * 2, read_meant(PAGE))
    page = with_recorded(PAGE, answered)
    assert [entry.reason for entry in read_meant(page)] == ["wider tiles"]
    assert page.endswith(
        "- `groups` `*` `*`: recorded long ago (1 groups)\n- `groups` `*` `count/*`: one kernel less (2 groups)\n"
    )


@pytest.mark.parametrize("line", ["- wider tiles", "- `grupen` `*` `*`: a layer that is none"])
def test_an_entry_nobody_can_read_is_an_error(line: str) -> None:
    with pytest.raises(SystemExit):
        read_meant(f"## Meant\n{line}\n## Recorded\n")
