"""Parts of a lowered program that compute what a reference does, replaced by a call of a kernel or by a rewrite.

A reference is traced on tensors like those that a part reads, in each order and layout, and its text in real numbers is
compared with the part's. Sizes known at run time are those of the program's own symbols, so that nothing depends on
the ones at hand; values are checked at these and at two others.
"""

from __future__ import annotations

import itertools
import operator
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..analysis.access import assumed_size, estimate, numel
from ..analysis.canonical import canonical
from ..analysis.cuts import Parts, ProgramPart, definitions, parts_of, work
from ..analysis.inline import read_by
from ..compilation import can_run, compile_graph
from ..explain.planning import is_planning
from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, rewrite
from ..ir.options import Options
from ..ir.plan import Decision
from ..ir.poly import Poly, Symbol, product
from ..ir.program import Buffer, Define, Extern, HostValue, Origin, Program, Statement, View
from ..ir.target import Target
from ..lowering.graph import lower_graph
from ..lowering.registry import Unsupported
from ..lowering.symbols import Sizes
from ..lowering.torch_private import outside_of_traces
from .checks import MOST_ELEMENTS, Function, Meta, Metas, difference, elements, empty, listed, metas_of, sample, time_us
from .declared import KernelWarning, Plug, declared
from .tracing import functional_graph

MOST_WAYS, MOST_TRACED = 8192, 64  # of giving a part's inputs to a reference; those of fitting sizes are traced
NOT_SPLICED = "its replacement has calls, or a result of another layout"
MOST_LONGER = 3  # times as many operations as the reference has
_WORD = re.compile(r"[a-z_0-9.]+(?:<\w+>)?\(|[a-z]+(?:\.\d)?\[|\^-?\d+(?:/\d+)?|p\d+\[")


_POSITION = re.compile(r"index\([^()]*\)(?:\^-?\d+)?")  # a position, or a size known at run time


@dataclass(frozen=True, eq=False)
class Reference:
    """A reference on some tensors. `results`: each as a part; `main`: the number of the one that is made last."""

    program: Program
    graph: GraphModule
    results: tuple[ProgramPart, ...]
    main: int


@dataclass(frozen=True, eq=False)
class Place:
    """A part of a program that a reference computes. `results`: in the reference's order; `made`: all of it."""

    plug: Plug
    part: ProgramPart
    views: tuple[View, ...]
    reference: Reference
    results: tuple[Define, ...]
    made: frozenset[Buffer]

    @property
    def end(self) -> Define:
        return self.part.end


def plugged(graph: GraphModule, target: Target, options: Options) -> Plugged | None:
    """What is plugged in, for one graph; None where there is nothing."""
    plugs = declared()
    return Plugged(plugs, graph, target, options) if plugs and options.fuse else None


