"""Plugged-in kernels and rewrites run in the place of what computes the same, and nothing else."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass import plugging
from onepass.backend import record_compilations
from onepass.errors import UnequalReplacement
from onepass.ir.record import CompileRecord
from tests.steering.kernels import (
    EPSILON,
    MLP_EXAMPLE,
    MLPS,
    NORMS,
    SOFTMAXES,
    GatedMLP,
    Llama,
    mlp,
    norm,
    softmax,
    torch_norm,
)
from tests.steering.kernels import NORM_EXAMPLE as EXAMPLE
from tests.unbuilt import unbuilt

OPTIONS = {"strict": True, "cache": False}


def explained(function: Callable[..., Any], *args: Tensor, **options: Any) -> CompileRecord:
    with torch.no_grad():
        (record,) = onepass.explain(function, *args, options={**OPTIONS, **options}).graphs
    return record


def calls(record: CompileRecord) -> list[str]:
    return [e.op for e in record.externs]


def reasons(record: CompileRecord) -> list[tuple[bool, str]]:
    return [(d.accepted, d.reason) for d in record.decisions if d.kind in ("kernel", "rewrite")]


def agree(function: Callable[..., Any], *args: Tensor, tolerance: float = 1e-5, **options: Any) -> None:
    with torch.no_grad():
        ours = torch.compile(function, backend="onepass", options={**OPTIONS, **options})(*args)
    torch.testing.assert_close(ours, function(*args), rtol=tolerance, atol=tolerance)


# --- a Triton kernel ---


@pytest.mark.parametrize("target", ["cpu", pytest.param("triton-interpret", marks=pytest.mark.rotating)])
@pytest.mark.parametrize("spelling", NORMS, ids=lambda f: f.__name__)
def test_a_triton_kernel_for_every_spelling(
    spelling: Callable[..., Tensor], target: str, triton_norm: tuple[Callable[..., Tensor], ...]
) -> None:
    onepass.kernel(reference=norm, example=EXAMPLE, always=True)(triton_norm[0])
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.randn(3, 5, 7, dtype=dtype), torch.randn(7, dtype=dtype)
        record = explained(spelling, x, w, target=target)
        assert calls(record) == ["launch"] and not record.kernels
        agree(spelling, x, w, target=target, tolerance=1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("spelling", NORMS, ids=lambda f: f.__name__)
def test_what_is_around_stays_in_kernels(spelling: Callable[..., Tensor]) -> None:
    onepass.kernel(reference=norm, example=EXAMPLE, always=True)(lambda x, w: torch_norm(x, w))

    def layers(x: Tensor, w: Tensor) -> Tensor:
        y = spelling((x.sin() + 1).view(-1, 16), w)
        return spelling(y.exp(), w).cos() * 2

    x, w = torch.randn(2, 3, 16), torch.randn(16)
    record = explained(layers, x, w)
    assert calls(record) == ["<lambda>"] * 2 and len(record.kernels) == 3
    agree(layers, x, w)


# --- a C function ---


@pytest.mark.parametrize("spelling", SOFTMAXES, ids=lambda f: f.__name__)
def test_a_c_function_for_every_spelling(
    spelling: Callable[..., Tensor], c_softmax: tuple[Callable[..., Tensor], ...]
) -> None:
    onepass.kernel(reference=softmax, example=(torch.empty(4, 8),), always=True)(c_softmax[0])
    x = torch.randn(2, 5, 13)
    assert calls(explained(spelling, x)) == ["rows"]
    agree(spelling, x)
    transposed = torch.randn(13, 5).t()
    agree(spelling, transposed)


# --- a fused MLP ---


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = GatedMLP(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.sin()) + x


def test_a_fused_mlp_for_every_spelling() -> None:
    seen: list[tuple[int, ...]] = []

    @onepass.kernel(reference=mlp, example=MLP_EXAMPLE, always=True)
    def fused(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        seen.append(up.stride())
        return mlp(x, gate, up, down)

    weights = torch.randn(8, 32), torch.randn(8, 32), torch.randn(32, 8)
    programs: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        *((spelling, (torch.randn(5, 8), *weights)) for spelling in MLPS),
        (Network().requires_grad_(False), (torch.randn(2, 5, 8),)),
    ]
    for program, args in programs:
        assert calls(explained(program, *args)) == ["fused"]
        agree(program, *args, tolerance=1e-4)
    assert {(32, 1), (1, 8)} <= set(seen)  # the module's weights are transposed


# --- a model ---


@pytest.mark.rotating
def test_a_model_as_transformers_writes_them(
    triton_norm: tuple[Callable[..., Tensor], ...], c_softmax: tuple[Callable[..., Tensor], ...]
) -> None:
    onepass.kernel(reference=norm, example=EXAMPLE, always=True)(triton_norm[0])
    onepass.kernel(reference=softmax, example=(torch.empty(4, 8),), always=True)(c_softmax[0])
    onepass.kernel(reference=mlp, example=MLP_EXAMPLE, always=True)(mlp)
    model, x = Llama(), torch.randn(2, 7, 16)
    record = explained(model, x)
    assert Counter(c for c in calls(record) if "." not in c) == {"launch": 5, "rows": 2, "mlp": 2}
    agree(model, x, tolerance=1e-4)


# --- several results, and sizes known at run time ---


def added(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, norm(total, w)


def residuals(x: Tensor, w: Tensor) -> Tensor:
    stream = x.sin()
    for _ in range(2):
        total = stream + x.cos()
        stream = total * 0.5 + torch_norm(total, w).tanh()
    return stream


def turned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sin(x) * w, torch.cos(x) * w


def test_several_results() -> None:
    onepass.kernel(reference=added, example=(*EXAMPLE[:1], *EXAMPLE), always=True)(lambda x, y, w: added(x, y, w))
    onepass.kernel(reference=turned, example=EXAMPLE, always=True)(lambda x, w: turned(x, w))
    x, w = torch.randn(6, 16), torch.randn(16)
    for program, count in ((residuals, 2), (lambda x, w: (w * x.exp().cos() + 1, x.exp().sin() * w), 1)):
        record = explained(program, x, w)
        assert calls(record).count("<lambda>") == 3 * count  # a call, and one for each of its results
        agree(program, x, w)


def needs_a_result_first(x: Tensor, w: Tensor) -> Tensor:
    total = x.sin() + x.cos()
    return norm(total, total.sum(0))


def inner_read_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    total = x.sin() + x.cos()
    scale = torch.rsqrt((total * total).mean(-1, keepdim=True) + EPSILON)
    return total * scale * w + scale


@pytest.mark.parametrize("program", [needs_a_result_first, inner_read_elsewhere])
def test_several_results_that_cannot_be(program: Callable[..., Tensor]) -> None:
    onepass.kernel(reference=added, example=(*EXAMPLE[:1], *EXAMPLE), always=True)(lambda x, y, w: added(x, y, w))
    assert not calls(explained(program, torch.randn(16, 16), torch.randn(16)))


@pytest.mark.parametrize("spelling", [norm, *(pytest.param(f, marks=pytest.mark.rotating) for f in NORMS[1:])])
def test_sizes_known_at_run_time(spelling: Callable[..., Tensor]) -> None:
    seen: list[torch.Size] = []

    @onepass.kernel(reference=norm, example=EXAMPLE, always=True)
    def noted(x: Tensor, w: Tensor) -> Tensor:
        seen.append(x.shape)
        return norm(x, w)

    run = onepass.jit(lambda x, w: spelling(x.sin(), w).cos(), dynamic=True, options=OPTIONS)
    with record_compilations() as records, torch.no_grad():
        for shape in ((6, 16), (9, 11), (3, 1), (0, 5)):
            x, w = torch.randn(shape), torch.randn(shape[-1])
            torch.testing.assert_close(run(x, w), spelling(x.sin(), w).cos())
    assert calls(records[0]) == ["noted"] and {(6, 16), (9, 11)} <= set(seen)


def test_a_kernel_for_some_sizes_alone_is_guarded_by_where() -> None:
    def even(x: Tensor, w: Tensor) -> Tensor:
        assert x.shape[0] % 2 == 0
        return norm(x, w)

    onepass.kernel(reference=norm, example=EXAMPLE, always=True, where=lambda x, w: x.shape[0] % 2 == 0)(even)
    run = onepass.jit(lambda x, w: norm(x.sin(), w), dynamic=True, options=OPTIONS)
    with record_compilations() as records, torch.no_grad():
        for rows in (6, 9, 12):
            x, w = torch.randn(rows, 16), torch.randn(16)
            torch.testing.assert_close(run(x, w), norm(x.sin(), w))
    assert [calls(r) for r in records] == [["even"], []]


def test_a_kernel_that_is_wrong_for_other_sizes_is_refused() -> None:
    @onepass.kernel(reference=norm, example=EXAMPLE, always=True)
    def even(x: Tensor, w: Tensor) -> Tensor:
        return norm(x, w) + x.shape[0] % 2

    run = onepass.jit(lambda x, w: norm(x.sin(), w), dynamic=True, options=OPTIONS)
    with record_compilations() as records, torch.no_grad(), pytest.warns(onepass.KernelWarning, match="even is not"):
        run(torch.randn(6, 16), torch.randn(16))
    assert not calls(records[0])


# --- what is not used ---


def test_a_wrong_kernel_is_refused_with_the_sample() -> None:
    @onepass.kernel(reference=norm, example=EXAMPLE, always=True)
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w, 0.1)

    x, w = torch.randn(6, 16), torch.randn(16)
    with pytest.warns(onepass.KernelWarning, match=r"wrong is not used: at \[0, 0\] it gives"):
        record = explained(norm, x, w)
    ((accepted, reason),) = reasons(record)
    assert not accepted and "float32[6, 16], float32[16]" in reason and not calls(record)


def raises(x: Tensor, w: Tensor) -> Tensor:
    raise ValueError("rows of 16 only")


def changes(x: Tensor, w: Tensor) -> Tensor:
    result = norm(x, w)
    x.zero_()
    return result


def widens(x: Tensor, w: Tensor) -> Tensor:
    return norm(x.double(), w)


def drops(x: Tensor, w: Tensor) -> Tensor:
    return norm(x, w)[:-1]


REFUSED = {raises: "ValueError on sample 1", changes: "changes its arguments", widens: "float64", drops: "gives"}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_other_wrong_kernels_are_refused(function: Callable[..., Tensor]) -> None:
    onepass.kernel(reference=norm, example=EXAMPLE, always=True)(function)
    with pytest.warns(onepass.KernelWarning, match=REFUSED[function]):
        record = explained(norm, torch.randn(6, 16), torch.randn(16))
    assert not calls(record)


def test_a_slower_kernel_is_not_used_and_both_times_are_told() -> None:
    @onepass.kernel(reference=norm, example=EXAMPLE)
    def slow(x: Tensor, w: Tensor) -> Tensor:
        time.sleep(1e-3)
        return norm(x, w)

    record = explained(norm, torch.randn(6, 16), torch.randn(16))
    ((accepted, reason),) = reasons(record)
    assert not accepted and " us by slow, " in reason and " us by our own kernels" in reason


def test_a_faster_kernel_is_used_and_both_times_are_told() -> None:
    rows = torch.randn(512, 4096)

    def cumulated(x: Tensor) -> Tensor:
        return torch.sin(torch.sin(torch.sin(x)))

    answers: dict[int, Tensor] = {}

    @onepass.kernel(reference=cumulated, example=(torch.empty(4, 8),))
    def remembered(x: Tensor) -> Tensor:  # faster than anything that computes
        key = hash(x[0, 0].item())
        if key not in answers:
            answers[key] = cumulated(x)
        return answers[key]

    record = explained(cumulated, rows)
    ((accepted, reason),) = reasons(record)
    assert accepted and " us by remembered, " in reason and calls(record) == ["remembered"]


def reads_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON)
    return x * scale * w, scale


def other_epsilon(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


def other_axis(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(0, keepdim=True) + EPSILON) * w


def kept_inside(x: Tensor, w: Tensor) -> Tensor:
    return x * onepass.keep(torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON)) * w


@pytest.mark.parametrize("program", [reads_inside, other_epsilon, other_axis, kept_inside, onepass.no_fuse()(norm)])
def test_what_is_not_the_same_is_left_alone(program: Callable[..., Any]) -> None:
    onepass.kernel(reference=norm, example=EXAMPLE, always=True)(lambda x, w: norm(x, w))
    record = explained(program, torch.randn(16, 16), torch.randn(16))
    assert not calls(record) and not reasons(record)


def test_where_it_is_asked() -> None:
    onepass.kernel(reference=norm, example=EXAMPLE, always=True, where=lambda x, w: x.shape[-1] == 16)(
        lambda x, w: norm(x, w)
    )
    assert calls(explained(norm, torch.randn(3, 16), torch.randn(16)))
    assert not calls(explained(norm, torch.randn(3, 8), torch.randn(8)))


def test_not_in_training_nor_for_an_absent_chip() -> None:
    onepass.kernel(reference=norm, example=EXAMPLE, always=True)(lambda x, w: norm(x, w))
    x, w = torch.randn(3, 16), torch.randn(16)
    graphs = onepass.explain(norm, x.clone().requires_grad_(), w, options=OPTIONS).graphs
    assert not any(calls(g) for g in graphs) and "runs in inference only" in reasons(graphs[0])[0][1]
    with unbuilt():
        for target in ("sm_90", "cpu"):
            record = explained(norm, x, w, target=target)
            assert not calls(record) and "cannot be checked here" in reasons(record)[0][1]
    assert calls(explained(norm, x, w))


def test_a_graph_compiled_before_is_not_taken_from_the_cache() -> None:
    x, w = torch.randn(3, 24), torch.randn(24)
    for _ in range(2):
        assert not calls(explained(norm, x, w, cache=True))
    onepass.kernel(reference=norm, example=EXAMPLE, always=True)(lambda x, w: norm(x, w))
    assert calls(explained(norm, x, w, cache=True))
    plugging.unplug()
    assert not calls(explained(norm, x, w, cache=True))


# --- rewrites ---


def log_of_sum(x: Tensor) -> Tensor:
    return torch.log(torch.exp(x).sum(-1))


SPELLINGS = (log_of_sum, lambda x: x.exp().sum(-1).log(), lambda x: torch.log((torch.exp(x) * 2).sum(-1) / 2))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_rewrite_for_every_spelling(spelling: Callable[[Tensor], Tensor]) -> None:
    onepass.replace(log_of_sum, lambda x: torch.logsumexp(x, -1), example=(torch.empty(3, 4),))
    large = torch.full((3, 7), 1000.0)

    def program(x: Tensor) -> Tensor:
        return spelling(x * 2) + 1

    assert torch.isinf(program(large)).all()
    with torch.no_grad():
        ours = torch.compile(program, backend="onepass", options=OPTIONS)(large)
    torch.testing.assert_close(ours, torch.logsumexp(large * 2, -1) + 1)
    record = explained(program, large)
    assert not calls(record) and reasons(record)[0][0]
    agree(program, torch.randn(5, 7))


def test_a_rewrite_with_calls_is_left_out_and_says_so() -> None:
    onepass.replace(log_of_sum, lambda x: (x.sort(-1)[0]).exp().sum(-1).log(), example=(torch.empty(3, 4),))
    ((accepted, reason),) = reasons(explained(log_of_sum, torch.randn(3, 7)))
    assert not accepted and "its replacement has calls" in reason


def test_a_wrong_rewrite_is_an_error_with_the_sample() -> None:
    with pytest.raises(UnequalReplacement, match=r"at \[0, 0\] it gives .* its reference .*float32\[3, 4\]"):
        onepass.replace(lambda x: x.exp() - 1, lambda x: torch.expm1(x) * 1.01, example=(torch.empty(3, 4),))
    assert not plugging.declared.declared()
