"""`fuse`, `no_fuse`, `keep`, `save`, `recompute`: the plan is as asked, and the results are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import building, pipeline
from onepass.backend import record_compilations
from onepass.errors import InvalidOption, KernelBuildError, UnmetOrder
from onepass.ir.record import CompileRecord
from onepass.resources import UnbuiltGroups
from tests.checking import compare, execute, fresh, to_float64
from tests.unbuilt import unbuilt

OPTIONS = {"strict": True, "cache": False}
X = torch.randn(64, 128)
W = torch.randn(128)


def planned(function: Callable[..., Any], *args: Any, train: bool = False, **options: Any) -> list[CompileRecord]:
    """The records of a function's graphs, no kernel built."""
    args = tuple(a.detach().requires_grad_(train) if a.is_floating_point() else a for a in args)
    with unbuilt():
        return list(onepass.explain(function, *args, options={**OPTIONS, **options}).graphs)


def kernels(record: CompileRecord) -> list[str]:
    """The operations of each kernel, as one word."""
    return ["+".join(o["op"].split(".")[1] for o in k.operations) for k in record.kernels]


def orders(record: CompileRecord) -> set[tuple[str, str]]:
    return {(o.what, o.by) for o in record.orders}


# --- programs, written once for plans and for values ---


def apart(x: Tensor, w: Tensor) -> Tensor:
    y = x.sin() * w
    with onepass.no_fuse():
        y = y.exp().neg()
    return y.cos() + 1


@onepass.no_fuse()
def apart_by_name(x: Tensor) -> Tensor:
    return x.exp().neg()


def decorated(x: Tensor, w: Tensor) -> Tensor:
    return (apart_by_name(x.sin() * w)).cos() + 1


