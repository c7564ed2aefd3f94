"""Kernels and rewrites that are plugged in run in training graphs: values and gradients are eager's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import plugging
from onepass.backend import record_compilations
from onepass.errors import UnequalReplacement
from onepass.ir.record import CompileRecord
from tests.steering.kernels import (
    MLP_EXAMPLE,
    MLPS,
    NORM_EXAMPLE,
    NORMS,
    SOFTMAXES,
    GatedMLP,
    Llama,
    mlp,
    mlp_backward,
    norm,
    softmax,
    torch_norm,
)
from tests.unbuilt import unbuilt

OPTIONS = {"strict": True, "cache": False}
OTHERS = pytest.mark.rotating  # of spellings and programs that take the same way as one that is in every run
Launchers = tuple[Callable[..., Any], Callable[..., Any]]


def norm_backward(x: Tensor, w: Tensor, y: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, w)]
        return torch.autograd.grad(norm(*leaves), leaves, dy)  # type: ignore[return-value]


def name_of(function: Callable[..., Any]) -> str:
    return function.__name__


def plug_norm(**options: Any) -> None:
    options = {"backward": norm_backward, "always": True, **options}
    onepass.kernel(reference=norm, example=NORM_EXAMPLE, **options)(lambda x, w: torch_norm(x, w))


def trained(
    function: Callable[..., Any], inputs: Sequence[Tensor], tolerance: float = 1e-5, **options: Any
) -> list[CompileRecord]:
    """The records of a program whose results and gradients are compared with eager's."""
    torch._dynamo.reset()
    run = onepass.jit(function, options=OPTIONS, **options)
    found = []
    with record_compilations() as records:
        for f in (run, function):
            leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
            wanted = [t for t in leaves if t.requires_grad]
            wanted += [*function.parameters()] if isinstance(function, torch.nn.Module) else []
            results = f(*leaves)
            results = results if isinstance(results, tuple) else (results,)
            gradients = torch.autograd.grad(sum(r.float().sin().sum() for r in results), wanted, allow_unused=True)
            found.append([*results, *gradients])
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)
    return records


def calls(records: Sequence[CompileRecord]) -> Counter[str]:
    """How often each kernel of the user's is called."""
    names = (e.op.split(".")[1] for r in records for e in r.externs if e.op.startswith("onepass_plugged."))
    return Counter("".join(c for c in n if not c.isdigit()).replace("__", "_").strip("_") for n in names)


def reasons(records: Sequence[CompileRecord]) -> list[tuple[bool, str]]:
    return [(d.accepted, d.reason) for r in records for d in r.decisions if d.kind in ("kernel", "rewrite")]


X, W = torch.randn(2, 3, 7), torch.rand(7) + 0.5


# --- three kernels, three spellings each ---


@pytest.mark.parametrize("target", ["cpu", pytest.param("triton-interpret", marks=pytest.mark.rotating)])
@pytest.mark.parametrize("spelling", [NORMS[0], *(pytest.param(f, marks=OTHERS) for f in NORMS[1:])], ids=name_of)
def test_a_triton_kernel_with_a_backward(spelling: Callable[..., Tensor], target: str, triton_norm: Launchers) -> None:
    launch, backward = triton_norm
    onepass.kernel(reference=norm, example=NORM_EXAMPLE, always=True, backward=backward)(launch)

    def program(x: Tensor, w: Tensor) -> Tensor:
        return spelling(x.sin() + 1, w) * 0.5

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        run = [t.to(dtype) for t in (X, W)]
        records = trained(program, run, tolerance)
        assert calls(records) == {"launch": 1, "launch_backward": 1}
        assert [s.op.split(".")[0] for s in records[0].saved].count("aten") <= 1  # no inner value of the reference


@pytest.mark.parametrize("spelling", SOFTMAXES, ids=lambda f: f.__name__)
def test_a_c_function_with_a_backward(spelling: Callable[..., Tensor], c_softmax: Launchers) -> None:
    rows, backward = c_softmax
    onepass.kernel(reference=softmax, example=(torch.empty(4, 8),), always=True, backward=backward)(rows)
    records = trained(lambda x: spelling(x * 2).cos(), [torch.randn(2, 5, 13)])
    assert calls(records) == {"rows": 1, "rows_backward": 1}


