"""Kernels and rewrites that users plug in: `onepass.kernel`, `onepass.replace`.

Each has a reference in torch. A part of a program whose text in real numbers (`analysis/canonical.py`) is that of the
reference, traced on tensors like those the part reads, runs in the user's way. Before that the user's function is
compared with the reference on samples; a kernel is also timed against ours. Inference only, sizes fixed.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from .analysis.canonical import canonical
from .analysis.cuts import Parts, ProgramPart, definitions, part_of, work
from .compilation import can_run, compile_graph
from .errors import UnequalReplacement
from .explain.planning import is_planning
from .ir.dtypes import DType
from .ir.expr import Expr, Load, rewrite
from .ir.options import Options
from .ir.plan import Decision
from .ir.poly import Poly
from .ir.program import Buffer, Define, Extern, Origin, Program, Statement, View
from .ir.target import Target
from .lowering.decompositions import decomposition_table
from .lowering.graph import lower_graph
from .lowering.torch_private import outside_of_traces

Function = Callable[..., Tensor]
F = TypeVar("F", bound=Function)
Metas = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...]  # shape, strides, ...

MOST_WAYS = 64  # of giving a part's inputs to a reference
SAMPLES = (1.0, 8.0, 1e-2)  # the standard deviations of three
MOST_ELEMENTS = 2**25  # of tensors that samples are made of
RUNS, RUN_SECONDS = 5, 0.02
NOT_SPLICED = "its replacement has calls, or a result of another layout"
MOST_LONGER = 3  # times as many operations as the reference has
_WORD = re.compile(r"[a-z_0-9.]+(?:<\w+>)?\(|[a-z]+(?:\.\d)?\[|\^-?\d+(?:/\d+)?|p\d+\[")
# Of the largest value: what a kernel may differ from its reference in float64, beyond twice what eager does.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SAME = 1e-5  # in float64: a reference may itself convert to float32


class KernelWarning(UserWarning):
    """A kernel or a rewrite that was plugged in is not used, because it computes something else."""


@dataclass(frozen=True, eq=False)
class Plug:
    """What a user plugged in. `function`: a kernel, or what replaces the reference where it is a `pattern`."""

    name: str
    function: Function
    reference: Function
    example: tuple[Tensor, ...]
    pattern: bool = False
    always: bool = False  # a kernel is used, however long it takes
    where: Callable[..., bool] | None = None
    traced: dict[tuple[Metas, str], tuple[Program, GraphModule] | None] = field(default_factory=dict)
    verdicts: dict[tuple[Metas, str], Decision] = field(default_factory=dict)


_plugs: list[Plug] = []
_lock = threading.Lock()


def kernel(
    reference: Function, example: Sequence[Tensor], *, always: bool = False, where: Callable[..., bool] | None = None
) -> Callable[[F], F]:
    """Declare that a function computes what `reference` does, and runs in its place where it is faster.

    `example`: tensors to call it with. `always`: it is used even if it is slower. `where`: is asked with the tensors
    of a place, which have no values.
    """

    def register(function: F) -> F:
        name = getattr(function, "__name__", None) or str(function)
        _add(Plug(name, function, reference, tuple(example), always=always, where=where))
        return function

    return register


def replace_by(
    pattern: Function, replacement: Function, example: Sequence[Tensor], where: Callable[..., bool] | None = None
) -> None:
    """Compute what `pattern` does by `replacement`. They are compared on samples first: `UnequalReplacement`."""
    name = getattr(pattern, "__name__", str(pattern))
    plug = Plug(name, replacement, pattern, tuple(example), pattern=True, where=where)
    if (difference := _difference(plug, _metas_of(example))) is not None:
        raise UnequalReplacement(name, difference)
    _add(plug)


def unplug() -> None:
    """Forget all kernels and rewrites. What is compiled already stays as it is."""
    with _lock:
        _plugs.clear()


def _add(plug: Plug) -> None:
    with _lock:
        _plugs.append(plug)


def in_training() -> list[Decision]:
    """What a training graph is told of what is plugged in."""
    with _lock:
        reason = "what is plugged in runs in inference only"
        return [Decision(plug.name, plug.name, "kernel", False, reason) for plug in _plugs]


def plugged(graph: GraphModule, target: Target, options: Options) -> Plugged | None:
    """What is plugged in, for one graph; None where there is nothing."""
    with _lock:
        return Plugged(tuple(_plugs), graph, target, options) if _plugs and options.fuse else None


class Plugged:
    """What is plugged in, for the compilation of one graph."""

    def __init__(self, plugs: tuple[Plug, ...], graph: GraphModule, target: Target, options: Options) -> None:
        self.plugs, self.target, self.options = plugs, target, options
        self.runs = can_run(target.name, graph) and not is_planning()

    def rewrite(self, program: Program, notes: list[Decision]) -> Program:
        """The program with parts of it in the users' way."""
        with outside_of_traces(), torch.no_grad():
            return self._rewritten(program, notes)

    def _rewritten(self, program: Program, notes: list[Decision]) -> Program:
        for plug in self.plugs:
            found = self.traced(plug, _metas_of(plug.example))
            example = part_of(found[0]) if found is not None else None
            if example is None:
                problem = f"{plug.name} is not used: its reference is no single computation of kernels"
                notes.append(Decision(plug.name, plug.name, "kernel", False, problem))
                continue
            wanted, words = work(example.defines), _words(_text(example, example.inputs))
            parts = Parts(program)
            for end in reversed([*parts.defines.values()]):
                if end.buffer in parts.defines:
                    ending = parts.ending(end, wanted, MOST_LONGER * len(example.defines))
                    changed = self._at(plug, program, reversed([*ending]), words, notes)
                    parts = parts if changed is program else Parts(changed)
                    program = changed
        return program

    def _at(
        self, plug: Plug, program: Program, parts: Iterable[ProgramPart], words: list[str], notes: list[Decision]
    ) -> Program:
        """The program with the first of some parts that computes what the reference does in the user's way."""
        for part in parts:
            text = _text(part, part.inputs) if len(part.inputs) == len(plug.example) else None
            if text is None or _words(text) != words:
                continue
            for views in _ways(part.inputs):
                metas = tuple(map(_meta, views))
                found = self.traced(plug, metas)
                same = part_of(found[0]) if found is not None else None
                if found is None or same is None or {*same.inputs} - {*found[0].inputs}:
                    continue
                if same.end.buffer.dtype is not part.end.buffer.dtype:
                    continue
                given = dict(zip((v.buffer for v in views), found[0].inputs, strict=True))
                order = [b for input_ in part.inputs if isinstance(b := given[input_], Buffer)]
                if _text(same, order) == text and self._is_wanted(plug, metas):
                    verdict = self._verdict(plug, metas)
                    changed = self._with(plug, program, part, views, found, verdict) if verdict.accepted else program
                    if verdict.accepted and changed is program:
                        verdict = replace(verdict, accepted=False, reason=f"{plug.name}: {NOT_SPLICED}")
                    names = part.defines[0].origin.node, part.end.origin.node
                    notes.append(replace(verdict, producer=names[0], consumer=names[1]))
                    return changed
        return program

    def _is_wanted(self, plug: Plug, metas: Metas) -> bool:
        return plug.where is None or bool(plug.where(*(_empty(m, "meta") for m in metas)))

    def traced(self, plug: Plug, metas: Metas) -> tuple[Program, GraphModule] | None:
        """The reference on tensors like these; None where it does not take them."""
        key = metas, self.target.name
        if key not in plug.traced:
            plug.traced[key] = self._trace(plug.reference, metas)
        return plug.traced[key]

    def _trace(self, function: Function, metas: Metas) -> tuple[Program, GraphModule] | None:
        try:
            function(*(_empty(m, "meta") for m in metas))  # says no more quietly than fake tensors
            graph = functional_graph(function, [*map(_empty, metas)], self.options.target)
            device = "" if self.target.language == "c" else metas[0][3].type
            program = lower_graph(graph, wide_statistics=self.target.wide_statistics, device=device)
        except Exception:  # of tensors of other shapes the reference may make no sense
            return None
        return program, graph

    def _verdict(self, plug: Plug, metas: Metas) -> Decision:
        """Whether the user's function is used for tensors like these, and why."""
        key = metas, self.target.name
        if not plug.pattern and not self.runs:
            reason = f"{plug.name} cannot be checked here: the target's chip is absent"
            return Decision("", "", "kernel", False, reason)
        if key not in plug.verdicts:
            plug.verdicts[key] = self._judged(plug, metas)
        return plug.verdicts[key]

    def _judged(self, plug: Plug, metas: Metas) -> Decision:
        kind = "rewrite" if plug.pattern else "kernel"
        if (difference := _difference(plug, _checked(plug, metas))) is not None:
            text = f"{plug.name} is not used: {difference}"
            warnings.warn(f"onepass: {text}", KernelWarning, stacklevel=2)
            return Decision("", "", kind, False, text)
        if plug.pattern or plug.always or self.target.name == "triton-interpret":
            return Decision("", "", kind, True, f"{plug.name} is plugged in")
        theirs, ours = self._times(plug, metas)
        reason = f"measured {theirs:.1f} us by {plug.name}, {ours:.1f} us by our own kernels"
        return Decision("", "", kind, theirs <= ours, reason, ours - theirs)

    def _times(self, plug: Plug, metas: Metas) -> tuple[float, float]:
        """How long the user's kernel and ours take."""
        found = self.traced(plug, metas)
        assert found is not None
        values = _sample(metas, 1.0)
        own = compile_graph(found[1], self.target, replace(self.options, debug=0, dump=""), "inference")
        return _time_us(lambda: plug.function(*values)), _time_us(lambda: own.call(list(values)))

    def _with(
        self,
        plug: Plug,
        program: Program,
        part: ProgramPart,
        views: Sequence[View],
        found: tuple[Program, GraphModule],
        verdict: Decision,
    ) -> Program:
        """The program with a call of the kernel, or the replacement, in the place of a part."""
        (out,) = found[0].outputs
        end = part.end
        new: list[Statement]
        if plug.pattern:
            metas = tuple(map(_meta, views))
            other = self._trace(plug.function, metas)
            spliced = None if other is None else _spliced(other[0], views, end, program)
            if spliced is None:
                return program
            new = spliced
        else:
            call = _Call(plug.function, _numbers(out.shape), _numbers(out.strides), end.buffer)
            origin = Origin(end.origin.node, plug.name, end.origin.line)
            new = [Extern(end.buffer, call, tuple(views), {}, origin, verdict.reason)]
        gone = {d.buffer for d in part.defines}
        statements: list[Statement] = []
        for s in program.statements:
            made = s.buffer if isinstance(s, Define) else s.result if isinstance(s, Extern) else None
            statements += new if made is end.buffer else [] if made in gone else [s]
        return replace(program, statements=tuple(statements))


