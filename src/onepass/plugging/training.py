"""What is plugged in, for training: parts of dynamo's graph run in the users' way, and differentiate by themselves.

In a joint graph the inner values of a reference would be saved for backward, so parts are found before there is one.
Dynamo's graph is traced and lowered, parts of the program are found as in inference, and their inputs and results are
those of dynamo's nodes. A rewrite is called in their place; of a kernel its operators (`operators.py`).

Gradients may differ where values do not (`detach`, a user's own autograd function). So the gradients of the program's
own nodes are compared with those of the reference, in float64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate, map_arg
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from ..analysis.access import estimate, flat_offset
from ..ir.options import Options
from ..ir.plan import Decision
from ..ir.poly import Poly, Symbol, product
from ..ir.program import Buffer, Program, contiguous_strides
from ..ir.target import Target
from ..lowering.graph import lower_with_values
from ..lowering.registry import supported
from ..lowering.symbols import Sizes
from ..lowering.torch_private import HigherOrderOperator, outside_of_traces
from ..lowering.values import Ref, linear_position, own_point
from .checks import Function, Metas, difference, elements, empty, listed
from .declared import Plug, declared
from .operators import Differentiated, unknown
from .places import Place, Plugged, called, meta_of, spliced_in
from .tracing import functional_graph, training_times

MOST_COMPARED = 2**27  # elements that a part reads
NO_BACKWARD = "has no `backward=`: it runs in inference only"
_MODES = ("set_grad_enabled", "autocast", "inference_mode")
_WIDENED = {"float": "double", "half": "double", "bfloat16": "double"}  # methods
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def plug_into(
    graph: GraphModule, inputs: Sequence[Any], options: Options, target_of: Callable[[GraphModule], Target]
) -> list[Decision]:
    """Put what is plugged in into dynamo's graph, if that is to be differentiated; the decisions."""
    trains = torch.is_grad_enabled() and any(getattr(i, "requires_grad", False) for i in inputs)
    plugs = declared() if options.fuse and trains else ()
    notes = [_refused(p, f"{p.name} {NO_BACKWARD}") for p in plugs if not p.pattern and p.backward is None]
    usable = tuple(p for p in plugs if p.pattern or p.backward is not None)
    if usable:
        try:
            with outside_of_traces(), torch.no_grad():
                traced = _Traced(graph, options.target)
                _InTraining(usable, graph, traced, target_of(traced.graph), options).run(notes)
        except Exception as error:
            if options.strict:
                raise
            reason = f"not used: {type(error).__name__}: {error}"
            notes += [_refused(p, f"{p.name} is {reason}") for p in usable]
    return notes


def _refused(plug: Plug, reason: str) -> Decision:
    return Decision(plug.name, plug.name, plug.kind, False, reason)


class _Watched(Interpreter):  # type: ignore[misc]
    """Runs dynamo's graph; keeps each tensor and a copy of its value at that time."""

    def __init__(self, graph: GraphModule, mode: Any) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.mode, self.tensors, self.copies = mode, dict[Node, Tensor](), dict[Node, Tensor]()

    def run_node(self, n: Node) -> Any:
        known = n.meta.get("example_value")
        number = getattr(getattr(known, "node", None), "hint", known)
        if n.target == "item" and isinstance(number, int | float):
            return number  # of a constant that dynamo has read
        if isinstance(n.target, HigherOrderOperator):  # torch cannot trace all of them here
            read = [t for t in map(self.env.get, n.all_input_nodes) if isinstance(t, Tensor)]
            value = unknown(read, known)
        else:
            value = super().run_node(n)
        if isinstance(value, Tensor) and n.op == "get_attr" and self.mode is not None:
            value = self.mode.from_tensor(value)
        if isinstance(value, Tensor):
            self.tensors[n], self.copies[n] = value, torch.clone(value)
        return value


