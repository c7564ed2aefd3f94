"""Python loops over time steps, which dynamo writes out, as one step for all positions and scans of linear maps.

    for t in range(n):                     a, b = vmap(step)(x, z)          what needs no state, for all steps at once
        h = z[:, t] * h + x[:, t]    ->    h = recurrence(a, b, h)          each state, one scan
        ys.append(c * h)                   y = vmap(rest)(h).movedim(0, 1)  what reads states
    y = torch.stack(ys, 1)

This is done before AOTAutograd, so that no stage of ours grows with the number of steps. A loop whose steps differ in
anything but the positions they read, or whose state is no linear map of the state before, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from .equal_steps import Before, Fixed, Loop, Operand, Same, Series, loops, reading, value_of
from .linear_steps import MAPPED, Linear, NotOneStep, Stage, Term, changes, functional, linear
from .recurrences import before, recurrence

_ZEROS = (torch.zeros, torch.zeros_like, "new_zeros")
FEWEST_ALONE = 32  # steps of a loop of which only single results are read
_JOINS = (torch.stack, torch.cat, torch.concat)


def reroll(module: GraphModule) -> None:
    """Rewrite every loop of the graph that can be; whatever goes wrong leaves a loop as it is."""
    for loop in loops(module.graph):
        rolled = _Rolled(module, loop)
        try:
            rolled.build()
        except Exception:  # an operation that no map over steps has, random numbers, a value that is no tensor
            rolled.undo()
            continue
        rolled.replace()
    module.recompile()


# --- what the graph calls ---


class _Mapped(torch.nn.Module):  # type: ignore[misc]
    """A part of a step, for all steps at once. `dims`: along which dimension of each operand they run."""

    def __init__(self, step: GraphModule, dims: tuple[int | None, ...]) -> None:
        super().__init__()
        self.step, self.dims = step, dims

    def forward(self, *given: Tensor) -> Any:
        return torch.vmap(self.step, self.dims)(*given)


def _positions(base: Tensor, index: tuple[Any, ...], dim: int, reverse: bool, kept: bool) -> Tensor:
    """The positions of a tensor that steps read, in order, along `dim`. `kept`: as slices of one position each."""
    value = base[index]
    value = value.flip(dim) if reverse else value
    return value.unsqueeze(dim + 1) if kept else value


def _solved(a: Tensor | float, b: Tensor | float, first: Tensor, count: int, zero: bool) -> Tensor:
    """The states of all steps. `zero`: that before the first is."""
    shape, dtype = (count, *first.shape), first.dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    term = _aligned(b, shape).to(dtype) if isinstance(b, Tensor) else first.new_full((), b).expand(shape)
    if isinstance(a, float) and a == 1.0:
        total = torch.cumsum(term.to(wide), 0)
        return (total if zero else total + first).to(dtype)
    factor = _aligned(a, shape).to(dtype) if isinstance(a, Tensor) else first.new_full((), a, dtype=wide)
    result: Tensor = recurrence(factor.expand(shape), term, None if zero else first, False)
    return result


def _aligned(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One value for each step, broadcast to the shape of a state."""
    return x.reshape(x.shape[0], *[1] * (len(shape) - x.ndim), *x.shape[1:]).expand(shape)


def _some(states: Tensor, low: int, high: int, reverse: bool, dim: int, stacked: bool) -> Tensor:
    """Results of steps [low, high), stacked along `dim` or joined along it."""
    value = states[low:high]
    value = (value.flip(0) if reverse else value).movedim(0, dim)
    return value if stacked else value.flatten(dim, dim + 1)


def _one(states: Tensor, k: int) -> Tensor:
    """The result of step k, as a reduction: it shares the sweep of its scan, and the others need not be stored."""
    here = torch.arange(len(states), device=states.device) == k
    return torch.where(here.view(-1, *[1] * (states.ndim - 1)), states, 0).sum(0, dtype=states.dtype)


