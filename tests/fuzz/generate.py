"""Random programs, by trial: a proposed statement is run, and kept if it works and stays of moderate size.

Every value also exists in float64. Where the two are equal the value is *exact*; only exact values meet
operations with jumps (comparison, rounding, argmax, and in gradients abs, relu, max), for elsewhere one
unit in the last place may rightly change the answer.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import operations
from .program import Program, Statement, namespace, with_other_sizes

LARGEST = 1e3  # magnitude of a value
SMALL = 20_000  # elements of an ordinary input
REFUSED = (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError)  # eager says no to the statement
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 64, 97)
WIDTHS = ("f32", "f32", "f32", "f32", "bf16", "f16", "f64", "i64", "i64", "i32", "i16", "i8", "u8", "b8", "b8")


@dataclass
class State:
    """The program so far, with its values in the program's types and in float64."""

    rng: random.Random
    gradients: bool
    narrow: dict[str, Any] = field(default_factory=lambda: namespace(False))
    wide: dict[str, Any] = field(default_factory=lambda: namespace(True))
    exact: dict[str, bool] = field(default_factory=dict)
    setup: list[Statement] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    protected: set[str] = field(default_factory=set)  # may not be written

    def names(self) -> list[str]:
        return list(self.exact)

    def value(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.narrow[name]
        return found


def generate(seed: int) -> Program:
    """The program of a seed, found on the CPU wherever it will run: a refused statement does no harm there."""
    rng = random.Random(seed)
    large = rng.random() < 0.03
    state = State(rng, gradients=rng.random() < 0.6)
    with warnings.catch_warnings(), torch.device("cpu"):
        warnings.simplefilter("ignore")
        _add_inputs(state, large)
        wanted = rng.randint(3, 8) if large else rng.randint(3, 20)
        for _ in range(wanted * 6):
            if len(state.body) >= wanted:
                break
            _try_statement(state)
        outputs, through_dynamo = _choose_outputs(state), rng.random() < 0.2
        program = Program(
            seed,
            tuple(state.setup),
            tuple(state.body),
            outputs,
            state.gradients,
            through_dynamo=through_dynamo,
            dynamic=rng.random() < 0.4,
            skipped=tuple(o for o in outputs if rng.random() < 0.25),
            resized=through_dynamo and rng.random() < 0.4,
        )
        program = program if _differentiates(program) else _without_gradients(program)
        return program if _runs_again(program) else replace(program, resized=False)


def coarsest_float(program: Program) -> torch.dtype | None:
    """The narrowest float type the program's text names: its results are no better than that."""
    text = program.setup_source() + program.source()
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        if name in text:
            return dtype
    return None


def _add_inputs(state: State, large: bool) -> None:
    rng = state.rng
    shape = _large_shape(rng) if large else _small_shape(rng)
    for number in range(rng.randint(1, 4)):
        name, others = f"x{number}", [s.name for s in state.setup]
        if others and rng.random() < 0.2:
            text = _view_of(rng, rng.choice(others), state)
            leaf = text in state.protected
        elif state.protected and rng.random() < 0.25:
            text, leaf = f"{rng.choice(sorted(state.protected))} * 1", False  # made of a leaf: it may be written
        else:
            width = rng.choice(WIDTHS) if number else rng.choice(WIDTHS[:6])
            text = _layout(rng, number, _related(rng, shape), width)
            leaf = state.gradients and width in ("f32", "f64", "bf16", "f16") and rng.random() < 0.7
            if leaf:
                text = f"({text}).detach().requires_grad_()"
        statement = Statement(name, text)
        _run(state, statement)
        state.setup.append(statement)
        state.exact[name] = True
        if leaf:
            state.protected.add(name)


def _small_shape(rng: random.Random) -> tuple[int, ...]:
    while True:
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 3, 4, 4))))
        if torch.Size(shape).numel() <= SMALL:
            return shape


def _large_shape(rng: random.Random) -> tuple[int, ...]:
    return rng.choice(((1024, 2048), (1030, 2051), (2048, 1024), (3, 700, 1024), (2_100_000,)))