def unrelated(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with onepass.fuse():
        return x.sin() + 1, w.cos() * 2


def normed(x: Tensor, w: Tensor) -> Tensor:
    with onepass.fuse():
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
    return torch.sin(y)


def kept(x: Tensor, w: Tensor) -> Tensor:
    y = onepass.keep(x.sin() * w)
    return y.exp().cos()


def kept_and_changed(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    z = onepass.keep(y)
    z.add_(1)  # it is the same tensor
    return y.exp()


def saved(x: Tensor, w: Tensor) -> Tensor:
    y = onepass.save(x * w)
    return torch.sin(y) * torch.cos(y)


def recomputed(x: Tensor, w: Tensor) -> Tensor:
    return (onepass.recompute(torch.exp(x * w)) @ w).sin()


def recomputed_call(x: Tensor, w: Tensor) -> Tensor:
    y = onepass.recompute(x.sort(-1)[0])
    return onepass.recompute(y * y) * y.amax(-1, keepdim=True) + w


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(apart, x, w, use_reentrant=False) * 2


def broken(x: Tensor, w: Tensor) -> Tensor:
    with onepass.fuse():
        x = x.sin()
        torch._dynamo.graph_break()
        return x * w


PROGRAMS = (
    apart,
    decorated,
    unrelated,
    normed,
    kept,
    kept_and_changed,
    saved,
    recomputed,
    recomputed_call,
    checkpointed,
    broken,
)


@pytest.mark.parametrize("target", ["cpu", pytest.param("triton-interpret", marks=pytest.mark.rotating)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_values_are_those_of_eager(program: Callable[..., Any], target: str) -> None:
    run = torch.compile(program, backend="onepass", options={"strict": True, "target": target})
    for rows, columns, dtype in ((5, 7, torch.float32), (16, 1, torch.bfloat16)):
        inputs = [torch.randn(rows, columns, dtype=dtype), torch.randn(columns, dtype=dtype)]
        inputs = [t.requires_grad_() for t in inputs]
        ours, eager = (execute(f, fresh(inputs), True) for f in (run, program))
        reference = execute(program, [to_float64(t) for t in fresh(inputs)], True)
        compare(ours, eager, reference, dtype)


@pytest.mark.parametrize("program", [apart, unrelated, normed, kept, kept_and_changed], ids=lambda p: p.__name__)
def test_sizes_known_at_run_time(program: Callable[..., Any]) -> None:
    run = onepass.jit(program, dynamic=True, options={"strict": True})
    for rows in (3, 0, 1, 11):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(run(x.clone(), W[:5]), program(x.clone(), W[:5]))


def test_in_eager_they_do_nothing() -> None:
    for order in (onepass.keep, onepass.save, onepass.recompute):
        assert order(X) is X
    with onepass.fuse(), onepass.no_fuse():
        assert torch.equal(X.sin(), torch.sin(X))
    assert apart_by_name.__name__ == "apart_by_name"
    torch.testing.assert_close(torch.compile(apart, backend="aot_eager")(X, W), apart(X, W))


# --- no_fuse ---


def test_operations_apart_have_a_kernel_each() -> None:
    for program in (apart, decorated):
        (record,) = planned(program, X, W)
        assert kernels(record) == ["sin+mul", "exp", "neg", "cos+add"]
        assert orders(record) == {("apart", "onepass.no_fuse")}


def test_all_apart_is_what_fuse_false_is() -> None:
    def everything(x: Tensor) -> Tensor:
        with onepass.no_fuse():
            return F.layer_norm(F.gelu(x), (128,)).softmax(-1)

    def plain(x: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(x), (128,)).softmax(-1)

    for train in (False, True):
        ours = planned(everything, X, train=train)
        assert [kernels(r) for r in ours[:1]] == [kernels(r) for r in planned(plain, X, train=train, fuse=False)[:1]]
        assert all("+" not in k for r in ours for k in kernels(r))


def test_backward_of_what_is_apart_is_apart() -> None:
    for program in (apart, checkpointed):
        forward, backward = planned(program, X, W, train=True)
        assert {"exp", "neg"} <= set(kernels(forward))
        assert ("apart", "onepass.no_fuse") in orders(backward)
        assert "neg" in kernels(backward)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = torch.nn.LayerNorm(16), torch.nn.Sequential(torch.nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(x))
        return y * 2 + x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


LINE = Block.forward.__code__.co_firstlineno + 1
PATTERNS = {
    "layers.1.act": ["gelu"],
    "layers.*.act": ["gelu", "gelu"],
    "layers.0.act.0, layers.1.act": ["gelu", "gelu"],
    f"test_orders.py:{LINE + 1}": ["mul", "add", "mul", "add"],
    f"steering/test_orders.py:{LINE + 1}-{LINE + 2}": ["mul", "add", "mul", "add"],
    "rders.py:1-1000": [],
    "layers.2.*": [],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_option_names_lines_and_modules(pattern: str) -> None:
    (record,) = planned(Model().requires_grad_(False), torch.randn(8, 16), no_fuse=pattern)
    assert [o.by.split('"')[1] in pattern for o in record.orders] == [True] * len(PATTERNS[pattern])
    assert [k for k in kernels(record) if k in ("gelu", "mul", "add")] == PATTERNS[pattern]


def test_the_option_names_a_line_that_calls() -> None:
    (record,) = planned(Model().requires_grad_(False), torch.randn(8, 16), no_fuse=f"test_orders.py:{LINE}")
    assert {"gelu", "sub"} <= set(kernels(record)) and "gelu" not in "".join(k for k in kernels(record) if "+" in k)


def test_a_wrong_pattern_is_an_error() -> None:
    with pytest.raises(InvalidOption, match=r"model\.py:10-20"):
        onepass.jit(apart, options={"no_fuse": "model.py:a-b"})


# --- fuse ---


def test_a_region_shares_a_kernel_that_nobody_would_make() -> None:
    (record,) = planned(unrelated, X, torch.randn(77))
    assert kernels(record) == ["sin+add+cos+mul"]
    assert orders(record) == {("together", "onepass.fuse")}


def test_backward_of_a_region_shares_one_with_what_lies_between() -> None:
    forward, backward = planned(normed, X, W, train=True)
    assert len(forward.kernels) == 1 and len(backward.kernels) == 1
    assert ("together", "onepass.fuse") in orders(backward)


def test_each_time_a_region_is_entered_is_its_own() -> None:
    def layers(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for t in (x, y):
            with onepass.fuse():
                found.append(t.sin() + 1)
                found.append(t[:1].cos() * 2)
        return tuple(found)

    (record,) = planned(layers, X, torch.randn(3, 5))
    assert record.plan.count("kernel stores") == 2  # they may share a launch
    assert set(kernels(record)) == {"sin+add+cos+mul"}


def test_forward_alone() -> None:
    def region(x: Tensor) -> Tensor:
        with onepass.fuse(backward=False):
            return torch.sin(x) * 2

    forward, backward = planned(region, X, train=True)
    assert orders(forward) == {("together", "onepass.fuse")} and not orders(backward)


def test_products_in_a_region_run_in_its_kernel() -> None:
    def linear(x: Tensor, w: Tensor) -> Tensor:
        with onepass.fuse():
            return F.relu(x @ w)

    plain = planned(lambda x, w: F.relu(x @ w), torch.randn(8192, 4096), torch.randn(4096, 4096), target="sm_90")
    asked = planned(linear, torch.randn(8192, 4096), torch.randn(4096, 4096), target="sm_90")
    assert kernels(plain[0]) == ["relu"] and kernels(asked[0]) == ["mm+relu"]


# --- modules ---


class Fused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(128) + 0.5)

    @onepass.fuse()
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class Apart(torch.nn.Module):
    @onepass.no_fuse()
    def forward(self, x: Tensor) -> Tensor:
        return x.exp().neg()


class Kept(torch.nn.Module):
    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return self.order(x.sin() * 2).sin().cos()


def test_orders_of_modules_hold_in_forward_and_backward() -> None:
    model = torch.nn.Sequential(Fused(), Apart(), Fused())
    forward, backward = planned(model, X, train=True)
    assert orders(forward) == orders(backward) == {("together", "onepass.fuse"), ("apart", "onepass.no_fuse")}
    assert {"exp", "neg"} <= set(kernels(forward)) and "neg" in kernels(backward)
    assert sum("rsqrt" in k for k in kernels(forward)) == 2  # each module is a region of its own


def test_values_of_modules_stay_in_forward_and_backward() -> None:
    plain, kept = (planned(Kept(f), X, train=True) for f in (lambda t: t, onepass.keep))
    assert kept[0].bytes_moved > plain[0].bytes_moved and orders(kept[0]) == {("kept", "onepass.keep")}
    (saved,) = [s for s in planned(Kept(onepass.save), X, train=True)[0].saved if s.op == "aten.mul.Tensor"]
    assert saved.why.startswith("onepass.save, ")


@pytest.mark.rotating
@pytest.mark.parametrize("make", [Fused, Apart, lambda: Kept(onepass.keep), lambda: Kept(onepass.recompute)])
def test_values_of_modules_are_those_of_eager(make: Callable[[], torch.nn.Module]) -> None:
    model = torch.nn.Sequential(make(), torch.nn.Linear(128, 8))
    inputs = [X.clone().requires_grad_()]
    ours, eager = (execute(f, fresh(inputs), True) for f in (onepass.jit(model, options=OPTIONS), model))
    compare(ours, eager, execute(copy.deepcopy(model).double(), [to_float64(t) for t in fresh(inputs)], True), X.dtype)


def test_contradictory_orders_of_modules_are_errors() -> None:
    class Outer(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @onepass.fuse()
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    for train in (False, True):
        with pytest.raises(Exception, match=r"onepass\.no_fuse asks for a kernel of its own"):
            planned(Outer(Apart()), X, train=train)
        with pytest.raises(Exception, match='option no_fuse="inner" asks for a kernel of its own'):
            planned(Outer(torch.nn.GELU()), X, train=train, no_fuse="inner")
    with pytest.raises(Exception, match="asks the contrary"):
        planned(torch.nn.Sequential(Kept(lambda t: onepass.save(onepass.recompute(t)))), X, train=True)


# --- keep, save, recompute ---


def test_a_kept_value_is_stored_once() -> None:
    (record,) = planned(kept, X, W)
    (without,) = planned(lambda x, w: (x.sin() * w).exp().cos(), X, W)
    assert record.bytes_moved == without.bytes_moved + X.nbytes
    assert orders(record) == {("kept", "onepass.keep")}


def test_a_kept_product_is_stored() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(onepass.keep(q @ k.transpose(-1, -2)) / 8, -1) @ v

    inputs = [torch.randn(2, 4, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    (record,) = planned(attention, *inputs, target="sm_90")
    assert not any(k.count("bmm") > 1 for k in kernels(record))
    assert record.bytes_moved >= 2 * 8 * 256 * 256 * 2


def test_hints_decide_what_backward_reads() -> None:
    def program(order: Callable[[Tensor], Tensor]) -> list[CompileRecord]:
        return planned(lambda x, w: (order(torch.exp(x * w)) @ w).sin(), X, W, train=True)

    plain, again = program(lambda t: t), program(onepass.recompute)
    assert any(s.op == "aten.exp.default" for s in plain[0].saved)
    assert not any(s.op == "aten.exp.default" for s in again[0].saved)
    assert any("onepass.recompute, " in d.reason for d in again[1].decisions)
    cheap = planned(lambda x, w: torch.sin(x * w) * torch.cos(x * w), X, W, train=True)
    asked = planned(saved, X, W, train=True)
    assert not any(s.op == "aten.mul.Tensor" for s in cheap[0].saved)
    (value,) = [s for s in asked[0].saved if s.op == "aten.mul.Tensor"]
    assert value.why.startswith("onepass.save, ") and "test_orders.py" in value.why


# --- errors ---


def contradiction(x: Tensor) -> Tensor:
    with onepass.fuse(), onepass.no_fuse():
        return x.sin().cos()


def other_contradiction(x: Tensor) -> Tensor:
    with onepass.no_fuse(), onepass.fuse():
        return x.sin().cos()


def a_call(x: Tensor) -> Tensor:
    with onepass.fuse():
        return (x + 1).sort()[0] * 2


def a_call_between(x: Tensor) -> Tensor:
    y = x + 1
    with onepass.fuse():
        y = y * 2
    z = y.sort()[0]
    with onepass.fuse():
        return z + y


def no_such_kernel(x: Tensor) -> Tensor:
    with onepass.fuse():
        return x / x.sum()


def a_product(x: Tensor) -> Tensor:
    with onepass.fuse():
        return x @ x.T + 1


def too_many(x: Tensor) -> Tensor:
    with onepass.fuse():
        for k in range(100):
            x = x.sin() + k
        return x


ERRORS = {
    contradiction: "onepass.no_fuse asks",
    other_contradiction: "onepass.no_fuse asks",
    a_call: "sort.default is a call: sorting",
    no_such_kernel: "needed again over the split axis",
    a_product: "the library computes this product",
    too_many: "limit",
}


@pytest.mark.parametrize("program", ERRORS, ids=lambda p: p.__name__)
def test_what_cannot_be_is_an_error_without_strict(program: Callable[..., Any]) -> None:
    line = program.__code__.co_firstlineno
    with pytest.raises(Exception, match=ERRORS[program]) as caught:
        torch.compile(program, backend="onepass", options={"cache": False, "strict": False})(torch.randn(2048, 512))
    assert "UnmetOrder: onepass." in str(caught.value) and "test_orders.py:" in str(caught.value)
    named = int(str(caught.value).split("test_orders.py:")[1].split(":")[0])
    assert line < named <= line + 4


def test_regions_on_both_sides_of_a_call_are_two() -> None:
    (record,) = planned(a_call_between, X)
    assert len(record.kernels) == 2


def test_contradictory_hints_and_random_numbers_are_errors() -> None:
    with pytest.raises(Exception, match="asks the contrary"):
        planned(lambda x: onepass.recompute(onepass.save(x.exp())).sin(), X, train=True)

    def drawn(x: Tensor) -> Tensor:
        return onepass.recompute(torch.multinomial(x.detach().exp(), 3)) * x[:, :3]

    with pytest.raises(Exception, match="would give another value"):
        planned(drawn, X, train=True)


def test_a_region_of_backward_that_cannot_be_names_the_fix() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with onepass.fuse():
            return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v

    inputs = [torch.randn(2, 4, 128, 64, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.raises(UnmetOrder, match=r"onepass.fuse\(backward=False\)"):
        planned(attention, *inputs, train=True, target="sm_90")


def test_a_region_that_cannot_be_built_is_an_error() -> None:
    def build(_entry: Any, record: CompileRecord, *_: Any) -> Any:
        raise UnbuiltGroups({record.kernels[0].group: KernelBuildError("ptxas", "too much shared memory", "-")})

    with (
        mock.patch.object(building, "build_entry", build),
        pytest.raises(Exception, match="it does not fit: ") as caught,
    ):
        onepass.explain(unrelated, X, W, options=OPTIONS)
    assert "UnmetOrder: onepass.fuse at " in str(caught.value)


# --- the cache, and equal layers ---


def scaled(x: Tensor) -> Tensor:
    return x.sin() * 2


def test_an_order_is_part_of_the_key() -> None:
    programs: list[Callable[[Tensor], Tensor]] = [
        scaled,
        onepass.no_fuse()(scaled),
        onepass.fuse()(scaled),
        lambda x: onepass.keep(x.sin()) * 2,
        lambda x: scaled(apart_by_name(x)),
    ]
    keys = [planned(p, X)[0].key for p in programs]
    assert len(set(keys)) == len(keys) and all(keys)
    assert planned(onepass.fuse()(scaled), X)[0].key == keys[2]  # of another region
    assert planned(scaled, X, no_fuse="layers.*")[0].key not in keys


def test_a_hit_tells_the_orders_with_the_lines_of_today() -> None:
    def first(x: Tensor) -> Tensor:
        return onepass.keep(x.sin() * 3).exp()

    def second(x: Tensor) -> Tensor:
        return onepass.keep(x.sin() * 3).exp()

    found = []
    for program in (first, second):
        torch._dynamo.reset()
        with record_compilations() as records, torch.no_grad():
            torch.compile(program, backend="onepass", options={"strict": True})(X)
        found += records
    assert [r.cache for r in found] == ["miss", "hit"]
    lines = [r.orders[0].line for r in found]
    assert [f":{p.__code__.co_firstlineno + 1}:" in line for p, line in zip((first, second), lines, strict=True)] == [
        True
    ] * 2
    assert "kept: onepass.keep, " in str(onepass.explain(first, X))


def test_orders_do_not_keep_equal_layers_apart() -> None:
    def layers(count: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for _ in range(count):
                with onepass.fuse():
                    x = torch.softmax(x, -1) + 1
                with onepass.no_fuse():
                    x = x.sin()
                x = onepass.keep(x.cos() * 2).exp()
            return x

        return run

    counts = []
    for count in (3, 9):
        with mock.patch.object(pipeline, "choose", wraps=pipeline.choose) as choose:
            (record,) = planned(layers(count), X)
        counts.append((choose.call_count, len({k.source.split("#include")[1] for k in record.kernels})))
        assert len(record.kernels) == 2 * count + 1
    assert counts[0] == counts[1]