class _Call:
    """A user's kernel whose result becomes a buffer of the program."""

    def __init__(self, function: Function, shape: tuple[int, ...], strides: tuple[int, ...], buffer: Buffer) -> None:
        self.function, self.shape, self.strides = function, shape, strides
        self.place, self.dtype = (_numbers(buffer.shape), _numbers(buffer.strides)), _torch(buffer.dtype)

    def __call__(self, *values: Tensor) -> Tensor:
        made = self.function(*values)
        if any(made.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() for v in values):
            made = made.clone()
        same = all(n == 1 or a == b for n, a, b in zip(self.shape, made.stride(), self.strides, strict=True))
        if not same or made.dtype != self.dtype or made.storage_offset():
            laid = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=made.device)
            made = laid.copy_(made)
        return made.as_strided(*self.place)


def functional_graph(function: Function, values: Sequence[Tensor], target: str = "auto") -> GraphModule:
    """What a function does to tensors like these, changes in place taken out."""
    table, traced = decomposition_table(target), function
    while True:  # what is taken apart may itself hold changes in place
        graph: GraphModule = make_fx(torch.func.functionalize(traced), table, tracing_mode="fake")(*values)
        calls = (n.target for n in graph.graph.nodes if n.op == "call_function")
        if traced is not function or not any(getattr(getattr(t, "_schema", None), "is_mutable", False) for t in calls):
            return graph
        traced = graph