@pytest.mark.rotating
def test_a_fused_mlp_with_a_backward() -> None:
    onepass.kernel(reference=mlp, example=MLP_EXAMPLE, always=True, backward=mlp_backward)(lambda *a: mlp(*a))
    weights = torch.randn(8, 32), torch.randn(8, 32), torch.randn(32, 8)
    for spelling in MLPS:
        assert calls(trained(spelling, [torch.randn(5, 8), *weights], 1e-3))["lambda"] == 1
    assert calls(trained(GatedMLP(8, 32), [torch.randn(2, 5, 8)])) == {"lambda": 1, "lambda_backward": 1}


@pytest.mark.rotating
def test_a_model_as_transformers_writes_them(triton_norm: Launchers, c_softmax: Launchers) -> None:
    (launch, backward), (rows, rows_backward) = triton_norm, c_softmax
    onepass.kernel(reference=norm, example=NORM_EXAMPLE, always=True, backward=backward)(launch)
    onepass.kernel(reference=softmax, example=(torch.empty(4, 8),), always=True, backward=rows_backward)(rows)
    onepass.kernel(reference=mlp, example=MLP_EXAMPLE, always=True, backward=mlp_backward)(lambda *a: mlp(*a))
    found = calls(trained(Llama(), [torch.randn(2, 7, 16)], 1e-4))
    assert [found[n] for n in ("launch", "rows", "lambda")] == [5, 2, 2]
    assert [found[f"{n}_backward"] for n in ("launch", "rows", "lambda")] == [5, 2, 2]


# --- several results, sizes known at run time, types ---


