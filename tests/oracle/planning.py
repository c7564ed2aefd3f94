"""Planning without building: what the compiler decides for a program and a target, and the texts it would build.

Tensors have no memory and the builder no compiler, so a program takes a tenth of a second. A kernel that no chip's
compiler has seen has no registers and no spills: the decisions recorded are those of the first schedules.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from onepass import compilation
from onepass.backend import Backend, make_backend, record_compilations
from onepass.explain.capture import run_backward
from onepass.explain.planning import planning
from onepass.ir.record import CompileRecord
from onepass.ir.source import KernelSource
from onepass.ir.target import targets
from tests.oracle.program import Program

PROCESSORS = 2  # of the target "cpu", whatever this machine has
OPTIONS = {"tune": "off", "cache": False}


@dataclass(frozen=True, slots=True)
class Planned:
    """The records of a program's graphs, and the keys of the texts of their kernels."""

    records: tuple[CompileRecord, ...]
    keys: tuple[str, ...]


class NoCompiler:
    """A builder that keeps sources by their keys and builds nothing. No two share a build."""

    _count = itertools.count()

    def __init__(self) -> None:
        self.sources: dict[str, KernelSource] = {}
        self._fingerprint = f"no compiler {next(self._count)}"

    def fingerprint(self) -> str:
        return self._fingerprint

    def build(self, source: KernelSource, output: Path) -> None:
        self.sources[source.key] = source
        output.write_text(source.text)

    def load(self, path: Path, source: KernelSource) -> Callable[..., Any]:
        path.unlink()
        return _never_called


def _never_called(*_: Any) -> Any:
    raise RuntimeError("nothing was built")


@contextmanager
def without_compilers() -> Iterator[NoCompiler]:
    """Graphs compiled here are planned, scheduled and emitted."""
    builder = NoCompiler()
    with mock.patch.object(compilation, "builder_for", lambda _target: builder):
        yield builder


@contextmanager
def same_everywhere() -> Iterator[None]:
    """Plans for the CPU are those of a machine with two cores of Intel; the environment sets no option."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("ONEPASS_")}
    with (
        mock.patch.object(os, "cpu_count", lambda: PROCESSORS),
        mock.patch("onepass.ir.target._has_wide_products", lambda: False),
        mock.patch.dict(os.environ, plain, clear=True),
    ):
        targets.cache_clear()
        try:
            yield
        finally:
            targets.cache_clear()


def plan(program: Program, target: str) -> Planned:
    """What becomes of a program on a target, up to the texts of its kernels."""
    with without_compilers() as builder:
        records = compiled(program, target)
    return Planned(records, tuple(sorted(builder.sources)))


def compiled(program: Program, target: str, device: str = "cpu") -> tuple[CompileRecord, ...]:
    """The records of a program's graphs, compiled from tensors that have no memory."""
    torch.manual_seed(0)
    with same_everywhere(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients = program.train or program.recorded
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(gradients):
            with torch.device(device):
                arguments = program.arguments()
            if program.train:
                arguments = tuple(_with_gradient(a) for a in arguments)
            with planning(True), record_compilations() as records:
                result = traced_whole(program.function, make_backend({"target": target, **OPTIONS}), arguments)
                directions = [r.direction for r in records]
                if directions.count("backward") < directions.count("forward"):
                    run_backward(result)
    return tuple(records)


def traced_whole(function: Callable[..., Any], backend: Backend, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The function as one graph that AOTAutograd alone traces: quicker than dynamo, and with the recorded names."""
    places = [k for k, a in enumerate(arguments) if isinstance(a, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        filled = list(arguments)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return [t for t in tree_leaves(function(*filled)) if isinstance(t, torch.Tensor)]

    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{k}") for k in range(len(places))]
    graph.output(graph.call_function(call, tuple(inputs)))
    tensors = [arguments[k] for k in places]
    found: list[torch.Tensor] = backend(torch.fx.GraphModule(torch.nn.Module(), graph), tensors)(*tensors)
    return found


def _with_gradient(value: Any) -> Any:
    wanted = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.requires_grad_() if wanted else value