class Plugged:
    """What is plugged in, for the compilation of one graph."""

    def __init__(self, plugs: tuple[Plug, ...], graph: GraphModule, target: Target, options: Options) -> None:
        self.plugs, self.target, self.options = plugs, target, options
        self.runs = can_run(target.name, graph) and not is_planning()
        self.sizes, self.mode = size_symbols(graph)
        self.symbolic: dict[tuple[Plug, tuple[View, ...]], Reference | None] = {}

    def rewrite(self, program: Program, notes: list[Decision]) -> Program:
        """The program with parts of it in the users' way."""
        with outside_of_traces(), torch.no_grad():
            return self.rewritten(program, notes)

    def rewritten(self, program: Program, notes: list[Decision]) -> Program:
        for plug in self.plugs:
            example = self._traced(plug, metas_of(plug.example))
            if example is None:
                problem = f"{plug.name} is not used: its reference is no computation of kernels"
                notes.append(Decision(plug.name, plug.name, plug.kind, False, problem))
                continue
            main = example.results[example.main]
            wanted, words = work(main.defines), _words(_text(main, main.inputs))
            parts = Parts(program)
            for end in reversed([*parts.defines.values()]):
                if end.buffer in parts.defines:
                    most = MOST_LONGER * len(main.defines)
                    ending = parts.ending(end, wanted, most, len(example.results) > 1)
                    changed = self._at(plug, program, parts, reversed([*ending]), words, notes)
                    parts = parts if changed is program else Parts(changed)
                    program = changed
        return program

    def _at(
        self,
        plug: Plug,
        program: Program,
        parts: Parts,
        ending: Iterable[ProgramPart],
        words: list[str],
        notes: list[Decision],
    ) -> Program:
        """The program with the first of some parts that computes what the reference does in the user's way."""
        for part in ending:
            text = _text(part, part.inputs) if len(part.inputs) == len(plug.example) else None
            if text is None or _words(text) != words:
                continue
            fitting = (views for views in _ways(part.inputs) if self._fits(plug, part, views))
            for views in itertools.islice(fitting, MOST_TRACED):
                place = self._place(plug, parts, part, views, text)
                if place is None or not self._is_wanted(place):
                    continue
                verdict = self.verdict(place)
                changed = self.with_place(program, place, verdict) if verdict.accepted else program
                if verdict.accepted and changed is program:
                    verdict = replace(verdict, accepted=False, reason=f"{plug.name}: {NOT_SPLICED}")
                names = part.defines[0].origin.node, part.end.origin.node
                notes.append(replace(verdict, producer=names[0], consumer=names[1]))
                return changed
        return program

    def _fits(self, plug: Plug, part: ProgramPart, views: tuple[View, ...]) -> bool:
        """Whether the reference takes tensors of these sizes and gives one as large as the part's result."""
        key = tuple(map(meta_of, views))
        if key not in plug.sizes:
            found = _results_of(plug.reference, key)
            plug.sizes[key] = frozenset(r.numel() for r in found if isinstance(r, Tensor))
        return numel(part.end.buffer.shape) in plug.sizes[key]

    def _place(self, plug: Plug, parts: Parts, part: ProgramPart, views: tuple[View, ...], text: str) -> Place | None:
        """The part as a place of the reference, given the part's inputs in this way."""
        reference = self.reference(plug, views)
        if reference is None:
            return None
        given = dict(zip((v.buffer for v in views), reference.program.inputs[-len(views) :], strict=True))
        order = [b for input_ in part.inputs if isinstance(b := given[input_], Buffer)]
        same = reference.results[reference.main]
        if _text(same, order) != text or same.end.buffer.dtype is not part.end.buffer.dtype:
            return None
        ends, made = [], {d.buffer for d in part.defines}
        for number, result in enumerate(reference.results):
            end = part if number == reference.main else _equal(result, order, parts, part.inputs)
            if end is None:
                return None
            ends.append(end.end)
            made |= {d.buffer for d in end.defines}
        results = {e.buffer for e in ends}
        if len(results) < len(ends) or parts.read_outside(made) - results:
            return None
        return Place(plug, part, views, reference, tuple(ends), frozenset(made))

    def _is_wanted(self, place: Place) -> bool:
        where = place.plug.where
        if where is None:
            return True
        return bool(where(*(self._fake(v) for v in place.views)))  # of sizes known at run time this makes guards

    # --- references ---

    def reference(self, plug: Plug, views: tuple[View, ...]) -> Reference | None:
        """The reference on tensors like these; None where it does not take them."""
        if not symbols_of(views):
            return self._traced(plug, tuple(map(meta_of, views)))
        if (plug, views) not in self.symbolic:
            self.symbolic[plug, views] = self._trace(plug.reference, views)
        return self.symbolic[plug, views]

    def _traced(self, plug: Plug, metas: Metas) -> Reference | None:
        """The same for sizes that are known."""
        key = metas, self.target.name
        if key not in plug.traced:
            plug.traced[key] = self._trace(plug.reference, metas)
        found: Reference | None = plug.traced[key]
        return found

    def _trace(self, function: Function, given: Sequence[View] | Metas) -> Reference | None:
        try:
            metas = [meta_of(g) if isinstance(g, View) else g for g in given]
            function(*(empty(m, "meta") for m in metas))  # says no more quietly than fake tensors
            tensors = [self._fake(g) if isinstance(g, View) else empty(g) for g in given]
            graph = functional_graph(function, tensors, self.options.target)
            program = lower_graph(
                graph, wide_statistics=self.target.wide_statistics, device=self._device(metas[0][3].type)
            )
        except Exception:  # of tensors of other shapes the reference may make no sense
            return None
        results = parts_of(program)
        if not results or any({*r.inputs} - {*program.inputs} for r in results):
            return None
        made = [*definitions(program)]
        main = max(range(len(results)), key=lambda k: made.index(results[k].end.buffer))
        whole = len(results[main].inputs) == len(given)
        return Reference(program, graph, tuple(results), main) if whole else None

    def _device(self, kind: str) -> str:
        return "" if self.target.language == "c" else kind

    def _fake(self, view: View) -> Tensor:
        """A tensor without values; sizes known at run time are those of the graph."""
        shape, strides = ([p.evaluate(self.sizes) for p in polys] for polys in (view.shape, view.strides))
        if self.mode is None:
            return empty(meta_of(view), "meta")
        with self.mode:
            device = torch.device(view.buffer.device)
            return torch.empty_strided(shape, strides, dtype=_torch(view.buffer.dtype), device=device)

    # --- whether it is right, and faster ---

    def verdict(self, place: Place) -> Decision:
        """Whether the user's function is used for tensors like these, and why."""
        plug, metas = place.plug, tuple(map(meta_of, place.views))
        if not plug.pattern and not self.runs:
            reason = f"{plug.name} cannot be checked here: the target's chip is absent"
            return Decision("", "", "kernel", False, reason)
        sizes = tuple(_at_sizes(place.views))
        key = sizes, self.target.name, self.trains
        if key not in plug.verdicts:
            plug.verdicts[key] = self._judged(plug, metas, sizes)
        return plug.verdicts[key]

    trains = False

    def _judged(self, plug: Plug, metas: Metas, sizes: Sequence[Metas]) -> Decision:
        for checked in sizes:
            if checked != metas and not _may_be(plug, checked):
                continue
            if (found := self.difference(plug, _checked(plug, checked))) is not None:
                text = f"{plug.name} is not used: {found}"
                warnings.warn(f"onepass: {text}", KernelWarning, stacklevel=2)
                return Decision("", "", plug.kind, False, text)
        if plug.pattern or plug.always or self.target.name == "triton-interpret":
            return Decision("", "", plug.kind, True, f"{plug.name} is plugged in")
        theirs, ours = self.times(plug, metas)
        reason = f"measured {theirs:.1f} us by {plug.name}, {ours:.1f} us by our own kernels"
        return Decision("", "", plug.kind, theirs <= ours, reason, ours - theirs)

    def difference(self, plug: Plug, metas: Metas) -> str | None:
        """How the user's function differs from its reference."""
        return difference(plug.function, plug.reference, metas, wide=plug.pattern)

    def times(self, plug: Plug, metas: Metas) -> tuple[float, float]:
        """How long the user's kernel and ours take."""
        found = self._traced(plug, metas)
        assert found is not None
        values = sample(metas, 1.0)
        own = compile_graph(found.graph, self.target, self.quiet, "inference")
        return time_us(lambda: plug.function(*values)), time_us(lambda: own.call(list(values)))

    @property
    def quiet(self) -> Options:
        return replace(self.options, debug=0, dump="")

    # --- what takes its place ---

    def with_place(self, program: Program, place: Place, verdict: Decision) -> Program:
        """The program with a call of the kernel, or the replacement, in the place of a part."""
        plug, end = place.plug, place.end
        if plug.pattern:
            known = tuple(map(meta_of, place.views))
            given = place.views if symbols_of(place.views) else known
            other = self._trace(plug.function, given) if len(place.results) == 1 else None
            new = None if other is None else _spliced(other.program, place.views, end, program)
        else:
            new = called(place, verdict.reason)
        return program if new is None else spliced_in(program, place, new)