def added(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, norm(total, w)


def added_backward(x: Tensor, y: Tensor, w: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total, made, d_total, d_made = rest
    change, weight = norm_backward(total, w, made, d_made)
    return change + d_total, change + d_total, weight


def residuals(x: Tensor, w: Tensor) -> Tensor:
    stream = x.sin()
    for k in range(2):
        total = stream + (x + k).cos()
        stream = total * 0.5 + torch_norm(total, w).tanh()
    return stream


@pytest.mark.parametrize("program", [residuals, lambda x, w: added(x.sin(), x.cos(), w)])
def test_several_results(program: Callable[..., Any]) -> None:
    example = torch.empty(4, 8), *NORM_EXAMPLE
    onepass.kernel(reference=added, example=example, always=True, backward=added_backward)(lambda *a: added(*a))
    count = 2 if program is residuals else 1
    assert calls(trained(program, (X, W))) == {"lambda": count, "lambda_backward": count}


def test_one_of_several_results_has_no_gradient() -> None:
    example = torch.empty(4, 8), *NORM_EXAMPLE
    onepass.kernel(reference=added, example=example, always=True, backward=added_backward)(lambda *a: added(*a))
    run = onepass.jit(lambda x, w: added(x.sin(), x.cos(), w), options=OPTIONS)
    for wanted in (0, 1):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        found, eager = (torch.autograd.grad(f(x, w)[wanted].exp().sum(), x)[0] for f in (
            run, lambda x, w: added(x.sin(), x.cos(), w)))  # fmt: skip
        torch.testing.assert_close(found, eager)


def test_sizes_known_at_run_time() -> None:
    plug_norm()

    def program(x: Tensor, w: Tensor) -> Tensor:
        return norm(x.view(-1, x.shape[-1]).sin(), w).cos()

    run = onepass.jit(program, dynamic=True, options=OPTIONS)
    with record_compilations() as records:
        for shape in ((2, 6, 16), (3, 9, 11), (5, 4, 3)):
            x, w = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
            found, eager = (torch.autograd.grad(f(x, w).sin().sum(), (x, w)) for f in (run, program))
            torch.testing.assert_close(found, eager)
    assert len(records) == 2 and calls(records) == {"lambda": 1, "lambda_backward": 1}


def test_an_input_without_a_gradient() -> None:
    def looked_up(x: Tensor, k: Tensor) -> Tensor:
        return torch.where(k > 2, x.sin(), x.cos())

    @onepass.kernel(
        reference=looked_up,
        example=(torch.empty(4, 8), torch.zeros(4, 8, dtype=torch.int64)),
        always=True,
        backward=lambda x, k, y, dy: (torch.where(k > 2, x.cos(), -x.sin()) * dy, None),
    )
    def chosen(x: Tensor, k: Tensor) -> Tensor:
        return looked_up(x, k)

    records = trained(lambda x, k: looked_up(x * 2, k) + 1, (X, torch.randint(0, 5, X.shape)))
    assert calls(records) == {"chosen": 1, "chosen_backward": 1}


# --- what is not used ---


def test_a_wrong_gradient_is_refused_with_the_sample() -> None:
    plug_norm(backward=lambda x, w, y, dy: (norm_backward(x, w, y, dy)[0], dy.reshape(-1, dy.shape[-1]).sum(0)))
    with pytest.warns(onepass.KernelWarning, match=r"its gradient of argument 1 is .*, by its reference .*sample 1"):
        records = trained(norm, (X, W))
    ((accepted, reason),) = reasons(records)
    assert not accepted and "float32[2, 3, 7]" in reason and not calls(records)


WRONG: dict[str, Callable[..., Any]] = {
    "gives 1 gradients for 2 inputs": lambda x, w, y, dy: dy,
    "ValueError": lambda *_: (_ for _ in ()).throw(ValueError()),
    "output with shape": lambda x, w, y, dy: (dy, dy),
    "changes the gradients": lambda x, w, y, dy: (norm_backward(x, w, y, dy), dy.zero_())[0],
    "changes its arguments": lambda x, w, y, dy: (norm_backward(x, w, y, dy), x.zero_())[0],
}


@pytest.mark.parametrize("problem", WRONG)
def test_other_wrong_gradients_are_refused(problem: str) -> None:
    plug_norm(backward=WRONG[problem])
    with pytest.warns(onepass.KernelWarning, match=problem):
        assert not calls(trained(norm, (X, W)))


def test_without_a_backward_it_says_so() -> None:
    plug_norm(backward=None)
    records = trained(norm, (X, W))
    assert not calls(records) and "has no `backward=`: it runs in inference only" in reasons(records)[0][1]


def test_a_slower_kernel_is_not_used_and_both_times_are_told() -> None:
    plug_norm(always=False)  # its backward runs autograd, operation by operation
    ((accepted, reason),) = reasons(trained(norm, (X, W)))
    assert not accepted and " us by <lambda>, " in reason and " us by our own kernels" in reason


def detached(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6).detach() * w


def without_gradients(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    return x * scale * w


class Doubled(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def own_gradient(x: Tensor, w: Tensor) -> Tensor:
    return Doubled.apply(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)) * w  # type: ignore[no-untyped-call]


def changed_in_place(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(norm(x, w), inplace=True)


@onepass.no_fuse()
def apart(x: Tensor, w: Tensor) -> Tensor:
    return norm(x, w)


def kept_inside(x: Tensor, w: Tensor) -> Tensor:
    return x * onepass.keep(torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)) * w


MOST = [pytest.param(f, marks=OTHERS) for f in (own_gradient, changed_in_place, kept_inside)]


@pytest.mark.parametrize("program", [detached, without_gradients, apart, *MOST], ids=name_of)
def test_values_are_the_same_and_gradients_may_not_be(program: Callable[..., Tensor]) -> None:
    """What is as large as the reference's value, and differentiates otherwise, stays as it is."""
    plug_norm()
    assert not calls(trained(lambda x, w: program(x.sin(), w).cos(), (X, W)))


def beside_its_own_gradient(x: Tensor, w: Tensor) -> Tensor:
    return Doubled.apply(norm(x.sin(), w)) + 1  # type: ignore[no-untyped-call]


def beside_a_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda x, w: norm(x.cos(), w).sin(), x, w, use_reentrant=False) * norm(x.exp(), w)


def in_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return norm(x.sin(), w) @ w


@pytest.mark.parametrize(
    "program", [beside_its_own_gradient, beside_a_checkpoint, in_autocast], ids=lambda f: f.__name__
)
def test_it_is_used_beside_what_is_not_looked_into(program: Callable[..., Tensor]) -> None:
    plug_norm()
    assert calls(trained(program, (X, W), 2e-2 if program is in_autocast else 1e-5))["lambda"] == 1


def test_batch_statistics_change_beside_it() -> None:
    plug_norm()
    models = [torch.nn.Sequential(torch.nn.RMSNorm(7, eps=1e-6), torch.nn.BatchNorm1d(7)) for _ in range(2)]
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(6, 7)
        with record_compilations() as records:
            results = [f(x) for f in (torch.compile(models[0], backend="onepass", options=OPTIONS), models[1])]
        for result in results:
            result.square().sum().backward()
        assert step or calls(records)["lambda"] == 1
    for ours, eager in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, eager)


def test_not_for_an_absent_chip() -> None:
    plug_norm()
    onepass.replace(log_of_sum, lambda x: torch.logsumexp(x, -1), example=(torch.empty(3, 4),))
    x, w = X.clone().requires_grad_(), W
    with unbuilt():
        graphs = onepass.explain(lambda x, w: log_of_sum(norm(x, w)), x, w, options=OPTIONS, target="sm_90").graphs
    assert not calls(graphs) and "cannot be checked here" in reasons(graphs)[0][1] and reasons(graphs)[1][0]


# --- rewrites ---


def log_of_sum(x: Tensor) -> Tensor:
    return torch.log(torch.exp(x).sum(-1))


SPELLINGS = (log_of_sum, lambda x: x.exp().sum(-1).log(), lambda x: torch.log((torch.exp(x) * 2).sum(-1) / 2))


@pytest.mark.parametrize("spelling", [SPELLINGS[0], *(pytest.param(f, marks=OTHERS) for f in SPELLINGS[1:])])
def test_a_rewrite_differentiates_by_itself(spelling: Callable[[Tensor], Tensor]) -> None:
    onepass.replace(log_of_sum, lambda x: torch.logsumexp(x, -1), example=(torch.empty(3, 4),))
    records = trained(lambda x: spelling(x * 2) + 1, (X,))
    assert reasons(records)[0][0]
    large = torch.full((3, 7), 1000.0, requires_grad=True)
    run = onepass.jit(lambda x: spelling(x * 2).sum(), options=OPTIONS)
    torch.testing.assert_close(torch.autograd.grad(run(large), large)[0], torch.full((3, 7), 2 / 7))


def test_a_rewrite_with_calls_runs_in_training() -> None:
    onepass.replace(log_of_sum, lambda x: x.sort(-1)[0].exp().sum(-1).log(), example=(torch.empty(3, 4),))
    records = trained(lambda x: log_of_sum(x * 2), (X,))
    assert reasons(records)[0][0] and any("sort" in e.op for e in records[0].externs)


def test_a_rewrite_with_another_gradient_is_refused() -> None:
    onepass.replace(log_of_sum, lambda x: torch.logsumexp(x.detach(), -1), example=(torch.empty(3, 4),))
    with pytest.warns(onepass.KernelWarning, match="its gradient of argument 0 is 0, by its reference"):
        records = trained(lambda x: log_of_sum(x * 2), (X,))
    assert not reasons(records)[0][0]
    with pytest.raises(UnequalReplacement):
        onepass.replace(log_of_sum, lambda x: torch.logsumexp(x, -1) * 1.01, example=(torch.empty(3, 4),))


# --- the cache ---


def test_a_graph_with_a_kernel_is_not_kept() -> None:
    def records_of() -> list[CompileRecord]:
        torch._dynamo.reset()
        with record_compilations() as records:
            run = torch.compile(lambda x, w: norm(x.sin(), w), backend="onepass", options={"strict": True})
            run(X.clone().requires_grad_(), W).sum().backward()
        return records

    assert [r.cache for r in records_of()] == ["miss", "miss"]
    plug_norm()
    found = records_of()
    assert calls(found) == {"lambda": 1, "lambda_backward": 1} and not any(r.key for r in found)
    plugging.unplug()
    assert [r.cache for r in records_of()] == ["hit", "hit"]
