"""Scans, many tensors in one launch, attention and losses in training, plugged-in kernels: each kind on a real GPU.

Values are compared with eager's and with float64: at most twice eager's error, and a little more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LITTLE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-6, torch.float64: 1e-12}


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype).requires_grad_(grad)


def check(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> None:
    """Results and gradients of the compiled function."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    run = torch.compile(function, backend="onepass", options={"strict": True, **options})
    rows = zip(values(run, inputs), values(function, inputs), values(function, wide), strict=True)
    for number, (ours, eager, exact) in enumerate(rows):
        assert ours.dtype is eager.dtype and ours.stride() == eager.stride(), number
        if not ours.is_floating_point():
            assert torch.equal(ours, eager), number
            continue
        error, allowed = ((x.double() - exact).abs().nan_to_num(0).max().item() for x in (ours, eager))
        assert torch.equal(ours.isnan(), eager.isnan()), number
        limit = 2 * allowed + LITTLE[ours.dtype] * exact.abs().nan_to_num(0).max().item()
        assert error <= limit, f"value {number}: {error} where eager is off by {allowed}"


def values(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    result = function(*inputs)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    wanted, differentiable = [x for x in inputs if x.requires_grad], [o for o in outputs if o.requires_grad]
    if not wanted:
        return outputs
    torch.manual_seed(1)
    tangents = [torch.randn(o.shape, device="cuda").to(o.dtype) for o in differentiable]
    return [o.detach() for o in outputs] + list(torch.autograd.grad(differentiable, wanted, tangents))


SCANS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "gate": lambda x, g: (torch.sigmoid(g) * x).cumsum(-1) * F.silu(g),
    "along rows": lambda x, g: (torch.sigmoid(g) * x).cumsum(0) * F.silu(g),
    "from the end": lambda x, g: (x * g).flip(-1).cumsum(-1).flip(-1),
    "product": lambda x, g: (1 + 0.01 * x).cumprod(-1) + g,
    "extremes": lambda x, g: (*x.cummax(-1), *g.cummin(0)),
    "sums of exponentials": lambda x, g: torch.logcumsumexp(x, -1) + g,
    "after a reduction": lambda x, g: (x.softmax(-1) * g).cumsum(-1),
}


@pytest.mark.parametrize("shape", [(33, 129), (4, 70_001), (1, 1), (257, 4096)])
@pytest.mark.parametrize("name", SCANS)
def test_scans(name: str, shape: tuple[int, int]) -> None:
    grad = name in ("gate", "along rows", "from the end", "after a reduction")
    check(SCANS[name], randn(*shape, grad=grad), randn(*shape, grad=grad))


def test_a_scan_of_bfloat16() -> None:
    check(SCANS["gate"], *(randn(64, 5003, dtype=torch.bfloat16, grad=True) for _ in range(2)))


# --- many tensors in one launch ---


@pytest.mark.parametrize("count", [3, 40])
def test_updates_of_unequal_tensors_share_a_launch(count: int) -> None:
    sizes = [37 * k * k + 1 for k in range(count)]
    tensors = [randn(n) for n in sizes + sizes]

    def update(*given: Tensor) -> list[Tensor]:
        return [p - 0.1 * g for p, g in zip(given[:count], given[count:], strict=True)]

    check(update, *tensors)
    assert len(onepass.explain(update, *tensors).kernels) == 1
    run = torch.compile(update, backend="onepass")
    for _ in range(3):  # other addresses each time
        tensors = [x.clone() for x in tensors]
        for ours, expected in zip(run(*tensors), update(*tensors), strict=True):
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("fused", [{"foreach": True}, {"fused": True}, {}])
def test_steps_of_adamw(fused: dict[str, bool]) -> None:
    def trained(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        parameters = [randn(n, 17 + n % 5).requires_grad_() for n in range(1, 40)]
        optimiser = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **fused)

        def step() -> None:
            optimiser.step()

        run = torch.compile(step, backend="onepass") if compiled else step
        for number in range(20):
            for p in parameters:
                p.grad = torch.cos(p.detach() * (number + 1))
            run()
        return parameters

    for ours, eager in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_gradients_clipped_by_their_norm() -> None:
    def clip(*gradients: Tensor) -> list[Tensor]:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        return [g * torch.clamp(1.0 / (norm + 1e-6), max=1.0) for g in gradients]

    check(clip, *(randn(1000 * k + 3) for k in range(1, 25)))


# --- training ---


def _attention(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    scores = change((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5)
    return torch.softmax(scores.float(), -1).to(q.dtype) @ v


def _causal(s: Tensor) -> Tensor:
    i, j = torch.arange(s.shape[-2], device=s.device), torch.arange(s.shape[-1], device=s.device)
    return s.masked_fill(i[:, None] < j, float("-inf"))


ATTENTION: dict[str, Callable[..., Tensor]] = {
    "full": lambda q, k, v, b: _attention(q, k, v, lambda s: s),
    "causal": lambda q, k, v, b: _attention(q, k, v, _causal),
    "soft-cap": lambda q, k, v, b: _attention(q, k, v, lambda s: _causal(20 * torch.tanh(s / 20))),
    "bias": lambda q, k, v, b: _attention(q, k, v, lambda s: s + b),
    "library": lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "library, bias": lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b),
}


@pytest.mark.parametrize("shape", [(1, 2, 130, 64), (2, 3, 512, 128), (1, 1, 67, 40)])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_training(name: str, shape: tuple[int, ...]) -> None:
    q, k, v = (randn(*shape, dtype=torch.bfloat16, grad=True) for _ in range(3))
    bias = randn(shape[1], shape[2], shape[2], dtype=torch.bfloat16, grad="bias" in name)
    check(ATTENTION[name], q, k, v, bias)


def test_heads_in_groups() -> None:
    q = randn(2, 8, 256, 64, dtype=torch.bfloat16, grad=True)
    k, v = (randn(2, 2, 256, 64, dtype=torch.bfloat16, grad=True) for _ in range(2))

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(4, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    check(repeated, q, k, v)


@pytest.mark.parametrize("chunks", ["few rows", "many rows"])
def test_a_loss_without_logits(chunks: str) -> None:
    rows = 64 if chunks == "few rows" else 4096
    x, w = randn(rows, 256, dtype=torch.bfloat16, grad=True), randn(16_000, 256, dtype=torch.bfloat16, grad=True)
    labels = torch.arange(rows, device="cuda") * 3 % 16_000
    check(lambda x, w: F.cross_entropy((x @ (w * 0.06).T).float(), labels), x, w)


# --- what users plug in ---


def test_a_kernel_of_the_users() -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    try:
        onepass.kernel(reference=norm, example=(torch.empty(4, 8), torch.empty(8)), always=True)(
            lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6)
        )
        x, w = randn(64, 512), randn(512)
        function = lambda x, w: norm(x.sin(), w) + 1  # noqa: E731
        check(function, x, w)
        assert len(onepass.explain(function, x, w).externs) == 1
    finally:
        onepass.plugging.unplug()


def test_a_profile_measures_kernels_on_the_device() -> None:
    found = onepass.profile(lambda x: F.gelu(x * 2).softmax(-1), randn(8192, 4096))
    times = [step.time_us for step in found.steps if step.kind == "kernel" and step.runs]
    assert times and all(20 < t < 2000 for t in times), times
