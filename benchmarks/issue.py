"""Time inside kernels, checked: `python -m benchmarks.issue` on a GPU writes benchmarks/results/<chip>-issue.*.

Of six kernels, the parts of the machine code's cycles are compared with a count by hand, and exposed times with the
same program from which a person took the operation out. Without a GPU the machine code is that of an absent H200, and
exposed times are of small sizes on the CPU: that shows that all of it works.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.explain.measured import StepTime
from onepass.ir.record import KernelRecord
from onepass.profiling.issue import CONVERSIONS, MEMORY, POSITIONS, PRODUCTS, STATES
from onepass.runtime.rounds import Rounds

from .report import facts_lines, table
from .systems import facts, result_name

RESULTS = Path(__file__).parent / "results"
BF16, CAP, HEAD = torch.bfloat16, 20.0, 128
OPTIONS = {"strict": True, "tune": "off"}
SECONDS = 0.3  # of measuring one program and those with an operation taken out
DEAREST, TIED, NEAR = 3, 1.5, 0.1  # counts by hand within this ratio are a tie; part of a kernel's time that is noise
# What the kernels' reports call operations, by the names that a profile gives to what it takes out.
SAME = {"onepass.uniform": "random", "_to_copy": CONVERSIONS, "amax": "max"}
Arguments = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One program. `counts`: cycles for each element, by hand; `removed`: the program without an operation, by hand.

    A sum in one sweep with its maximum is nothing without its exponential: no program by hand has the kernel's form.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: Callable[[float], Arguments]  # of a part of the full size
    counts: dict[str, float]
    removed: dict[str, Callable[..., Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class Found:
    """What was seen of one case, in parts of all cycles and in us."""

    name: str
    kernel: str
    issue: dict[str, float]
    counts: dict[str, float]
    time_us: float = 0.0
    exposed_us: dict[str, float] = field(default_factory=dict)
    spread_us: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    whole_us: float = 0.0  # of the program that the ones with an operation removed by hand are compared with
    removed_us: dict[str, float] = field(default_factory=dict)
    problem: str = ""


# --- programs, and what a person would change to see what an operation costs ---


def bias_gelu_dropout(x: Tensor, bias: Tensor) -> Tensor:
    return F.dropout(F.gelu(x + bias), 0.1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def norm_by_first(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float()
    mean = wide[:, :1]
    return ((wide - mean) * torch.rsqrt(mean * mean + 1e-5) * weight + bias).to(x.dtype)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def softmax_of(
    x: Tensor,
    exp: Callable[[Tensor], Tensor] = torch.exp,
    largest: Callable[[Tensor], Tensor] = lambda x: x.amax(-1, True),
    total: Callable[[Tensor], Tensor] = lambda x: x.sum(-1, True),
    divided: Callable[[Tensor, Tensor], Tensor] = torch.div,
) -> Tensor:
    """Softmax of rows with one of its operations changed."""
    wide = x.float()
    e = exp(wide - largest(wide))
    return divided(e, total(e)).to(x.dtype)


def first(x: Tensor) -> Tensor:
    return x[..., :1]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT) * HEAD**-0.5


def capped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(CAP * torch.tanh(scores(q, k) / CAP), -1) @ v


def attention_without_tanh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With something as cheap as nothing in its place: plain attention would be a library's kernel."""
    return torch.softmax(CAP * torch.relu(scores(q, k) / CAP), -1) @ v


def int8_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x @ (weight.to(x.dtype) * scale)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


def cross_entropy_by_first(x: Tensor, target: Tensor) -> Tensor:
    wide = x.float()
    moved = wide - first(wide)
    logs = moved - torch.exp(moved).sum(-1, True).log()
    return -logs.gather(1, target[:, None]).mean()


def _rows(columns: int, others: int, rows: int) -> Callable[[float], Arguments]:
    """A matrix, and vectors as long as its rows."""
    return lambda part: (
        torch.randn(max(8, int(rows * part)), columns, dtype=BF16),
        *(torch.randn(columns, dtype=BF16) for _ in range(others)),
    )


def _heads(part: float) -> Arguments:
    tokens = max(64, int(4096 * part))
    return tuple(torch.randn(4, 16 if part == 1 else 1, tokens, HEAD, dtype=BF16) for _ in range(3))


def _weights(part: float) -> Arguments:
    side = max(256, int(8192 * part))
    weight = torch.randint(-100, 100, (side, side), dtype=torch.int8)
    return torch.randn(16, side, dtype=BF16), weight, torch.rand(side).to(BF16)


def _logits(part: float) -> Arguments:
    rows, classes = max(16, int(8192 * part)), 32000 if part == 1 else 2000
    return torch.randn(rows, classes, dtype=BF16), torch.randint(0, classes, (rows,))


