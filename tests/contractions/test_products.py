"""Matrix products with what stands around them: right values for any shape and strides, and who computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from tests.checking import DEVICE
from tests.contractions.judging import FREE, explained, interpreted, judge, make_library_slow, products_left

pytest.importorskip("triton")
Program = tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]


def matrices(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Callable[[], tuple[Tensor, ...]]:
    """Random matrices of these shapes."""
    return lambda: tuple(torch.randn(shape).to(dtype) for shape in shapes)


def integers(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def gated(p: Tensor) -> Tensor:
    """Two halves of the columns meet."""
    gate, value = p.chunk(2, -1)
    return F.silu(gate) * value


x, w, b, r = (37, 64), (48, 64), (48,), (37, 48)

# Point-wise work on the result: one kernel, without the library.
EPILOGUES: dict[str, Program] = {
    "bias": (lambda x, w, b: torch.relu(F.linear(x, w, b)), matrices(x, w, b)),
    "bias in bfloat16": (lambda x, w, b: F.gelu(F.linear(x, w, b)), matrices(x, w, b, dtype=torch.bfloat16)),
    "gelu": (lambda x, w: F.gelu(x @ w.t()), matrices(x, w)),
    "gelu by tanh": (lambda x, w: F.gelu(x @ w.t(), approximate="tanh"), matrices(x, w)),
    "silu": (lambda x, w: F.silu(x @ w.t()), matrices(x, w)),
    "residual": (lambda x, w, r: x @ w.t() + r, matrices(x, w, r)),
    "bias, activation, residual": (lambda x, w, b, r: r + F.silu(F.linear(x, w, b)), matrices(x, w, b, r)),
    "scale": (lambda x, w: (x @ w.t()) * 0.125 - 1.0, matrices(x, w)),
    "scale of rows": (lambda x, w, s: (x @ w.t()) * s, matrices(x, w, (37, 1))),
    "scale of columns": (lambda x, w, s: (x @ w.t()) * s, matrices(x, w, (48,))),
    "cast up": (lambda x, w: (x @ w.t()).float() * 2, matrices(x, w)),
    "cast down": (lambda x, w: (x @ w.t()).to(torch.bfloat16), matrices(x, w, dtype=torch.float32)),
    "alpha and beta": (lambda x, w, r: torch.relu(torch.addmm(r, x, w.t(), beta=0.5, alpha=2.0)), matrices(x, w, r)),
    "batched": (lambda a, b: torch.sigmoid(a @ b), matrices((3, 17, 33), (3, 33, 21))),
    "batched with one matrix": (lambda a, b: torch.tanh(a @ b), matrices((2, 3, 17, 33), (33, 21))),
    "by einsum": (lambda a, b: torch.relu(torch.einsum("bik,bjk->bij", a, b)), matrices((2, 17, 40), (2, 19, 40))),
    "gate and value": (lambda x, w, u: F.silu(x @ w.t()) * (x @ u.t()), matrices(x, w, w)),
    "gate and value with biases": (
        lambda x, w, u, b: F.gelu(F.linear(x, w, b)) * F.linear(x, u, b),
        matrices(x, w, w, b),
    ),
    "packed gate": (lambda x, w: gated(x @ w.t()), matrices(x, w)),
    "packed gate, inputs first": (lambda x, w: gated(x @ w), matrices((37, 33), (33, 46))),
    "packed gate in bfloat16, with bias": (
        lambda x, w, b: gated(F.linear(x, w, b)),
        matrices((3, 13, 33), (46, 33), (46,), dtype=torch.bfloat16),
    ),
    "packed gate in float32": (lambda x, w: gated(x @ w.t()), matrices(x, w, dtype=torch.float32)),
    "packed gate by hand": (
        lambda x, w: (lambda p: p[:, :24] * torch.sigmoid(p[:, :24]) * p[:, 24:] + 1)(x @ w.t()),
        matrices(x, w),
    ),
    "gated linear unit": (lambda x, w: F.glu(x @ w.t(), -1), matrices(x, w)),
    "parts of three": (lambda x, w: (lambda p: p[:, :16] * p[:, 16:32] + p[:, 32:])(x @ w.t()), matrices(x, w)),
    "clamped": (lambda x, w: (x @ w.t()).clamp(-1, 1), matrices(x, w)),
    "float32": (lambda x, w, b: torch.relu(F.linear(x, w, b)), matrices(x, w, b, dtype=torch.float32)),
    "stored transposed": (lambda x, w: torch.relu(x @ w.t()).t().contiguous(), matrices(x, w)),
    "heads stored apart": (
        lambda x, w: torch.relu(x @ w.t()).view(37, 4, 12).transpose(0, 1).contiguous(),
        matrices(x, w),
    ),
}

# Several results of the same rows and columns: one kernel, too.
RESULTS: dict[str, Program] = {
    "the product and gelu": (lambda x, w, b: (lambda p: (p, F.gelu(p)))(F.linear(x, w, b)), matrices(x, w, b)),
    "in bfloat16": (
        lambda x, w, b: (lambda p: (p, F.gelu(p)))(F.linear(x, w, b)),
        matrices(x, w, b, dtype=torch.bfloat16),
    ),
    "in float32": (
        lambda x, w, b: (lambda p: (p, F.gelu(p)))(F.linear(x, w, b)),
        matrices(x, w, b, dtype=torch.float32),
    ),
    "two of point-wise work": (lambda x, w, b: (lambda p: (p * 2, F.gelu(p)))(F.linear(x, w, b)), matrices(x, w, b)),
    "three": (lambda x, w: (lambda p: (p, torch.relu(p), p * 3))(x @ w.t()), matrices(x, w)),
    "one after another": (lambda x, w: (lambda p: (p, torch.exp(p), torch.exp(p) + p))(x @ w.t() / 8), matrices(x, w)),
    "read twice on the way": (lambda x, w: (lambda p: p * torch.sigmoid(p))(x @ w.t()), matrices(x, w)),
    "rows in two dimensions": (
        lambda x, w, b: (lambda p: (p, F.gelu(p)))(F.linear(x, w, b)),
        matrices((3, 13, 33), (21, 33), (21,)),
    ),
    "batched products": (lambda a, b: (lambda p: (p, torch.tanh(p)))(a @ b), matrices((3, 17, 33), (3, 33, 21))),
    "wider": (lambda x, w: (lambda p: (p, p.float() * 2))(x @ w.t()), matrices(x, w)),
    "narrower": (
        lambda x, w: (lambda p: (p, torch.relu(p).to(torch.bfloat16)))(x @ w.t()),
        matrices(x, w, dtype=torch.float32),
    ),
    "of another kind": (lambda x, w: (lambda p: (p, p > 0, (p * 4).to(torch.int8)))(x @ w.t() / 8), matrices(x, w)),
    "transposed": (lambda x, w: (lambda p: (p, torch.relu(p).t().contiguous()))(x @ w.t()), matrices(x, w)),
    "a gate and the value": (lambda x, w, u: (lambda a: (a, F.silu(x @ u.t()) * a))(x @ w.t()), matrices(x, w, w)),
    "a gate, the value and both together": (
        lambda x, w, u: (lambda a, b: (a, b, F.silu(b) * a))(x @ w.t(), x @ u.t()),
        matrices(x, w, w),
    ),
    "one row": (lambda x, w: (lambda p: (p, torch.relu(p)))(x @ w.t()), matrices((1, 64), w)),
}

# One column by one row: there is nothing to sum, so this is point-wise work on every target.
OUTER: dict[str, Program] = {
    "angles": (
        lambda f, p: torch.cos((f[None, :, None].float() @ p[:, None, :].float()).mT),
        lambda: (torch.rand(32), torch.arange(40)[None].repeat(3, 1)),
    ),
    "float64": (lambda a, b: a @ b + 1, lambda: (torch.randn(7, 1).double(), torch.randn(1, 5).double())),
    "float16, transposed": (
        lambda a, b: torch.relu(a.t() @ b),
        lambda: (torch.randn(1, 9).half(), torch.randn(1, 5).half()),
    ),
    "empty": (lambda a, b: a @ b, lambda: (torch.randn(0, 1), torch.randn(1, 5))),
}

# Right values are all that is asked.
OTHERS: dict[str, Program] = {
    "dequantised weight": (
        lambda x, w, s: x @ (w.to(x.dtype) * s).t(),
        lambda: (torch.randn(37, 64).half(), integers(48, 64), torch.rand(48, 1).half()),
    ),
    "dequantised weight, bias, activation": (
        lambda x, w, s, b: F.silu(F.linear(x, w.to(x.dtype) * s, b)),
        lambda: (torch.randn(37, 64).half(), integers(48, 64), torch.rand(48, 1).half(), torch.randn(48).half()),
    ),
    "activation in front": (lambda x, w: torch.relu(x) @ w.t() + 1, matrices(x, w)),
    "activation in front and behind": (lambda x, w: F.gelu(F.gelu(x) @ w.t()), matrices(x, w)),
    "norm in front": (lambda x, w: torch.relu(F.rms_norm(x, (64,)) @ w.t()), matrices(x, w)),
    "norm behind": (lambda x, w: F.layer_norm(x @ w.t(), (48,)), matrices(x, w)),
    "softmax behind": (lambda x, w: (x @ w.t()).softmax(-1), matrices(x, w)),
    "sum behind": (lambda x, w: (x @ w.t()).sum(-1), matrices(x, w)),
    "product read twice": (lambda x, w: (torch.relu(x @ w.t()), x @ w.t() + 1), matrices(x, w)),
    "product also returned": (lambda x, w: (lambda p: (p, torch.relu(p)))(x @ w.t()), matrices(x, w)),
    "two layers": (lambda x, w, u: F.relu(F.relu(x @ w.t()) @ u.t()), matrices(x, w, (30, 48))),
    "results with a layer between them": (
        lambda x, w, u: (lambda p: (p, F.relu(p) @ u.t() + p))(x @ w.t()),
        matrices(x, w, (48, 48)),
    ),
    "results with a sum between them": (
        lambda x, w: (lambda p: (p, torch.relu(p), p * torch.relu(p).sum()))(x @ w.t()),
        matrices(x, w),
    ),
    "results with a library call between them": (
        lambda x, w: (lambda p: (p, torch.relu(p) + torch.sort(p)[0]))(x @ w.t()),
        matrices(x, w),
    ),
    "packed gate whose parts are wanted": (
        lambda x, w: (lambda p: (gated(p), p[:, :24] + 1))(x @ w.t()),
        matrices(x, w),
    ),
    "packed gate of one row": (lambda x, w: gated(x @ w.t()), matrices((1, 64), w)),
    "packed gate of rows": (lambda x, w: (lambda p: torch.relu(p[:18]) * p[18:36])(x @ w.t()), matrices(x, w)),
    "every other column": (lambda x, w: (lambda p: torch.relu(p[:, ::2]) * p[:, 1::2])(x @ w.t()), matrices(x, w)),
    "parts that overlap": (lambda x, w: (lambda p: torch.relu(p[:, :40]) * p[:, 8:])(x @ w.t()), matrices(x, w)),
    "three packed results": (lambda x, w: [torch.relu(part) + 1 for part in (x @ w.t()).chunk(3, -1)], matrices(x, w)),
    "a part with a border": (lambda x, w: F.pad((x @ w.t())[:, :20], (2, 1), value=1.5) * 2, matrices(x, w)),
    "columns moved on": (lambda x, w: (lambda p: (p, p + F.pad(p[:, :-1], (1, 0))))(x @ w.t()), matrices(x, w)),
    "columns turned round": (lambda x, w: (lambda p: (p, p * p.flip(1)))(x @ w.t()), matrices(x, w)),
    "parts of the product": (lambda x, w: (lambda p: (p, p[1:] * 2, p[:, :5] + 1))(x @ w.t()), matrices(x, w)),
    "more results than one kernel has": (
        lambda x, w: (lambda p: [p, *(torch.relu(p) * k for k in range(6))])(x @ w.t()),
        matrices(x, w),
    ),
    "three layers": (lambda x, w, u: F.relu(F.relu(F.relu(x @ w.t()) @ u.t()) @ w.t()), matrices(x, w, (64, 48))),
    "product with itself": (lambda a: torch.relu(a @ a.t()), matrices((37, 50))),
    "product of products": (lambda a: a @ a.t() @ a, matrices((37, 50))),
    "three inputs shared": (lambda x, w, u, v: (x @ w.t(), x @ u.t(), x @ v.t()), matrices(x, w, w, w)),
    "low rank beside": (
        lambda x, w, d, u: torch.relu(x @ w.t() + (x @ d.t()) @ u.t()),
        matrices(x, w, (4, 64), (48, 4)),
    ),
    "sum over two axes by einsum": (
        lambda a, b: torch.relu(torch.einsum("bhqd,hde->bqe", a, b)),
        matrices((2, 3, 17, 16), (3, 16, 20)),
    ),
    "outer product": (lambda a, b: torch.relu(torch.einsum("i,j->ij", a, b)), matrices((37,), (21,))),
    "matrix and vector": (lambda a, b: torch.relu(a @ b), matrices((37, 50), (50,))),
    "other types": (
        lambda a, b: torch.relu(a @ b),
        lambda: (torch.randn(17, 20).double(), torch.randn(20, 9).double()),
    ),
    "integers": (lambda a, b: (a @ b) + 1, lambda: (torch.randint(-9, 9, (17, 20)), torch.randint(-9, 9, (20, 9)))),
}


@pytest.mark.parametrize("name", [*EPILOGUES, *RESULTS])
def test_one_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_library_slow(monkeypatch)
    function, arguments = (EPILOGUES | RESULTS)[name]
    e = explained(function, *arguments())
    assert len(e.kernels) == 1 and not products_left(e), [d.reason for d in e.rejected]


@pytest.mark.parametrize("name", [*EPILOGUES, *RESULTS, *OUTER, *OTHERS])
def test_values(name: str) -> None:
    if DEVICE == "cuda" and name == "integers":
        pytest.skip("torch has no product of integers there")
    function, arguments = (EPILOGUES | RESULTS | OUTER | OTHERS)[name]
    judge(interpreted(function), function, *arguments())


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("name", OUTER)
def test_an_outer_product_is_point_wise(name: str, target: str) -> None:
    function, arguments = OUTER[name]
    e = explained(function, *arguments(), target=target)
    assert not e.externs and len(e.kernels) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_are_made_of_what_is_stored(dtype: torch.dtype) -> None:
    """As in eager: the second one sees the first one's rounding."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        p = x @ w.t()
        return p, p.float() * 3

    stored, tripled = interpreted(function)(*matrices((37, 96), (48, 96), dtype=dtype)())
    assert torch.equal(tripled, stored.float() * 3)


