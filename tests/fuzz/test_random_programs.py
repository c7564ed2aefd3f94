"""Random programs for ONEPASS_FUZZ_SECONDS (120), in ONEPASS_FUZZ_SHARDS tests; ONEPASS_FUZZ_SEED moves to others."""

from __future__ import annotations

import os
import time

import pytest

from onepass.lowering import overwrites
from tests.fuzz.check import failure, shrink
from tests.fuzz.generate import generate

SECONDS = float(os.environ.get("ONEPASS_FUZZ_SECONDS", "120"))
SEED = int(os.environ.get("ONEPASS_FUZZ_SEED", "1000000"))
SHARDS = int(os.environ.get("ONEPASS_FUZZ_SHARDS", "2"))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other shard parts of inputs are overwritten in place, however small the inputs are."""
    if shard % 2:
        monkeypatch.setattr(overwrites, "LARGE", 0)
        monkeypatch.setattr(overwrites, "FEW", 0)
    stop = time.monotonic() + SECONDS
    seed = SEED + shard
    wrong: list[str] = []
    while time.monotonic() < stop and len(wrong) < 3:
        program = generate(seed)
        if failure(program):
            small, message = shrink(program)
            wrong.append(small.repro(message))
        seed += SHARDS
    print(f"seeds {SEED + shard} to {seed} by {SHARDS}: {(seed - SEED) // SHARDS} programs, {len(wrong)} wrong")
    assert not wrong, "\n\n".join(wrong)


def test_a_seed_is_a_program() -> None:
    for seed in range(20):
        assert generate(seed) == generate(seed)


def test_programs_vary() -> None:
    """The generator reaches what it is for."""
    programs = [generate(seed) for seed in range(120)]
    text = "\n".join(p.setup_source() + p.source() for p in programs)
    for piece in (
        ".transpose(",
        ".expand(",
        "[3:].view(",
        "softmax",
        "amax",
        "torch.cat",
        "bf16",
        "f16",
        "u8",
        "b8",
        ".copy_(",
    ):
        assert piece in text, piece
    assert 20 <= sum(p.gradients for p in programs) <= 80
    assert any("(0," in p.setup_source() or ", 0)" in p.setup_source() for p in programs)
    assert any(len(set(p.outputs)) < len(p.outputs) or set(p.outputs) & set(p.inputs) for p in programs)
    assert any(s.text in p.inputs for p in programs for s in p.setup), "an input given twice"
