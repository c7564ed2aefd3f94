"""Graph keys: what must change them and what must not; explanations follow the graph at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import onepass  # noqa: F401  (registers the backend)
from onepass.ir.record import CompileRecord, Decision, ExternRecord, KernelRecord
from onepass.lowering.fingerprint import graph_constants, graph_fingerprint, node_names, reattach

Function = Callable[..., Any]


def trace(f: Function, *args: Any, dynamic: bool = False) -> GraphModule:
    return make_fx(f, tracing_mode="symbolic" if dynamic else "fake")(*args)


def key(f: Function, *args: Any, dynamic: bool = False) -> str | None:
    return graph_fingerprint(trace(f, *args, dynamic=dynamic), "")


X = torch.zeros(4, 6)


def base(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).sum(0, keepdim=True)


def test_the_same_program_has_one_key_whatever_its_names() -> None:
    def other_name(weights: torch.Tensor) -> torch.Tensor:
        moved = weights + 1

        return moved.sum(0, keepdim=True)

    assert key(base, X) == key(base, torch.ones(4, 6)) == key(other_name, X) is not None


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (lambda x: (x + 2).sum(0, keepdim=True), X),
        (lambda x: (x + 1.0).sum(0, keepdim=True), X),
        (lambda x: (x + True).sum(0, keepdim=True), X),
        (lambda x: (x - 1).sum(0, keepdim=True), X),
        (lambda x: (x + 1).sum(1, keepdim=True), X),
        (lambda x: (x + 1).sum(0), X),
        (lambda x: ((x + 1).sum(0, keepdim=True), x), X),
        (base, torch.zeros(4, 7)),
        (base, torch.zeros(6, 4).t()),
        (base, torch.zeros(4, 6, dtype=torch.float64)),
    ],
)
def test_what_changes_the_program_changes_the_key(f: Function, x: torch.Tensor) -> None:
    assert key(f, x) not in (key(base, X), None)


def test_zeros_of_either_sign_and_nan_are_told_apart() -> None:
    def times(factor: float) -> Function:
        return lambda x: x * factor

    keys = {key(times(c), X) for c in (0.0, -0.0, float("nan"), 0)}
    assert len(keys) == 4 and None not in keys


def test_options_are_part_of_the_key() -> None:
    graph = trace(base, X)
    assert graph_fingerprint(graph, "a") != graph_fingerprint(graph, "b")


def test_symbolic_sizes_count_by_their_place_not_their_name() -> None:
    a = trace(lambda x: x * x.shape[0], torch.zeros(5, 3), dynamic=True)
    b = trace(lambda y: y * y.shape[0], torch.zeros(5, 3), dynamic=True)
    c = trace(lambda x: x * x.shape[1], torch.zeros(5, 3), dynamic=True)
    assert graph_fingerprint(a, "") == graph_fingerprint(b, "") != graph_fingerprint(c, "")
    assert graph_fingerprint(a, "") != key(lambda x: x * 5, torch.zeros(5, 3))


def test_hints_count_because_they_decide_the_plan() -> None:
    keys = {key(lambda x: x.sum(), torch.zeros(rows, 3), dynamic=True) for rows in (5, 9)}
    assert len(keys) == 2


def test_square_and_free_shapes_differ() -> None:
    free = key(lambda x: x + 1, torch.zeros(5, 3), dynamic=True)
    square = key(lambda x: x + 1, torch.zeros(5, 5), dynamic=True)
    assert free != square


def test_constants_count_by_their_form_and_are_listed() -> None:
    def with_constant(values: list[float]) -> GraphModule:
        return trace(lambda x: x * torch.tensor(values), X[:, : len(values)])

    a, b, c = with_constant([1.0, 2.0]), with_constant([3.0, 4.0]), with_constant([1.0, 2.0, 3.0])
    assert graph_fingerprint(a, "") == graph_fingerprint(b, "") != graph_fingerprint(c, "")
    (value,) = graph_constants(b)
    assert torch.equal(value, torch.tensor([3.0, 4.0]))
    # One element is folded into the program, so there its value counts.
    assert graph_fingerprint(with_constant([1.0]), "") != graph_fingerprint(with_constant([2.0]), "")


def test_constants_are_folded_by_the_backend_that_compiles_under_a_fake_mode() -> None:
    results = [torch.compile(lambda x, c=c: x * torch.tensor(c), backend="onepass")(X + 1) for c in (2.0, 3.0)]
    assert torch.equal(results[0], (X + 1) * 2) and torch.equal(results[1], (X + 1) * 3)


def test_graphs_with_inner_graphs_or_objects_have_no_key() -> None:
    graph = trace(base, X)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.target = lambda *a, **k: None
            break
    assert graph_fingerprint(graph, "") is None
    graph = trace(base, X)
    inner = trace(base, X)
    graph.inner = inner
    with graph.graph.inserting_after(next(iter(graph.graph.nodes))):
        graph.graph.get_attr("inner")
    assert graph_fingerprint(graph, "") is None


def test_aliased_outputs_count() -> None:
    assert key(lambda x: x.view(24), X) != key(lambda x: x.clone().view(24), X)


def test_it_is_fast() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for n in range(300):
            x = x + n
        return x

    graph = trace(chain, X)
    best = min(_seconds(lambda: graph_fingerprint(graph, "")) for _ in range(5))
    # 1 ms per 100 nodes when nothing else runs; the bound allows for a busy machine.
    assert best < 0.003 * 10


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def test_an_explanation_gets_the_names_and_lines_of_the_graph_at_hand() -> None:
    graph = trace(base, X)
    names = node_names(graph)
    adding = next(n for n in graph.graph.nodes if "add" in n.name)
    then = [f"old_{n}" for n in names]
    old = f"old_{adding.name}"
    record = CompileRecord(
        kernels=[KernelRecord("k", [{"node": old, "op": "aten.add", "line": "old.py:1"}], 0, 0, "", "", 0.0)],
        externs=[ExternRecord(old, "aten.add", "why", "old.py:1", 0)],
        decisions=[Decision(old, "elsewhere", "vertical", True, "", 0.0, 0)],
    )
    adding.meta["stack_trace"] = 'File "new.py", line 7, in f\n    x + 1\n'
    now = reattach(record, then, graph)
    assert now.kernels[0].operations == [{"node": adding.name, "op": "aten.add", "line": "new.py:7: x + 1"}]
    assert (now.externs[0].name, now.externs[0].line) == (adding.name, "new.py:7: x + 1")
    assert (now.decisions[0].producer, now.decisions[0].consumer) == (adding.name, "elsewhere")
    assert record.kernels[0].operations[0]["line"] == "old.py:1"