def spliced_in(program: Program, place: Place, new: list[Statement]) -> Program:
    """The program with other statements in the place of a part; itself where they cannot stand anywhere."""
    results = {d.buffer for d in place.results}
    kept = [s for s in program.statements if not (_made(s) & place.made)]
    inputs = {v.buffer for v in place.views}
    last = max((k for k, s in enumerate(kept) if _made(s) & inputs), default=-1)
    first = next((k for k, s in enumerate(kept) if results & {*read_by(s)}), len(kept))
    if last >= first:
        return program  # an input is made of a result
    end = max(k for k, s in enumerate(program.statements) if _made(s) & place.made)
    before = sum(not _made(s) & place.made for s in program.statements[:end])
    at = min(first, max(last + 1, before))
    return replace(program, statements=(*kept[:at], *new, *kept[at:]))


def _made(statement: Statement) -> set[Buffer]:
    made = statement.buffer if isinstance(statement, Define) else getattr(statement, "result", None)
    return {made} if isinstance(made, Buffer) else set()


def called(place: Place, why: str) -> list[Statement]:
    """A call of a kernel and its results."""
    end, outputs = place.end, place.reference.program.outputs
    forms = [
        (o.shape, o.strides, d.buffer.shape, d.buffer.strides) for o, d in zip(outputs, place.results, strict=True)
    ]
    call = _Call(place.plug.function, [_torch(d.buffer.dtype) for d in place.results])
    origin = Origin(end.origin.node, place.plug.name, end.origin.line)
    args = (*place.views, [list(map(list, form)) for form in forms])
    if len(forms) == 1:
        return [Extern(end.buffer, call, args, {}, origin, why)]
    host = HostValue(f"{end.buffer.name}_all")
    taken = (Extern(d.buffer, operator.getitem, (host, k), {}, origin, why) for k, d in enumerate(place.results))
    return [Extern(host, call, args, {}, origin, why), *taken]