# Counts by hand, for each element and lane, in cycles that a warp takes its quarter of a multiprocessor (programming
# guide, compute capability 9.0): 1 for a float instruction, 2 for integers, 8 for the special-function unit, 4 for a
# shuffle and for 32 bits from or to memory. A fold over a block's lanes is about 50 for the elements of a thread.
FOLD = 50 / 16
CASES = (
    Case(
        "bias + GELU + dropout", bias_gelu_dropout, _rows(4096, 1, 8192),
        # GELU: reciprocal, power of two, 14 for the polynomial and its tail. Philox: 10 rounds for 4 elements, each of
        # two products, high and low halves, and two exclusive ors of three. Memory: 2 bytes in, 2 out, the bias.
        {"gelu": 8 + 8 + 14, "random": 10 * (2 * 4 + 2 * 2) / 4, MEMORY: 2 + 2 + 1, CONVERSIONS: 2 + 1 + 1 + 1,
         "mul": 2, "ge": 2, "add": 1},
        {"gelu": lambda x, b: F.dropout(x + b, 0.1), "random": lambda x, b: F.gelu(x + b) * 1.1},
    ),
    Case(
        "LayerNorm", layer_norm, _rows(4096, 2, 16384),
        # Sum, difference and square are 3 and two folds. Four tensors of 2 bytes; three of them are widened.
        {"var_mean": 3 + 2 * FOLD, CONVERSIONS: 3 * 3 + 1, MEMORY: 4 * 2, "mul": 1, "add": 1},
        {"var_mean": norm_by_first},
    ),
    Case(
        "softmax", softmax, _rows(4096, 0, 16384),
        {"exp": 8 + 1, "max": 1 + FOLD, "sum": 1 + FOLD, MEMORY: 2 + 2, CONVERSIONS: 3 + 1, "div": 4, "sub": 1},
        {"exp": lambda x: softmax_of(x, exp=lambda y: y), "max": lambda x: softmax_of(x, largest=first),
         "sum": lambda x: softmax_of(x, total=first), "div": lambda x: softmax_of(x, divided=torch.add)},
    ),
    Case(
        "attention, scores soft-capped", capped_attention, _heads,
        # For each score: 2 x 128 multiply-adds are 16 cycles of the matrix unit. States: maximum, sum, and 128 results
        # for 64 scores times the factor that the new maximum brings.
        {PRODUCTS: 16, "exp": 8 + 1, "tanh": 8, STATES: 1 + 1 + 2, CONVERSIONS: 1, "div": 1, "mul": 2, "sub": 1},
        {"tanh": attention_without_tanh},
    ),
    Case(
        "int8 product for 16 rows", int8_product, _weights,
        # For each weight: a byte into shared memory and, since neighbours of a column are far apart, a load of its own
        # from there; two instructions for two bytes on their way to bfloat16 and one to pair them; a 16 x 8 x 16
        # product of 4 cycles takes 4 weights of a lane.
        {MEMORY: 1 + 4, CONVERSIONS: 2 + 1, PRODUCTS: 1},
    ),
    Case(
        "cross-entropy", cross_entropy, _logits,
        # In turns: a maximum and a sum, each folded over the block, and what was summed before is scaled.
        {"exp": 8 + 1, STATES: 2 + 2 * FOLD, MEMORY: 2 + 1, CONVERSIONS: 3, "sub": 1},
        {"max": cross_entropy_by_first},
    ),
)  # fmt: skip


# --- seeing ---


def observe(case: Case, device: str, part: float) -> Found:
    """Everything about one case; a problem is kept, not raised, so that the others are still seen."""
    found = Found(case.name, "", {}, case.counts)
    try:
        if device == "cpu":
            with FakeTensorMode():
                inputs = case.inputs(1.0)
                _note_issue(found, onepass.explain(case.function, *inputs, target="sm_90", operations=True).kernels)
        with torch.device(device):
            inputs = case.inputs(part)
        _times(case, device, inputs, found)
    except Exception as error:
        found.problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return found


def _note_issue(found: Found, kernels: list[KernelRecord]) -> None:
    """The shares of the kernel that is predicted to take longest."""
    kernel = max(kernels, key=lambda k: k.predicted_us)
    found.kernel, found.issue = kernel.name, kernel.issue
    if not kernel.issue:
        raise RuntimeError("the machine code could not be read")


def _times(case: Case, device: str, inputs: Arguments, found: Found) -> None:
    profile = onepass.profile(case.function, *inputs, beside=(), operations=True, seconds=SECONDS, options=OPTIONS)
    if device == "cuda":
        _note_issue(found, [k for g in profile.graphs for k in g.kernels])
    step: StepTime = max((s for s in profile.steps if s.kind == "kernel"), key=lambda s: s.time_us)
    found.time_us = step.alone_us or step.time_us
    for p in step.parts:
        name = SAME.get(p.name, p.name)
        if p.problem:
            found.refused[name] = p.problem
        elif p.exposed_us > found.exposed_us.get(name, float("-inf")):
            found.exposed_us[name], found.spread_us[name] = p.exposed_us, p.spread_us
    programs = [case.function, *case.removed.values()]
    calls = [_called(torch.compile(p, backend="onepass", options=OPTIONS, dynamic=False), inputs) for p in programs]
    with torch.no_grad():
        found.whole_us, *without = (laps.time_us for laps in Rounds(torch.device(device)).run(calls, SECONDS))
    found.removed_us = {name: found.whole_us - us for name, us in zip(case.removed, without, strict=True)}


