"""Generated Triton on CPU tensors: every operator that lowers completely, and random programs, by their values."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onepass.backend import make_backend
from tests.fuzz.check import failure, shrink
from tests.fuzz.generate import generate
from tests.opdb.cases import operators, samples, skip_reason
from tests.opdb.check import Skipped, check_case

LOWERED = (Path(__file__).parents[1] / "lowering" / "lowered_operators.txt").read_text().split("\n")
NAMES = [line.strip() for line in LOWERED if line.strip() and not line.startswith("#")]
SECONDS = float(os.environ.get("ONEPASS_FUZZ_SECONDS", "120"))
SEED = int(os.environ.get("ONEPASS_FUZZ_SEED", "5000000"))
SHARDS = 2
LARGEST = 64 * 130  # elements of an input; the interpreter is slow
SLOWEST = 30.0  # seconds for one program

interpreted = make_backend({"target": "triton-interpret", "strict": True})


@pytest.mark.rotating
@pytest.mark.parametrize("name", NAMES)
def test_operator(name: str) -> None:
    """The smallest sample with more than a few elements, forward and backward."""
    if name not in operators():
        pytest.skip("this torch does not have it")
    operator = operators()[name]
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in operator.supported_dtypes("cpu")), None)
    if dtype is None or skip_reason(name, dtype):
        pytest.skip("no sample")
    cases = list(samples(name, dtype, 0))[:20]
    if not cases:
        pytest.skip("no sample")
    sizes = [sum(t.numel() for t in case.tensors) for case in cases]
    case = cases[min(range(len(cases)), key=lambda k: (sizes[k] < 4, sizes[k]))]
    try:
        check_case(case, interpreted, training=True)
    except Skipped as skipped:
        pytest.skip(str(skipped))


class TooSlow(BaseException):
    """A program whose values inside are too large for the interpreter; no verdict on it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs(shard: int) -> None:
    stop, seed, wrong, slow = time.monotonic() + SECONDS, SEED + shard, [], 0
    while time.monotonic() < stop and len(wrong) < 3:
        program = generate(seed)
        seed += SHARDS
        if any(t.numel() > LARGEST for t in program.load()[1]):
            continue
        try:
            with limited(SLOWEST):
                message = failure(program, interpreted)
        except TooSlow:
            slow += 1
            continue
        if message:
            try:
                with limited(4 * SLOWEST):
                    program, message = shrink(program, interpreted)
            except TooSlow:
                pass  # shown as it is
            wrong.append(program.repro(message))
    print(f"seeds {SEED + shard} to {seed} by {SHARDS}: {len(wrong)} wrong, {slow} too slow to judge")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("shape", [(33, 70), (1, 1), (7, 1031), (3, 40001), (600, 3), (0, 5), (9, 33000)])
def test_reductions_of_every_form(shape: tuple[int, int]) -> None:
    """Held, streamed, split, columns, several axes; Welford, value and index, online softmax; odd sizes."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        rows = [x.sum(-1), x.softmax(-1), x.logsumexp(-1), x.var(-1), x.argmax(-1) if x.numel() else x]
        columns = [x.sum(0), x.var(0), x.max(0)[0] if x.numel() else x, (x > 1).any(0)]
        return [*rows, *columns, x.sum(), x.mean(), (x * 2).relu().prod(-1)]

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = torch.compile(function, backend="onepass", options={"target": "triton-interpret", "strict": True})(x)
    rounding = 2e-5 + 5e-7 * shape[1] ** 0.5  # of a sum whose terms cancel
    for mine, exact in zip(ours, function(x.double()), strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=rounding, equal_nan=True)
        else:
            assert torch.equal(mine, exact)


def test_the_same_random_numbers_as_c() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.rand_like(x), torch.randn_like(x), torch.nn.functional.dropout(x, 0.3)]

    x = torch.ones(37, 260)
    results = []
    for target in ("cpu", "triton-interpret"):
        torch._dynamo.reset()
        torch.manual_seed(3)
        results.append(torch.compile(function, backend="onepass", options={"target": target, "strict": True})(x))
    uniform, normal, dropped = zip(*results, strict=True)
    assert torch.equal(*uniform) and torch.equal(*dropped)
    torch.testing.assert_close(*normal)


def test_dynamic_sizes() -> None:
    run = torch.compile(
        lambda x: torch.cat([x.softmax(-1), x + x.mean(0)], 1),
        backend="onepass",
        dynamic=True,
        options={"target": "triton-interpret", "strict": True},
    )
    for rows, columns in ((3, 5), (17, 130), (2, 1029)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(run(x), torch.cat([x.softmax(-1), x + x.mean(0)], 1))