class _Call:
    """A user's kernel whose results become buffers of the program."""

    def __init__(self, function: Function, dtypes: Sequence[torch.dtype]) -> None:
        self.function, self.dtypes = function, dtypes

    def __call__(self, *values: Any) -> Any:
        """`values`: tensors, then of each result the shape and strides of the reference's and of the buffer."""
        *given, forms = values
        taken = {v.untyped_storage().data_ptr() for v in given}
        found = []
        for made, dtype, form in zip(listed(self.function(*given)), self.dtypes, forms, strict=True):
            shape, strides, *place = form
            same = all(n == 1 or a == b for n, a, b in zip(shape, made.stride(), strides, strict=True))
            if not same or made.dtype != dtype or made.storage_offset() or made.untyped_storage().data_ptr() in taken:
                made = torch.empty_strided(shape, strides, dtype=dtype, device=made.device).copy_(made)
            taken.add(made.untyped_storage().data_ptr())
            found.append(made.as_strided(*place))
        return found[0] if len(found) == 1 else tuple(found)


# --- which part ---


def _text(part: ProgramPart, inputs: Sequence[Buffer]) -> str | None:
    return canonical(part.store(), {b: f"p{k}" for k, b in enumerate(inputs)})


def _words(text: str | None) -> list[str]:
    """What a text has in common with that of the same computation on tensors of other sizes."""
    return sorted(re.sub(r"p\d+", "p", w) for w in _WORD.findall(_POSITION.sub("", text or "")))


def _equal(result: ProgramPart, order: Sequence[Buffer], parts: Parts, inputs: Sequence[Buffer]) -> ProgramPart | None:
    """What of a program computes another result of a reference from the same inputs."""
    wanted = _text(result, order)
    for define in parts.defines.values():
        if define.buffer.dtype is result.end.buffer.dtype and define.buffer not in inputs:
            found = parts.above(define.buffer, inputs)
            if found is not None and {*found.inputs} <= {*inputs} and _text(found, inputs) == wanted:
                return found
    return None


def _ways(inputs: Sequence[Buffer]) -> Iterator[tuple[View, ...]]:
    """The inputs of a part in every order; as they are, with rows and columns exchanged, or with all rows in one.

    First those with few changes to what is there, or to matrices that are all turned, as the weights of modules are.
    """
    orders = (itertools.product(*([*enumerate(_views(b))] for b in order)) for order in itertools.permutations(inputs))
    ways = [*itertools.islice(itertools.chain.from_iterable(orders), MOST_WAYS)]

    def changes(way: tuple[tuple[int, View], ...]) -> int:
        kinds = [(kind > 0, len(view.buffer.shape) == 2) for kind, view in way]
        return min(sum(changed for changed, _ in kinds), 1 + sum(changed != matrix for changed, matrix in kinds))

    yield from (tuple(view for _, view in way) for way in sorted(ways, key=changes))