# --- shapes and strides ---


def activated(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a @ b) + 1


@pytest.mark.parametrize("m", [0, 1, 7, 131])
@pytest.mark.parametrize("n", [0, 1, 67])
@pytest.mark.parametrize("k", [0, 1, 2, 97])
def test_odd_shapes(m: int, n: int, k: int) -> None:
    judge(interpreted(activated), activated, torch.randn(m, k).half(), torch.randn(k, n).half())


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_odd_batches(batch: int) -> None:
    judge(interpreted(activated), activated, torch.randn(batch, 7, 19).half(), torch.randn(batch, 19, 23).half())


STRIDES: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(40, 33).half().t(),
    "every other row": lambda: torch.randn(66, 40).half()[::2],
    "every other column": lambda: torch.randn(33, 80).half()[:, ::2],
    "part of a larger one": lambda: torch.randn(50, 60).half()[3:36, 7:47],
    "one row expanded": lambda: torch.randn(1, 40).half().expand(33, 40),
    "one column expanded": lambda: torch.randn(33, 1).half().expand(33, 40),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", STRIDES)
def test_any_strides(name: str, side: str) -> None:
    a = STRIDES[name]()
    other = torch.randn(40, 21).half()
    function = activated if side == "left" else lambda a, b: torch.relu(b.t() @ a.t()) + 1
    judge(interpreted(function), function, a, other)