class _Traced:
    """Dynamo's graph as a graph of functional operations, and what each node of it is there.

    A tensor that changes in place is left out: it is not the same everywhere.
    """

    def __init__(self, graph: GraphModule, target: str) -> None:
        given = [n.meta["example_value"] for n in graph.graph.find_nodes(op="placeholder")]
        mode = next((v.fake_mode for v in given if hasattr(v, "fake_mode")), None)
        watched = _Watched(graph, mode)
        counts: list[int] = []

        def run(*args: Any) -> list[Tensor]:
            results = [r for r in pytree.tree_leaves(watched.run(*args)) if isinstance(r, Tensor)]
            counts.append(len(results))
            return [*results, *watched.copies.values(), *map(torch.clone, watched.tensors.values())]

        env = getattr(mode, "shape_env", None)
        with preserve_node_meta(), nullcontext() if env is None else env.ignore_fresh_unbacked_symbols():
            self.graph = functional_graph(run, given, target)
        output = self.graph.graph.output_node()
        found = [_copied(n) for n in pytree.tree_leaves(output.args[0])]
        nodes = [*watched.tensors]
        first, last = found[counts[0] : counts[0] + len(nodes)], found[counts[0] + len(nodes) :]
        self.nodes = {n: a for n, a, b in zip(nodes, first, last, strict=True) if a is b}
        output.args = (tuple(pytree.tree_leaves(output.args[0])[: counts[0]]),)


def _copied(node: Any) -> Any:
    return node.args[0] if getattr(node, "target", None) is torch.ops.aten.clone.default else node


@dataclass(frozen=True)
class _Spot:
    """A tensor of dynamo's graph that is all of a buffer of the program, perhaps in another shape."""

    node: Node
    shape: tuple[Poly, ...]


@dataclass(frozen=True)
class _Use:
    """What is plugged in at a place: dynamo's nodes that it reads and makes, and what is between."""

    place: Place
    inputs: tuple[_Spot, ...]
    results: tuple[_Spot, ...]
    inside: tuple[Node, ...]