def _views(buffer: Buffer) -> Iterator[View]:
    shape, strides = buffer.shape, buffer.strides
    yield View(buffer, shape, strides, Poly.ZERO)
    if len(shape) > 1:
        turned = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
        yield View(buffer, *turned, Poly.ZERO)
    if len(shape) > 2 and all(a is b * n for a, b, n in zip(strides, strides[1:-1], shape[1:-1], strict=False)):
        yield View(buffer, (product(shape[:-1]), shape[-1]), strides[-2:], Poly.ZERO)


# --- sizes and tensors ---


def size_symbols(graph: GraphModule) -> tuple[dict[Any, Any], Any]:
    """The sizes known at run time, by their symbols, and the mode of the graph's tensors."""
    sizes, found, mode = Sizes(), dict[Any, Any](), None
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val", node.meta.get("example_value"))
        mode = getattr(value, "fake_mode", mode)
        numbers = (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ())
        for number in numbers:
            if isinstance(number, torch.SymInt):
                with suppress(Unsupported):
                    if isinstance(symbol := sizes.poly(number).single, Symbol):
                        found.setdefault(symbol, number)
    return found, mode


def symbols_of(views: Iterable[View]) -> set[Symbol]:
    """The sizes known at run time that tensors have."""
    return {s for v in views for p in (*v.shape, *v.strides) for s in p.symbols()}


def _at_sizes(views: Sequence[View]) -> Iterator[Metas]:
    """What tensors are like at the sizes at hand, and where some are known at run time only, at others."""
    symbols = symbols_of(views)
    for times, more in ((1, 0), (1, 1), (2, 3)) if symbols else ((1, 0),):
        yield tuple(meta_of(v, {s: assumed_size(s) * times + more for s in symbols}) for v in views)


def meta_of(view: View, sizes: Mapping[Any, int] | None = None) -> Meta:
    number = estimate if sizes is None else lambda p: p.evaluate(sizes)
    shape, strides = (tuple(map(number, polys)) for polys in (view.shape, view.strides))
    return shape, strides, _torch(view.buffer.dtype), torch.device(view.buffer.device)


def _checked(plug: Plug, metas: Metas) -> Metas:
    """What samples are like: the tensors of the place, or the example where those are too large."""
    if elements(metas) <= MOST_ELEMENTS:
        return metas
    given = zip(metas_of(plug.example), metas, strict=True)
    return tuple((s, t, dtype, device) for (s, t, *_), (_, _, dtype, device) in given)


def _may_be(plug: Plug, metas: Metas) -> bool:
    """Whether a program can have tensors of these sizes where something is plugged in."""
    with suppress(Exception):
        wanted = plug.where is None or plug.where(*(empty(m, "meta") for m in metas))
        return bool(wanted and _results_of(plug.reference, metas))
    return False


def _results_of(function: Function, metas: Metas) -> tuple[Any, ...]:
    """What a function gives of tensors like these, without values; nothing where it makes no sense of them."""
    with suppress(Exception):
        return listed(function(*(empty(m, "meta") for m in metas)))
    return ()


def _torch(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _spliced(other: Program, views: Sequence[View], end: Define, program: Program) -> list[Statement] | None:
    """The statements of a replacement, on a part's inputs, the last one of which makes the part's result."""
    last = other.outputs[0]
    whole = isinstance(last, View) and last.is_whole and len(other.outputs) == 1
    if not whole or last.buffer.shape != end.buffer.shape or last.buffer.dtype is not end.buffer.dtype:
        return None
    taken = {b.name for b in (*definitions(program), *(s.result for s in program.externs()))}
    names = (name for k in itertools.count() if (name := f"b{k}") not in taken)
    found: dict[Buffer, Buffer] = {}
    inputs = [i for i in other.inputs if isinstance(i, Buffer)]
    for given, view in zip(inputs, views, strict=True):
        if not view.is_whole:
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