# --- which part ---


def _text(part: ProgramPart, inputs: Sequence[Buffer]) -> str | None:
    return canonical(part.store(), {b: f"p{k}" for k, b in enumerate(inputs)})


def _words(text: str | None) -> list[str]:
    """What a text has in common with that of the same computation on tensors of other sizes."""
    return sorted(re.sub(r"p\d+", "p", w) for w in _WORD.findall(text or ""))


def _ways(inputs: Sequence[Buffer]) -> Iterator[tuple[View, ...]]:
    """The inputs of a part in every order; as they are, with rows and columns exchanged, or with all rows in one."""
    if any(p.constant is None for b in inputs for p in (*b.shape, *b.strides)):
        return
    orders = itertools.permutations(inputs)
    each = ((sum(k), views) for o in orders for k, views in _seen_in_all_ways(o))
    for _, views in itertools.islice(sorted(each, key=lambda way: way[0]), MOST_WAYS):
        yield views


def _seen_in_all_ways(inputs: Sequence[Buffer]) -> Iterator[tuple[tuple[int, ...], tuple[View, ...]]]:
    options = [[*enumerate(_views(b))] for b in inputs]
    for chosen in itertools.product(*options):
        yield tuple(k for k, _ in chosen), tuple(v for _, v in chosen)