def test_dynamic_sizes() -> None:
    run = interpreted(activated, dynamic=True)
    for m, k, n in ((37, 64, 48), (50, 33, 70)):
        judge(run, activated, torch.randn(m, k).half(), torch.randn(k, n).half())


def test_long_sums() -> None:
    """A sum of two thousand products is kept in float32."""
    judge(interpreted(activated), activated, torch.randn(17, 2000).half(), torch.randn(2000, 19).half())


def test_dropout_behind() -> None:
    run = interpreted(lambda a, b: F.dropout(a @ b, 0.25))
    a, b = torch.randn(60, 32), torch.randn(32, 40)
    out = run(a, b)
    alive = out != 0
    assert 0.2 < 1 - alive.float().mean().item() < 0.3
    assert torch.allclose(out, torch.where(alive, (a @ b) / 0.75, 0), rtol=1e-5, atol=1e-5)


def test_gradients() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    arguments = [t.requires_grad_() for t in matrices((19, 33), (21, 33), (21,), dtype=torch.float32)()]
    ours, theirs = (f(*arguments) for f in (interpreted(function), function))
    gradients = [torch.autograd.grad(out.sum(), arguments) for out in (ours, theirs)]
    for mine, other in zip((ours, *gradients[0]), (theirs, *gradients[1]), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)