def _laid_out(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """A tensor of its own, whose dimensions lie in memory in this order."""
    back = [order.index(k) for k in range(len(order))]
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _storages(nodes: Iterable[Node]) -> set[int]:
    """The memory of nodes' values, as dynamo's tensors tell it."""
    tensors = [t for n in nodes for t in pytree.tree_leaves(value_of(n)) if isinstance(t, Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}


# --- rewriting ---


class _Rolled:
    """A loop that is being rewritten."""

    def __init__(self, module: GraphModule, loop: Loop) -> None:
        self.module, self.loop, self.graph = module, loop, module.graph
        self.own = {n: (k, j) for k, step in enumerate(loop.steps) for j, n in enumerate(step)}
        self.last = self.end = loop.steps[-1][-1]
        self.new: list[Node] = []
        self.all: dict[int, Node] = {}  # a result of all steps
        self.prior: dict[int, Node] = {}  # the same of the step before
        self.series: dict[Series, Node] = {}
        self.picked: dict[Node, Node] = {}
        self.joined: dict[Node, Node] = {}

    # --- nodes ---

    def call(self, target: Callable[..., Any], *args: Any, reader: Node | None = None) -> Node:
        """A call with the value it has for dynamo's tensors: after all of the loop that is new, or before a reader."""
        return self._added("call_function", target, target, args, reader)

    def _added(
        self, op: str, target: Any, function: Callable[..., Any], args: tuple[Any, ...], reader: Node | None = None
    ) -> Node:
        given = torch.fx.node.map_arg(args, value_of)
        mode = value_of(self.last).fake_mode
        with mode, torch.no_grad():
            value = function(*given)
        place = self.graph.inserting_after(self.end) if reader is None else self.graph.inserting_before(reader)
        with place:
            node = self.graph.create_node(op, target, args)
        self.end = node if reader is None else self.end
        node.meta = {k: v for k, v in self.last.meta.items() if k in ("stack_trace", "nn_module_stack", "custom")}
        node.meta["example_value"] = value
        self.new.append(node)
        return node

    def undo(self) -> None:
        for node in reversed(self.new):
            self.graph.erase_node(node)

    # --- all steps at once ---

    def build(self) -> None:
        """Everything that the graph reads of the steps, and every state."""
        order = {n: k for k, n in enumerate(self.graph.nodes)}
        self._stays_as_it_is(order)
        read = {j for n, (_, j) in self.own.items() if any(self._outside(u) for u in n.users)}
        if any(order[u] < order[self.last] for n in self.own for u in n.users if self._outside(u)):
            raise NotOneStep
        wanted = self._needed(read | set(self.loop.carries))
        for number in range(len(self.loop.operands)):  # also of those whose result nobody reads
            functional(self.loop, number)
        firsts = [o for sources in self.loop.operands for o in sources if isinstance(o, Before)]
        if len({o.number for o in firsts}) < len(set(firsts)):
            raise NotOneStep  # one result, begun differently by two of its readers
        while not read | self.loop.carries.keys() <= self.all.keys():
            known = len(self.all)
            self._stage(wanted, read)
            if len(self.all) == known:
                raise NotOneStep
        for number in read:
            one, every = value_of(self.loop.steps[0][number]), value_of(self.all[number])
            if not isinstance(one, Tensor) or (one.dtype, one.shape) != (every.dtype, every.shape[1:]):
                raise NotOneStep
        self._read_all()

    def _stays_as_it_is(self, order: dict[Node, int]) -> None:
        """Nothing else writes into results of the loop, at any time, or into anything while it runs."""
        results = {id_ for n in self.own for id_ in _storages([n])}
        first, last = order[self.loop.steps[0][0]], order[self.last]
        for node in self.graph.nodes:
            if node in self.own or not changes(node):
                continue
            if first < order[node] < last or results & _storages(node.all_input_nodes):
                raise NotOneStep

    def _outside(self, user: Node) -> bool:
        return user not in self.own

    def _needed(self, numbers: set[int]) -> set[int]:
        found, open_ = set[int](), list(numbers)
        while open_:
            if (number := open_.pop()) not in found:
                found.add(number)
                open_ += [s.number for s in self.loop.operands[number] if isinstance(s, Same | Before)]
        return found

    def _stage(self, wanted: set[int], read: set[int]) -> None:
        """What can be computed now, for all steps; then the states that are linear maps with that."""
        stage = Stage(self.loop, self._ready)
        for number in range(len(self.loop.operands)):
            if number in wanted - self.all.keys() and all(self._ready(s, stage) for s in self.loop.operands[number]):
                stage.make(number)
        waiting = wanted - self.all.keys() - stage.made.keys()
        later = {s.number for k in waiting for s in self.loop.operands[k] if isinstance(s, Same)}
        given = {k: stage.give(v) for k, v in stage.made.items() if k in read | later | self.loop.carries.keys()}
        solvable: list[tuple[int, Linear]] = []
        for number in waiting & self.loop.carries.keys():
            found = linear(stage, number)
            if found is not None and found.a is not None:
                solvable.append((number, found))
        numbers = [[stage.give(t) if isinstance(t, Node) else t for t in (m.a, m.b)] for _, m in solvable]
        results = self._mapped(stage) if stage.results else []
        self.all |= {k: results[r] for k, r in given.items()}
        for (number, _), (a, b) in zip(solvable, numbers, strict=True):
            self.all[number] = self._states(number, *(results[t] if type(t) is int else t for t in (a, b)))
        for number in self.loop.carries.keys() & self.all.keys() - self.prior.keys():
            self.prior[number] = self.call(before, self.all[number], self._first(number), False)

    def _ready(self, source: Operand, stage: Stage) -> bool:
        match source:
            case Same(number):
                return number in stage.made or number in self.all
            case Before(number, _):
                return number in self.prior
        return True

    def _mapped(self, stage: Stage) -> list[Node]:
        """The results of a stage for all steps."""
        found = [self._given(s) for s in stage.sources]
        if all(dim is None for _, dim in found):
            raise NotOneStep
        mapped = _Mapped(stage.module(), tuple(dim for _, dim in found))
        name = next(n for k in range(1 << 30) if not hasattr(self.module, n := f"{MAPPED}{k}"))
        self.module.add_submodule(name, mapped)
        result = self._added("call_module", name, mapped, tuple(node for node, _ in found))
        return [self.call(_item, result, k) for k in range(len(stage.results))]

    def _given(self, source: Operand) -> tuple[Node, int | None]:
        """An operand for all steps, and the dimension that they run along."""
        match source:
            case Fixed(node):
                return node, None
            case Same(number):
                return self.all[number], 0
            case Before(number, _):
                return self.prior[number], 0
            case Series():
                return self._read(source), _place(source)
        raise AssertionError

    def _read(self, series: Series) -> Node:
        """The positions of a tensor that the steps read."""
        if series not in self.series:
            index, position = list[Any](), 0
            kept = False
            for entry in series.reading.form:
                if entry in ("one", "kept"):
                    at = series.reading.positions[position]
                    index.append(at if entry == "one" else slice(at, at + 1))
                    if position == series.moving:
                        index[-1], kept = _run(at, series.stride, self.loop.count), entry == "kept"
                    position += 1
                else:
                    index.append(None if entry == "new" else slice(*entry))  # type: ignore[misc]
            dim = _place(series)
            self.series[series] = self.call(_positions, series.reading.base, tuple(index), dim, series.stride < 0, kept)
        return self.series[series]

    def _first(self, number: int) -> Node:
        """What the first step has in place of a result of the step before: a tensor just like the others."""
        first = self.loop.carries[number]
        one, like = value_of(first), value_of(self.loop.steps[0][number])
        if not isinstance(one, Tensor) or (one.dtype, one.shape) != (like.dtype, like.shape):
            raise NotOneStep
        return first

    def _states(self, number: int, a: Node | float, b: Term) -> Node:
        first = self._first(number)
        dtype = value_of(first).dtype
        wider = any(torch.promote_types(value_of(t).dtype, dtype) is not dtype for t in (a, b) if isinstance(t, Node))
        if wider or not dtype.is_floating_point:
            raise NotOneStep
        return self.call(_solved, a, 0.0 if b is None else b, first, self.loop.count, first.target in _ZEROS)

    # --- readers ---

    def _read_all(self) -> None:
        """What the readers of steps read in their place."""
        users = [(n, u) for n in self.own for u in n.users if self._outside(u)]
        for user in dict.fromkeys(u for _, u in users if u.target in _JOINS):
            if (joined := self._joined(user)) is not None:
                self.joined[user] = joined
        single = dict.fromkeys(node for node, user in users if user not in self.joined)
        if not self.joined and self.loop.count < FEWEST_ALONE:
            raise NotOneStep  # a sum of a few terms
        for node in single:
            self._picked(node)

    def replace(self) -> None:
        """Readers of steps read the results of all steps; then nobody needs the steps."""
        for user, joined in self.joined.items():
            user.replace_all_uses_with(joined)
            self.graph.erase_node(user)
        for node, picked in self.picked.items():
            for user in [u for u in node.users if self._outside(u)]:
                user.replace_input_with(node, picked)
        for step in reversed(self.loop.steps):
            for node in reversed(step):
                sources = node.all_input_nodes
                if not node.users:
                    self.graph.erase_node(node)
                    _erase_unread(self.graph, sources, self.own)

    def _picked(self, node: Node) -> Node:
        """The result of one step."""
        if node not in self.picked:
            k, j = self.own[node]
            one = self.call(_one, self.all[j], k)
            self.picked[node] = self.call(_laid_out, one, _order(value_of(node)))
        return self.picked[node]

    def _joined(self, user: Node) -> Node | None:
        """A stack of results of steps, or such results joined, in runs of neighbouring steps."""
        given = user.args[0] if user.args else None
        options = dict(zip(("dim",), user.args[1:], strict=False)) | user.kwargs
        value = value_of(user)
        if not isinstance(given, list | tuple) or options.keys() - {"dim"} or not isinstance(value, Tensor):
            return None
        dim, stacked = options.get("dim", 0), user.target is torch.stack
        if not isinstance(dim, int) or not all(isinstance(n, Node) for n in given):
            return None
        dim %= value.ndim
        pieces: list[Node] = []
        for run in _runs(given, self.own):
            if len(run) > 1 and run[0] in self.own:
                (k, j), (end, _) = self.own[run[0]], self.own[run[-1]]
                args = min(k, end), max(k, end) + 1, end < k, dim, stacked
                pieces.append(self.call(_some, self.all[j], *args))
            else:
                rest = [self._picked(n) if n in self.own else n for n in run]
                pieces.append(self.call(user.target, rest, dim, reader=user))
        joined = pieces[0] if len(pieces) == 1 else self.call(torch.cat, pieces, dim, reader=user)
        return self.call(_laid_out, joined, _order(value), reader=user)


def _item(values: Sequence[Tensor], k: int) -> Tensor:
    return values[k]


def _place(series: Series) -> int:
    """The dimension that steps run along, of the positions they read."""
    place = seen = 0
    for entry in series.reading.form:
        if entry in ("one", "kept"):
            if seen == series.moving:
                return place
            seen += 1
        place += entry != "one"
    raise AssertionError


def _run(first: int, stride: int, count: int) -> slice:
    """Positions from `first` on, in ascending order."""
    low, high = sorted((first, first + (count - 1) * stride))
    return slice(low, high + 1, abs(stride))


def _runs(given: Iterable[Node], own: dict[Node, tuple[int, int]]) -> list[list[Node]]:
    """A list in runs of the same result of neighbouring steps, up or down, and of what is no result of steps."""
    runs: list[list[Node]] = []
    for node in given:
        k, j = own.get(node, (0, -1))
        places = [own.get(n, (0, -1)) for n in runs[-1][-2:]] if runs else []
        steps = {b - a for (a, _), (b, _) in pairwise([*places, (k, j)])}
        if places and places[-1][1] == j and (j < 0 or steps == {1} or steps == {-1}):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _order(value: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost in memory to the innermost."""
    return tuple(sorted(range(value.ndim), key=lambda k: (-value.stride(k), k)))


def _erase_unread(graph: Any, nodes: Iterable[Node], own: dict[Node, tuple[int, int]]) -> None:
    """Reads of single positions that nobody needs any more."""
    for node in nodes:
        if node not in own and not node.users and reading(node) is not None:
            sources = node.all_input_nodes
            graph.erase_node(node)
            for source in sources:
                if not source.users and source.target in ("unbind", torch.unbind):
                    graph.erase_node(source)