def _views(buffer: Buffer) -> Iterator[View]:
    shape, strides = buffer.shape, buffer.strides
    yield View(buffer, shape, strides, Poly.ZERO)
    if len(shape) > 1:
        turned = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
        yield View(buffer, *turned, Poly.ZERO)
    if len(shape) > 2 and all(a is b * n for a, b, n in zip(strides, strides[1:-1], shape[1:-1], strict=False)):
        rows = Poly.ONE
        for n in shape[:-1]:
            rows = rows * n
        yield View(buffer, (rows, shape[-1]), strides[-2:], Poly.ZERO)


def _torch(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _numbers(polys: Sequence[Poly]) -> tuple[int, ...]:
    return tuple(int(p.constant or 0) for p in polys)


def _meta(view: View) -> Any:
    device = torch.device(view.buffer.device)
    return _numbers(view.shape), _numbers(view.strides), _torch(view.buffer.dtype), device


def _metas_of(tensors: Sequence[Tensor]) -> Metas:
    return tuple((tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in tensors)


def _empty(meta: Any, place: str = "") -> Tensor:
    shape, strides, dtype, device = meta
    return torch.empty_strided(shape, strides, dtype=dtype, device=place or device)


def _spliced(other: Program, views: Sequence[View], end: Define, program: Program) -> list[Statement] | None:
    """The statements of a replacement, on a part's inputs, the last one of which makes the part's result."""
    last = other.outputs[0]
    whole = isinstance(last, View) and last.is_whole and len(other.outputs) == 1
    if not whole or last.buffer.shape != end.buffer.shape or last.buffer.dtype is not end.buffer.dtype:
        return None
    taken = {b.name for b in (*definitions(program), *(s.result for s in program.externs()))}
    names = (name for k in itertools.count() if (name := f"b{k}") not in taken)
    found: dict[Buffer, Buffer] = {}
    for given, view in zip(other.inputs, views, strict=True):
        if not view.is_whole or not isinstance(given, Buffer):
            return None
        found[given] = view.buffer

    def read(e: Expr) -> Expr | None:
        return Load(found[e.buffer], e.index) if isinstance(e, Load) else None

    statements: list[Statement] = []
    for s in other.statements:
        if not isinstance(s, Define):
            return None
        if s.buffer is last.buffer and s.buffer.strides == end.buffer.strides:
            found[s.buffer] = end.buffer
        else:
            b = s.buffer
            found[b] = Buffer(next(names), b.dtype, b.shape, b.strides, b.device)
        origin = replace(s.origin, node=end.origin.node, line=end.origin.line)
        statements.append(replace(s, buffer=found[s.buffer], value=rewrite(s.value, read), origin=origin))
    return statements if found.get(last.buffer) is end.buffer else None


# --- whether it is right, and how long it takes ---


def _checked(plug: Plug, metas: Metas) -> Metas:
    """What samples are like: the tensors of the place, or the example where those are too large."""
    if sum(torch.Size(shape).numel() for shape, *_ in metas) <= MOST_ELEMENTS:
        return metas
    return tuple(
        (s, t, dtype, device) for (s, t, *_), (_, _, dtype, device) in zip(_metas_of(plug.example), metas, strict=True)
    )


def _sample(metas: Metas, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape, strides, dtype, device in metas:
        if dtype.is_floating_point:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        else:
            values = torch.randint(0, 2 if dtype is torch.bool else 8, shape, generator=generator)
        found.append(torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(values))
    return found


def _difference(plug: Plug, metas: Metas) -> str | None:
    """The first sample on which a user's function is not what its reference is; None where it is on all."""
    shown = ", ".join(f"{str(d).removeprefix('torch.')}{[*s]}" for s, _, d, _ in metas)
    for number, scale in enumerate(SAMPLES, 1):
        values = _sample(metas, scale)
        wide = [v.double() if v.is_floating_point() else v for v in values]
        try:
            with torch.no_grad():
                exact = plug.reference(*wide)
                eager = exact if plug.pattern else plug.reference(*values)
                given = wide if plug.pattern else [v.clone() for v in values]
                made = plug.function(*given)
        except Exception as error:
            return f"{type(error).__name__} on sample {number} ({shown}): {error}"
        if not isinstance(made, Tensor) or made.shape != eager.shape or made.dtype != eager.dtype:
            what = f"{made.dtype}{[*made.shape]}" if isinstance(made, Tensor) else type(made).__name__
            return f"it gives {what} where its reference gives {eager.dtype}{[*eager.shape]} (sample {number}: {shown})"
        if not plug.pattern and not all(torch.equal(a, b) for a, b in zip(given, values, strict=True)):
            return f"it changes its arguments (sample {number}: {shown})"
        wrong = _wrong(made, eager, exact, SAME if plug.pattern else TOLERANCE.get(made.dtype, 0.0))
        if wrong.any():
            place = tuple(int(k) for k in wrong.nonzero()[0])
            return (
                f"at {[*place]} it gives {made[place].item():.6g}, its reference {exact[place].item():.6g} "
                f"(sample {number}: {shown}; standard deviation {scale:g})"
            )
    return None


def _wrong(made: Tensor, eager: Tensor, exact: Tensor, tolerance: float) -> Tensor:
    """Where a result is farther from the exact one than rounding explains."""
    if not made.is_floating_point():
        return made != eager
    exact, close = exact.double(), (eager.double() - exact.double()).abs()
    finite = exact.isfinite()
    largest = exact[finite].abs().max() if finite.any() else exact.new_zeros(())
    far = (made.double() - exact).abs() > 2 * close + tolerance * (exact.abs() + 1e-3 * largest)
    odd = ~finite & ~((made.double() == exact) | (made.isnan() & exact.isnan()))
    return torch.where(finite & eager.isfinite(), far | made.isnan(), odd & ~finite)


def _time_us(call: Callable[[], object]) -> float:
    """The least time of a call."""
    device = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    call()
    best, repeats = float("inf"), 1
    for _ in range(RUNS):
        device()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        device()
        taken = time.perf_counter() - start
        best = min(best, taken / repeats)
        repeats = max(1, min(1000, int(RUN_SECONDS / max(best, 1e-7))))
    return best * 1e6