class _InTraining(Plugged):
    trains = True

    def __init__(
        self, plugs: tuple[Plug, ...], dynamo: GraphModule, traced: _Traced, target: Target, options: Options
    ) -> None:
        super().__init__(plugs, traced.graph, target, options)
        self.dynamo = dynamo
        self.order = {n: k for k, n in enumerate(dynamo.graph.nodes)}
        device = "" if target.language == "c" else next((d.type for d in _devices(traced.graph)), "")
        self.program, values = lower_with_values(traced.graph, device)
        self.spots: dict[Buffer, _Spot] = {}
        for node, inner in traced.nodes.items():
            ref = values.get(inner)
            if isinstance(ref, Ref) and _is_all(ref):
                self.spots.setdefault(ref.buffer, _Spot(node, ref.shape))  # the first: the others are made of it
        self.uses: list[_Use] = []
        self.replaced: dict[Node, Node] = {}
        self.compared: dict[Any, str | None] = {}

    def run(self, notes: list[Decision]) -> None:
        """Change dynamo's graph."""
        self.rewritten(self.program, notes)
        for use in self.uses:
            self._put(use)
        if self.uses:
            self.dynamo.recompile()

    # --- whether it may stand there ---

    def verdict(self, place: Place) -> Decision:
        plug, use = place.plug, self._use(place)
        if isinstance(use, str):
            return Decision("", "", plug.kind, False, f"{plug.name} is not used in training: {use}")
        verdict = super().verdict(place)
        if verdict.accepted and (found := self._own_difference(use)) is not None:
            reason = f"{plug.name} is not used in training: the program's own gradient is another: {found}"
            return replace(verdict, accepted=False, reason=reason)
        return verdict

    def with_place(self, program: Program, place: Place, verdict: Decision) -> Program:
        changed = spliced_in(program, place, called(place, verdict.reason))
        use = self._use(place)
        if changed is not program and isinstance(use, _Use):
            self.uses.append(use)
        return changed

    def _use(self, place: Place) -> _Use | str:
        """Dynamo's nodes at a place, or why it has none."""
        inputs = [self.spots.get(v.buffer) for v in place.views]
        results = [self.spots.get(d.buffer) for d in place.results]
        if None in inputs or None in results:
            return "a tensor that it reads or makes is none of the program's"
        given, made = tuple(s for s in inputs if s is not None), tuple(s for s in results if s is not None)
        first = min(self.order[s.node] for s in made)
        if max(self.order[s.node] for s in given) >= first:
            return "it reads a tensor that is made later"
        inside = self._between({s.node for s in given}, [s.node for s in made])
        if isinstance(inside, str):
            return inside
        first, last = (pick(self.order[n] for n in inside) for pick in (min, max))
        around = (str(getattr(n.target, "__name__", "")) for n, k in self.order.items() if first <= k < last)
        if any(word in name for name in around for word in _MODES):
            return "autocast or gradients are switched on or off inside"
        if not self._is_laid_out(place, made):
            return "its result has another layout"
        ends = zip(made, place.reference.program.outputs, strict=True)
        pairs = [*((s.shape, v.shape) for s, v in zip(given, place.views, strict=True)),
                 *((s.shape, o.shape) for s, o in ends)]  # fmt: skip
        sizes = {s for a, b in pairs if a != b for n in (*a, *b) for s in n.symbols()}
        if sizes - {*_sources(given)}:
            return "a size that it needs is that of no tensor it reads"
        return _Use(place, given, made, inside)

    def _between(self, given: set[Node], made: Sequence[Node]) -> tuple[Node, ...] | str:
        """The nodes that make some of others, in order."""
        inside: set[Node] = set()
        waiting = [*made]
        while waiting:
            if (node := waiting.pop()) in inside or node in given:
                continue
            inside.add(node)
            if _number(node) is None:
                if node.op == "placeholder":
                    return f"it is also made of {node.name}"
                waiting += node.all_input_nodes
        return tuple(sorted(inside, key=self.order.__getitem__))

    def _is_laid_out(self, place: Place, made: Sequence[_Spot]) -> bool:
        """Whether what is plugged in gives results with the strides that the program's have."""
        for spot, out in zip(made, place.reference.program.outputs, strict=True):
            strides = supported(Sizes().strides, _value(spot).stride())
            if out.shape != spot.shape:
                same = strides == contiguous_strides(spot.shape) and out.strides == contiguous_strides(out.shape)
            else:
                each = zip(out.shape, strides or (), out.strides, strict=False)
                same = strides is not None and all(n is Poly.ONE or a == b for n, a, b in each)
            if not same:
                return False
        plug, metas = place.plug, [empty(meta_of(v), "meta") for v in place.views]
        if not plug.pattern:
            return True  # a kernel's result is laid out as its reference's
        results = (listed(f(*metas)) for f in (plug.function, plug.reference))
        return all(a.stride() == b.stride() for a, b in zip(*results, strict=True))

    # --- whether it is right, and faster ---

    def difference(self, plug: Plug, metas: Metas) -> str | None:
        function = plug.function if plug.pattern else self._operator(plug, metas)
        return difference(function, plug.reference, metas, wide=plug.pattern, gradients=True)

    def _own_difference(self, use: _Use) -> str | None:
        """How the gradients of the program's own nodes differ from those of the reference."""
        metas = tuple(map(meta_of, use.place.views))
        if elements(metas) > MOST_COMPARED:
            return "its tensors are too large to be compared"
        own, reference = _Own(self.dynamo, use), use.place.plug.reference
        numbers = {n: f"%{k}" for k, n in enumerate(own.module.graph.nodes)}  # equal layers are compared once
        steps = tuple((n.op, str(n.target), str(map_arg((n.args, n.kwargs), numbers.get))) for n in numbers)
        key = use.place.plug, metas, steps[len(metas) :]
        if key not in self.compared:
            self.compared[key] = difference(own, reference, metas, wide=True, gradients=True, samples=(1.0,))
        return self.compared[key]

    def _operator(self, plug: Plug, metas: Metas) -> Differentiated:
        """The kernel's operators, for inputs of these types."""
        floats = tuple(dtype.is_floating_point for _, _, dtype, _ in metas)
        if floats not in plug.operators:
            assert plug.backward is not None
            count = len(listed(plug.reference(*plug.example)))
            plug.operators[floats] = Differentiated(
                plug.name, plug.function, plug.backward, plug.reference, floats, count
            )
        return plug.operators[floats]

    def times(self, plug: Plug, metas: Metas) -> tuple[float, float]:
        assert plug.backward is not None
        return training_times(plug.function, plug.backward, plug.reference, metas, self.target, self.quiet)

    # --- what takes its place ---

    def _put(self, use: _Use) -> None:
        """Call what is plugged in where the first result is made."""
        graph, plug = self.dynamo.graph, use.place.plug
        floats = tuple(_value(s).dtype.is_floating_point for s in use.inputs)
        function = _as_function(plug.function if plug.pattern else plug.operators[floats], use)
        anchor = min((s.node for s in use.results), key=self.order.__getitem__)
        with graph.inserting_before(anchor):
            given = tuple(self.replaced.get(s.node, s.node) for s in use.inputs)
            node = graph.call_function(function, given)
            node.meta = {k: v for k, v in anchor.meta.items() if k != "example_value"}
            several = range(len(use.results)) if len(use.results) > 1 else ()
            made = [graph.call_function(operator.getitem, (node, k)) for k in several] or [node]
        inside = {*use.inside}
        for new, spot in zip(made, use.results, strict=True):
            new.meta = {**spot.node.meta}
            self.replaced[spot.node] = new
            spot.node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)