def _related(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts with `shape`: the same, some dimensions 1, or leading ones missing."""
    kind = rng.random()
    if kind < 0.6:
        return shape
    if kind < 0.8:
        return tuple(1 if rng.random() < 0.4 else n for n in shape)
    return shape[rng.randint(0, len(shape)) :]


def _layout(rng: random.Random, seed: int, shape: tuple[int, ...], width: str) -> str:
    """An expression of that shape: dense, transposed, a slice, expanded, or at an odd offset of its storage."""
    kind = rng.random()
    seed += rng.randint(0, 10_000)

    def make(of: tuple[int, ...]) -> str:
        return f"values({seed}, {of}, {width})"

    if len(shape) == 4 and kind < 0.3:
        return f"{make(shape)}.to(memory_format=torch.channels_last)"
    if kind < 0.12 and len(shape) >= 2:
        i, j = rng.sample(range(len(shape)), 2)
        swapped = list(shape)
        swapped[i], swapped[j] = shape[j], shape[i]
        return f"{make(tuple(swapped))}.transpose({i}, {j})"
    if kind < 0.22 and shape:
        step = rng.choice((1, 2, 3))
        outer = tuple(n * step + 1 if k == len(shape) - 1 else n + 2 for k, n in enumerate(shape))
        cuts = [f"1:{n + 1}" for n in shape[:-1]] + [f"1:{shape[-1] * step + 1}:{step}"]
        return f"{make(outer)}[{', '.join(cuts)}]"
    if kind < 0.28 and shape:
        k = rng.randrange(len(shape))
        return f"{make(tuple(1 if i == k else n for i, n in enumerate(shape)))}.expand({shape})"
    if kind < 0.36:
        return f"{make((torch.Size(shape).numel() + 3,))}[3:].view({shape})"
    return make(shape)


def _view_of(rng: random.Random, name: str, state: State) -> str:
    """Another input that shares storage with `name`, or is it."""
    tensor = state.value(name)
    base = f"{name}.detach()" if name in state.protected else name
    options = [name, base]
    if tensor.dim():
        options += [f"{base}{view}" for view in ("[1:]", "[:-1]", "[::2]", ".transpose(0, -1)", ".unsqueeze(0)")]
    return rng.choice(options)


def _run(state: State, statement: Statement) -> None:
    for space in (state.narrow, state.wide):
        exec(statement.line, space)


def _try_statement(state: State) -> None:
    """Propose, run on copies where it writes, keep if it is sound."""
    proposal = operations.propose(state)
    if proposal is None:
        return
    name = "" if proposal.in_place else f"v{len(state.body)}"
    statement = Statement(name, proposal.text)
    operands = statement.uses
    if not operands <= state.exact.keys():
        return
    exact = all(state.exact[n] for n in operands)
    jumps = proposal.kind == "jump" or (proposal.kind == "kink" and state.gradients)
    if jumps and not exact:
        return
    if proposal.in_place:
        _try_update(state, statement, proposal.written, exact and proposal.kind != "smooth")
        return
    try:
        _run(state, statement)
        sound = _moderate(state.narrow[name]) and _aliases_alike(state, name)
    except REFUSED:
        sound = False
    if not sound:
        state.narrow.pop(name, None)
        state.wide.pop(name, None)
        return
    state.body.append(statement)
    state.exact[name] = exact and proposal.kind != "smooth" and _equal(state, name)


def _try_update(state: State, statement: Statement, written: str, exact: bool) -> None:
    if written in state.protected or any(_shares(state, written, p) for p in state.protected):
        return
    trial = _twin(state)
    try:
        _run(trial, statement)
        sound = all(_moderate(trial.narrow[n]) for n in state.exact)
    except REFUSED:
        sound = False
    if not sound:
        return
    _run(state, statement)
    state.body.append(statement)
    for name in state.exact:
        if _shares(state, written, name):
            state.exact[name] = exact and _equal(state, name)


def _twin(state: State) -> State:
    """The state, replayed: an update that fails half-way must not have happened."""
    twin = State(state.rng, state.gradients)
    for statement in [*state.setup, *state.body]:
        _run(twin, statement)
    return twin


def _shares(state: State, left: str, right: str, wide: bool = False) -> bool:
    space = state.wide if wide else state.narrow
    return bool(space[left].untyped_storage().data_ptr() == space[right].untyped_storage().data_ptr())


def _aliases_alike(state: State, name: str) -> bool:
    """A cast to float32 copies a bfloat16 but is a float64's own alias in the reference: later updates would differ."""
    return all(_shares(state, name, other) == _shares(state, name, other, wide=True) for other in state.exact)


def _equal(state: State, name: str) -> bool:
    narrow, wide = state.narrow[name].detach(), state.wide[name].detach()
    return bool(torch.equal(narrow.to(wide.dtype), wide))


def _moderate(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.numel() > 5_000_000 or value.dim() > 6:
        return False
    if not value.is_floating_point() or not value.numel():
        return True
    return bool(torch.isfinite(value).all()) and float(value.detach().abs().max()) <= LARGEST


def _choose_outputs(state: State) -> tuple[str, ...]:
    rng = state.rng
    made = [s.name for s in state.body if s.name] or state.names()
    chosen = made[-1:] + rng.sample(made, min(len(made), rng.randint(0, 3)))
    if rng.random() < 0.15:
        chosen.append(rng.choice(state.names()))
    if rng.random() < 0.9:
        chosen = list(dict.fromkeys(chosen))
    return tuple(chosen)


def _differentiates(program: Program) -> bool:
    """Eager can take the gradients, and they are of moderate size."""
    if not program.gradients:
        return True
    from ..checking import execute

    try:
        skipped = program.skipped_positions()
        runs = [execute(*program.load(wide), gradients=True, skipped=skipped) for wide in (False, True)]
    except RuntimeError:
        return False
    return bool(runs[0].gradients) and all(g is None or _moderate(g) for run in runs for g in run.gradients)


def _runs_again(program: Program) -> bool:
    """Eager does the same with inputs of another size."""
    from ..checking import execute

    for wide in (False, True) if program.resized else ():
        function, inputs = program.load(wide)
        try:
            execute(function, with_other_sizes(inputs), program.gradients, skipped=program.skipped_positions())
        except REFUSED:
            return False
    return True


def _without_gradients(program: Program) -> Program:
    setup = tuple(replace(s, text=s.text.replace(".requires_grad_()", "")) for s in program.setup)
    return replace(program, setup=setup, gradients=False)
