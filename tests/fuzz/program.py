"""A random program as text: input lines, statements, outputs. Text is what runs, shrinks and is printed.

Dtypes are names (f32, bf16, ...), so the same text with every float meaning float64 is the reference.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b8": torch.bool,
}  # fmt: skip
WIDE = {name: torch.float64 if dtype.is_floating_point else dtype for name, dtype in DTYPES.items()}
NAME = re.compile(r"\b[xv]\d+\b")


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers that every float type holds exactly: sixteenths from -2 to 2; whole numbers for integers."""
    numbers = torch.randint(-32, 33, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    numbers = numbers.to(torch.get_default_device())
    if dtype is torch.bool:
        return numbers > 0
    return (numbers / 16).to(dtype) if dtype.is_floating_point else (numbers // 4).to(dtype)


def at_once(read: torch.Tensor) -> torch.Tensor:
    """A read that overlaps the write it feeds: eager wants a copy, a compiled program must do without."""
    return read if torch.compiler.is_compiling() or torch._guards.detect_fake_mode(read) else read.clone()


@dataclass(frozen=True)
class Statement:
    """`name = text`, or `text` alone where `name` is empty (an in-place update)."""

    name: str
    text: str

    @property
    def line(self) -> str:
        return f"{self.name} = {self.text}" if self.name else self.text

    @property
    def uses(self) -> set[str]:
        return set(NAME.findall(self.text))


@dataclass(frozen=True)
class Program:
    """A whole case. `setup` makes the inputs, in order; later ones may be views of earlier ones."""

    seed: int
    setup: tuple[Statement, ...]
    body: tuple[Statement, ...]
    outputs: tuple[str, ...]
    gradients: bool
    through_dynamo: bool = False
    dynamic: bool = False
    skipped: tuple[str, ...] = ()  # outputs that nobody differentiates
    resized: bool = False  # called a second time with inputs of another size

    @property
    def inputs(self) -> list[str]:
        return [s.name for s in self.setup]

    def source(self) -> str:
        """The function under test."""
        lines = [f"def program({', '.join(self.inputs)}):", *(f"    {s.line}" for s in self.body)]
        return "\n".join([*lines, f"    return [{', '.join(self.outputs)}]"]) + "\n"

    def setup_source(self) -> str:
        lines = ["def inputs():", *(f"    {s.line}" for s in self.setup)]
        return "\n".join([*lines, f"    return [{', '.join(self.inputs)}]"]) + "\n"

    def load(self, wide: bool = False) -> tuple[Any, list[torch.Tensor]]:
        """The function and new inputs; `wide`: every float is float64."""
        space = namespace(wide)
        exec(compile(self.setup_source() + self.source(), f"<program {self.seed}>", "exec"), space)
        return space["program"], space["inputs"]()

    def skipped_positions(self) -> set[int]:
        return {k for k, name in enumerate(self.outputs) if name in self.skipped}

    def repro(self, message: str) -> str:
        """A file that shows the failure on its own."""
        names = ", ".join(f"{k}={v}" for k, v in DTYPES.items())
        note = "".join(f"# {line}\n" for line in message.splitlines()[:6])
        grad = (
            "expected = [o for o in program(*inputs()) if o.requires_grad]\n"
            "got = [o for o in run(*inputs()) if o.requires_grad]\n"
            f"# gradients of all outputs but {list(self.skipped)}: torch.autograd.grad, fixed weights\n"
            if self.gradients
            else ""
        )
        return (
            f"# python -m tests.fuzz --n 1 --seed {self.seed}\n{note}"
            f"import torch\nimport torch.nn.functional as F\nimport onepass\n\nglobals().update(dict({names}))\n\n\n"
            f"{inspect.getsource(values)}\n\n{inspect.getsource(at_once)}\n\n{self.setup_source()}\n\n{self.source()}\n\n"
            f'run = torch.compile(program, backend="onepass", dynamic={self.dynamic or None})\n{grad}'
            "for ours, eager in zip(run(*inputs()), program(*inputs())):\n    print(ours, eager)\n"
        )

    def without(self, index: int) -> Program | None:
        """The program less one statement; what depended on its result takes an operand of it, or goes too."""
        gone, rest = self.body[index], self.body[index + 1 :]
        kept = list(self.body[:index])
        known = {*self.inputs, *(s.name for s in kept)}
        alias = {gone.name: _first(gone, known)} if gone.name else {}
        for statement in rest:
            text = NAME.sub(lambda m: alias.get(m.group()) or m.group(), statement.text)
            new = replace(statement, text=text)
            if new.uses <= known:
                kept.append(new)
                known.add(new.name)
        outputs = tuple(dict.fromkeys(n for o in self.outputs if (n := alias.get(o) or o) in known))
        return replace(self, body=tuple(kept), outputs=outputs) if outputs else None


def with_other_sizes(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of which the longest size is one less wherever it occurs; no longer views of one another."""
    longest = max((n for x in inputs for n in x.shape), default=0)
    found = []
    for x in inputs:
        smaller = x.detach()
        for dim, size in enumerate(x.shape):
            smaller = smaller.narrow(dim, 0, size - 1) if size == longest > 2 else smaller
        found.append(smaller.clone().requires_grad_(x.requires_grad))
    return found


def _first(statement: Statement, known: set[str]) -> str | None:
    return next((n for n in NAME.findall(statement.text) if n in known), None)


def namespace(wide: bool) -> dict[str, Any]:
    import torch.nn.functional as functional

    return {"torch": torch, "F": functional, "values": values, "at_once": at_once, **(WIDE if wide else DTYPES)}
