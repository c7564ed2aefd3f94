"""The rules on joint graphs are true of real numbers: in float64 gradients with them are those of eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contractions.spellings import NEAR_MISSES, SPELLINGS, distance, scores
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from onepass.autograd.between import products_between
from onepass.autograd.merge import merge_equal
from onepass.autograd.partition import _drop_detach
from onepass.autograd.references import drop_references
from onepass.autograd.row_sums import normalise, replace_row_sums, row_sums
from onepass.lowering.decompositions import decomposition_table

Function = Callable[..., Any]
ALL = SPELLINGS | NEAR_MISSES


def applied(function: Function, inputs: tuple[Tensor, ...], seen: dict[str, int]) -> list[Tensor | None]:
    """Results and gradients with every rule applied wherever it applies; `seen`: how often each did."""

    def parted(joint: GraphModule, arguments: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
        _drop_detach(joint)
        merge_equal(joint.graph)
        seen["references"] = drop_references(joint)
        for between in products_between(joint):
            sums = row_sums(between)
            seen["row sums"] = seen.get("row sums", 0) + len(sums)
            replace_row_sums(joint, sums)
            seen["normalised"] = seen.get("normalised", 0) + len(normalise(joint, between))
        joint.graph.lint()
        found: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, arguments, **settings)
        return found

    def compiler(graph: GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return gradients(aot_function(function, compiler, compiler, parted, decomposition_table("sm_90")), inputs)


def gradients(function: Function, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    own = [x.detach().clone().double() if x.is_floating_point() else x for x in inputs]
    differentiated = [x.requires_grad_() for x in own if x.is_floating_point()]
    found = function(*own)
    results = [*found] if isinstance(found, tuple | list) else [found]
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for x in results:
        if x.requires_grad:
            total = total + (x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    total.backward()
    return [*(x.detach() for x in results), *(x.grad for x in differentiated)]


def alike(function: Function, inputs: tuple[Tensor, ...]) -> dict[str, int]:
    seen: dict[str, int] = {}
    for x, y in zip(gradients(function, inputs), applied(function, inputs, seen), strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-6, equal_nan=True)
    return seen


# Not by finite masks: in float64 a row of nothing but the lowest float16 is no average.
@pytest.mark.parametrize("name", ALL)
def test_every_spelling(name: str) -> None:
    torch.manual_seed(0)
    alike(ALL[name].function, ALL[name].arguments())


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def matrices(n: int = 24, d: int = 8) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return normal(2, n, d), normal(2, n, d), normal(2, n, d)


def test_what_is_summed_over_a_row() -> None:
    """One sum for softmax; a mask after it is a factor of both sides."""

    def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = scores(q, k).softmax(-1)
        return p.masked_fill(distance(p) > 3, 0.0) * 3.0 @ v

    assert alike(kept, matrices())["row sums"] == 1


def test_several_products_are_several_terms() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = scores(q, k).softmax(-1)
        return p @ v, 0.5 * p @ (v * v)

    assert alike(both, matrices())["row sums"] == 1


@pytest.mark.parametrize("exchanged", [False, True])
def test_other_factors_are_no_row_sum(exchanged: bool) -> None:
    """What multiplies the values is the weights of other rows, or of another head."""

    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = scores(q, k).softmax(-1)
        return (p.flip(0) if exchanged else p.mT * p) @ v

    assert alike(other, matrices())["row sums"] == 0


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k).masked_fill(distance(scores(q, k)) < 0, -math.inf)
    top = s.amax(-1, keepdim=True)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    return (e @ v) / total, (top + torch.log(total)).squeeze(-1)


def test_the_maximum_of_a_softmax_has_no_gradient() -> None:
    assert alike(by_hand, matrices())["references"] == 1


@pytest.mark.parametrize("kind", ["result", "not divided", "clamped", "of other rows"])
def test_a_maximum_that_counts_keeps_its_gradient(kind: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = scores(q, k)
        top = s.amax(-1, keepdim=True)
        if kind == "clamped":
            top = top * 0.5
        if kind == "of other rows":
            top = top.flip(-2)
        e = torch.exp(s - (top.mT if kind == "of other rows" else top))
        total = 1.0 + e.sum(-1, keepdim=True) if kind != "result" else e.sum(-1, keepdim=True)
        return e / total @ v, top if kind == "result" else total

    assert alike(function, matrices())["references"] == 0


def test_weights_of_half_the_sum_are_normalised() -> None:
    """The sum may have more than the weights: a sink."""

    def sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = torch.exp(scores(q, k))
        return e / (e.sum(-1, keepdim=True) + 1.5) @ v

    alike(sink, matrices())


def test_a_sum_beside_the_product_is_no_part_of_the_row() -> None:
    """O + b is not what x is multiplied with."""

    def beside(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return torch.baddbmm(b, scores(q, k).softmax(-1), v)

    assert alike(beside, (*matrices(), normal(2, 24, 8)))["row sums"] == 0


def test_sums_over_rows_see_what_each_row_subtracts() -> None:
    """The same number added to all maxima would change nothing; another one for each row does."""

    def weighted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = scores(q, k)
        e = torch.exp(s - s.amax(-1, keepdim=True))
        rows = e.sum(-1)
        return e / e.sum(-1, keepdim=True) @ v, (rows * v[..., 0]).sum(-1) / rows.sum(-1)

    assert alike(weighted, matrices())["references"] == 0


def test_values_read_twice_are_looked_at_once() -> None:
    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k) * 2.0**-60
        for _ in range(60):
            s = s + s
        return s.softmax(-1) @ v

    assert alike(doubled, matrices())["row sums"] == 1