def _called(function: Callable[..., Any], inputs: Arguments) -> Callable[[], Any]:
    return lambda: function(*inputs)


# --- judging ---


def dearest(values: dict[str, float]) -> list[str]:
    """The names with the largest values, without index arithmetic, which is nobody's operation."""
    return [name for name in sorted(values, key=lambda n: -values[n]) if name != POSITIONS][:DEAREST]


def issue_agrees(found: Found) -> bool:
    """Whether the three dearest operations are the three dearest by hand, ties left open."""
    third = sorted(found.counts.values(), reverse=True)[: min(DEAREST, len(found.counts))][-1]
    return bool(found.issue) and all(found.counts.get(n, 0.0) * TIED >= third for n in dearest(found.issue))


def compared(found: Found) -> list[str]:
    """Operations with both times, those that cost most when a person removes them first."""
    both = [name for name in found.removed_us if name in found.exposed_us]
    return sorted(both, key=lambda name: -found.removed_us[name])


def exposed_agrees(found: Found) -> bool:
    """Whether both times of each operation are the same within the noise."""
    room = {name: max(NEAR * found.time_us, 2 * found.spread_us[name]) for name in compared(found)}
    return all(abs(found.exposed_us[name] - found.removed_us[name]) <= room[name] for name in room)


# --- report ---


def rows_of(found: Found) -> list[list[str]]:
    """One row for each operation, those that issue most first."""
    whole = sum(found.counts.values())
    names = dict.fromkeys([*found.issue, *found.counts, *found.exposed_us, *found.removed_us])
    rows = []
    for name in names:
        exposed = f"{found.exposed_us[name]:.1f} +- {found.spread_us[name]:.1f}" if name in found.exposed_us else ""
        rows.append([
            name,
            f"{100 * found.issue[name]:.0f} %" if name in found.issue else "",
            f"{100 * found.counts[name] / whole:.0f} %" if name in found.counts else "",
            exposed or found.refused.get(name, ""),
            f"{found.removed_us[name]:.1f}" if name in found.removed_us else "",
        ])  # fmt: skip
    return rows


def markdown(seen: list[Found], about: dict[str, Any], note: str, seconds: float) -> str:
    """The report."""
    head = ["operation", "of all cycles", "by hand", "exposed, us", "removed by hand, us"]
    lines = ["# Time inside six kernels", "", *facts_lines(about), "", f"{note} All of it took {seconds:.0f} s.", ""]
    summary = []
    for f in seen:
        names = compared(f)
        times = [", ".join(f"{n} {of[n]:.1f}" for n in names) for of in (f.exposed_us, f.removed_us)]
        issue, exposed = (["NO", "yes"][agrees] for agrees in (issue_agrees(f), exposed_agrees(f)))
        dear = [", ".join(dearest(of)) for of in (f.issue, f.counts)]
        summary.append([f.name, *dear, issue, *times, exposed if names else "nothing to compare"])
    titles = ["kernel", "dearest by issue time", "dearest by hand", "agree"]
    titles += ["exposed, us", "with the operation removed by hand, us", "agree within the noise"]
    lines += [*table(titles, summary), ""]
    for f in seen:
        lines += [
            f"## {f.name}",
            "",
            f"`{f.kernel}`, {f.time_us:.1f} us by itself; the program {f.whole_us:.1f} us",
            "",
        ]
        lines += [f"Problem: {f.problem}", ""] if f.problem else []
        lines += [*table(head, rows_of(f)), ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.issue", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="words of names, separated by ';'")
    parser.add_argument("--part", type=float, help="of the full size that is run; without a GPU 1/64")
    parser.add_argument("--out", type=Path, help="folder for the results; without a GPU none are written without it")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    part = given.part or (1.0 if device == "cuda" else 1 / 64)
    words = [w.strip() for w in given.only.split(";") if w.strip()]
    start = time.perf_counter()
    seen = []
    for case in CASES:
        if not words or any(w in case.name for w in words):
            seen.append(observe(case, device, part))
            print(f"{case.name}: {seen[-1].problem or 'seen'} ({time.perf_counter() - start:.0f} s)", file=sys.stderr)
    absent = "Machine code of an absent H200; times of this CPU at a part of the size, which show that it works alone."
    about = {"facts": facts(device), "device": device}
    text = markdown(seen, about, "" if device == "cuda" else absent, time.perf_counter() - start)
    print(text)
    if folder := given.out or (RESULTS if device == "cuda" and not words else None):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{result_name(device)}-issue"
        (folder / f"{name}.md").write_text(text.rstrip("\n") + "\n", "utf-8")
        kept = {**about, "part": part, "kernels": [asdict(f) for f in seen]}
        (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return 1 if any(f.problem for f in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