def _number(node: Node) -> Any:
    """What a node that is no tensor is worth: sizes as they are now; None of all others."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Size):
        found = [_size(n) for n in value]
        return None if None in found else torch.Size(found)
    return value if isinstance(value, float) else _size(value)


def _size(value: Any) -> int | None:
    number = supported(Sizes().poly, value) if isinstance(value, torch.SymInt) else value
    return estimate(number) if isinstance(number, Poly) else number if isinstance(number, int) else None


def _widened(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in _FLOATS else argument


class _Own:
    """The program's own nodes at a place, as a function of a reference's inputs, in float64."""

    def __init__(self, dynamo: GraphModule, use: _Use) -> None:
        graph, copies, self.use = Graph(), dict[Node, Any](), use
        for spot in use.inputs:
            copies[spot.node] = graph.placeholder(spot.node.name)
        for node in use.inside:
            if (number := _number(node)) is not None:
                copies[node] = number
                continue
            copy = copies[node] = graph.node_copy(node, lambda n: copies[n])
            copy.args, copy.kwargs = map_aggregate((copy.args, copy.kwargs), _widened)
            if node.op == "call_method":
                copy.target = _WIDENED.get(str(node.target), node.target)
        graph.output(tuple(copies[s.node] for s in use.results))
        self.module = GraphModule(dynamo, graph)

    def __call__(self, *values: Tensor) -> Any:
        place, given = self.use.place, []
        for value, view, spot in zip(values, place.views, self.use.inputs, strict=True):
            if len(view.shape) == len(view.buffer.shape) and not view.is_whole:
                value = value.transpose(-2, -1)
            given.append(value.reshape([estimate(p) for p in spot.shape]))
        results = self.module(*given)
        outputs = place.reference.program.outputs
        shaped = [r.reshape([estimate(p) for p in o.shape]) for r, o in zip(results, outputs, strict=True)]
        return shaped[0] if len(shaped) == 1 else tuple(shaped)


def _as_function(function: Function, use: _Use) -> Callable[..., Any]:
    """What dynamo's graph calls with its own tensors."""
    place, sources = use.place, _sources(use.inputs)

    def plugged_in(*tensors: Tensor) -> Any:
        sizes = {symbol: tensors[k].shape[d] for symbol, (k, d) in sources.items()}

        def shaped(tensor: Tensor, old: Sequence[Poly], new: Sequence[Poly]) -> Tensor:
            return tensor if tuple(old) == tuple(new) else tensor.reshape([p.evaluate(sizes) for p in new])

        given = []
        for tensor, spot, view in zip(tensors, use.inputs, place.views, strict=True):
            tensor = shaped(tensor, spot.shape, view.buffer.shape)
            turned = len(view.shape) == len(view.buffer.shape) and not view.is_whole
            given.append(tensor.transpose(-2, -1) if turned else shaped(tensor, view.buffer.shape, view.shape))
        outputs = place.reference.program.outputs
        found = zip(listed(function(*given)), outputs, use.results, strict=True)
        results = [shaped(r, o.shape, s.shape).to(_value(s).dtype) for r, o, s in found]  # autocast may be on
        return results[0] if len(results) == 1 else tuple(results)

    return plugged_in


def _sources(inputs: Sequence[_Spot]) -> dict[Any, tuple[int, int]]:
    """Where sizes known at run time are found: the number of a tensor and of its dimension."""
    places = ((p.single, (k, d)) for k, s in enumerate(inputs) for d, p in enumerate(s.shape))
    found: dict[Any, tuple[int, int]] = {}
    for symbol, place in places:
        if isinstance(symbol, Symbol):
            found.setdefault(symbol, place)
    return found


def _is_all(ref: Ref) -> bool:
    """Whether a tensor is all of a buffer in the order of its memory."""
    if ref.is_whole:
        return True
    if ref.buffer.strides != contiguous_strides(ref.buffer.shape):
        return False
    position = linear_position(own_point(ref.shape), ref.shape)
    return product(ref.shape) == product(ref.buffer.shape) and flat_offset(ref.buffer, ref.index) == position


def _value(spot: _Spot) -> Tensor:
    value = spot.node.meta["example_value"]
    assert isinstance(value, Tensor)
    return value


def _devices(graph: GraphModule) -> list[torch.device]:
    values = (n.meta.get("val") for n in graph.graph.nodes)
    return [v.device for v in values if isinstance(v, Tensor) and v.device.type != "cpu"]
