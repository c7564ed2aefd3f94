"""Plugged-in kernels and rewrites run in the place of what computes the same, and nothing else."""

from __future__ import annotations

import ctypes
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass import plugging
from onepass.errors import UnequalReplacement
from onepass.ir.record import CompileRecord
from onepass.runtime.toolchain import find_toolchain
from tests.unbuilt import unbuilt

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

OPTIONS = {"strict": True, "cache": False}
EXAMPLE = torch.empty(4, 8), torch.empty(8)
EPSILON = 1e-6


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", onepass.KernelWarning)
        yield
    plugging.unplug()


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


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON) * w


def other_norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPSILON))


def torch_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPSILON)


NORMS = (norm, other_norm, torch_norm)


def norm_rows(x, w, out, columns, epsilon, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, inside, other=0.0).to(tl.float32)
    total = 0.0
    for j in range(columns):  # tl.sum is no plain function, which is all that can be interpreted here
        each = tl.load(x + row * columns + j).to(tl.float32)
        total += each * each
    scale = 1 / tl.sqrt(total / columns + epsilon)
    weight = tl.load(w + at, inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, (value * scale * weight).to(out.dtype.element_ty), inside)


@pytest.fixture
def triton_norm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """The kernel's launcher, run by Triton's interpreter."""
    if triton is None:
        pytest.skip("no Triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows = triton.jit(norm_rows)

    def launch(x: Tensor, w: Tensor) -> Tensor:
        x, columns = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        block = triton.next_power_of_2(columns)
        rows[(x.numel() // columns,)](x, w.contiguous(), out, columns, EPSILON, BLOCK=block)
        return out

    return launch


@pytest.mark.parametrize("target", ["cpu", pytest.param("triton-interpret", marks=pytest.mark.rotating)])
@pytest.mark.parametrize("spelling", NORMS, ids=lambda f: f.__name__)
def test_a_triton_kernel_for_every_spelling(
    spelling: Callable[..., Tensor], target: str, triton_norm: Callable[..., Tensor]
) -> None:
    onepass.kernel(reference=norm, example=EXAMPLE, always=True)(triton_norm)
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

SOURCE = """
#include <math.h>
void softmax(const float *x, float *out, long rows, long columns) {
  for (long i = 0; i < rows; ++i, x += columns, out += columns) {
    float most = -INFINITY, sum = 0;
    for (long j = 0; j < columns; ++j) most = x[j] > most ? x[j] : most;
    for (long j = 0; j < columns; ++j) sum += out[j] = expf(x[j] - most);
    for (long j = 0; j < columns; ++j) out[j] /= sum;
  }
}
"""


@pytest.fixture(scope="module")
def c_softmax(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tensor], Tensor]:
    folder = tmp_path_factory.mktemp("c")
    (folder / "softmax.c").write_text(SOURCE)
    command = [*find_toolchain().command, "-O2", "-shared", "-fPIC", "softmax.c", "-o", "softmax.so", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "softmax.so"))

    def rows(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, out))
        library.softmax(*pointers, ctypes.c_long(x.numel() // x.shape[-1]), ctypes.c_long(x.shape[-1]))
        return out

    return rows


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def by_reciprocal(x: Tensor) -> Tensor:
    e = (x - x.max(-1, keepdim=True).values).exp()
    return torch.reciprocal(e.sum(-1, keepdim=True)) * e


@pytest.mark.parametrize("spelling", [softmax, by_hand, by_reciprocal], ids=lambda f: f.__name__)
def test_a_c_function_for_every_spelling(
    spelling: Callable[..., Tensor], c_softmax: Callable[[Tensor], Tensor]
) -> None:
    onepass.kernel(reference=softmax, example=(torch.empty(4, 8),), always=True)(c_softmax)
    x = torch.randn(2, 5, 13)
    assert calls(explained(spelling, x)) == ["rows"]
    agree(spelling, x)
    transposed = torch.randn(13, 5).t()
    agree(spelling, transposed)


# --- a fused MLP ---


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.silu(x @ up) @ down


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32, bias=False), torch.nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def in_einsum(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = torch.mm(x, up)
    return torch.einsum("sn,nd->sd", h / (1 + torch.exp(-h)), down)


def test_a_fused_mlp_for_every_spelling() -> None:
    seen: list[tuple[int, ...]] = []

    @onepass.kernel(reference=mlp, example=(torch.empty(4, 8), torch.empty(8, 16), torch.empty(16, 8)), always=True)
    def fused(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        seen.append(up.stride())
        return mlp(x, up, down)

    weights = torch.randn(8, 32), torch.randn(32, 8)
    programs: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (mlp, (torch.randn(5, 8), *weights)),
        (in_einsum, (torch.randn(5, 8), *weights)),
        (Network().requires_grad_(False), (torch.randn(2, 5, 8),)),
    ]
    for program, args in programs:
        assert calls(explained(program, *args)) == ["fused"]
        agree(program, *args)
    assert {(32, 1), (1, 8)} <= set(seen)  # the module's weights are transposed


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
    assert not any(calls(g) for g in graphs) and "inference only" in reasons(graphs[0])[0][1]
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