def saved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def test_a_training_forward_is_one_kernel() -> None:
    """What backward wants is stored beside the result."""
    arguments = [t.requires_grad_() for t in matrices((64, 64), (96, 64), (96,))()]
    e = onepass.explain(saved, *arguments, target="sm_90", options=FREE)
    forward = next(g for g in e.graphs if g.direction == "forward")
    assert len(forward.kernels) == 1 and not forward.externs


# --- who computes them ---


@pytest.mark.parametrize("columns", [8192, 64])
def test_the_answer_on_several_results_has_its_numbers(columns: int) -> None:
    """Two results of a short sum gain a read of the product; nothing is gained in float32 without its matrix unit."""
    with FakeTensorMode():
        for dtype, fused in ((torch.bfloat16, True), (torch.float32, False)):
            x, w = (torch.empty(n, 512, dtype=dtype) for n in (16384, columns))
            e = explained(lambda x, w: (lambda p: (p, F.gelu(p)))(x @ w.t()), x, w)
            (answer,) = (d for d in e.decisions if d.kind == "product")
            assert answer.accepted is fused and "us in one kernel" in answer.reason
            assert (not products_left(e)) is fused
            torch._dynamo.reset()


def test_what_a_reader_does_in_passing_is_no_gain() -> None:
    """Softmax makes gelu of the product, which is stored in any case."""
    with FakeTensorMode():
        x, w = (torch.empty(n, 512, dtype=torch.bfloat16) for n in (16384, 4096))
        e = explained(lambda x, w: (lambda p: (p, F.gelu(p).softmax(-1)))(x @ w.t()), x, w)
    answers = [d for d in e.decisions if d.kind == "product"]
    assert answers and not any(d.accepted for d in answers)
    assert len(e.kernels) == len(products_left(e)) == 1


@pytest.mark.parametrize(
    "function", [torch.mm, lambda a, b: (a @ b).view(-1), lambda a, b: a.view(1, 37, 64) @ b], ids=["mm", "view", "bmm"]
)
def test_a_bare_product_stays_with_the_library(function: Callable[..., Tensor]) -> None:
    e = explained(function, torch.randn(37, 64).half(), torch.randn(64, 48).half())
    assert not e.kernels and len(products_left(e)) == 1


@pytest.mark.parametrize("name", ["bias", "gelu", "gate and value"])
def test_on_a_cpu_products_stay_with_the_library(name: str) -> None:
    function, arguments = EPILOGUES[name]
    with torch.no_grad():
        e = onepass.explain(function, *arguments(), target="cpu", options=FREE)
    assert products_left(e)
    judge(torch.compile(function, backend="onepass", options=FREE), function, *arguments())
