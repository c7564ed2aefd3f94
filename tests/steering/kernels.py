"""Kernels of a user's: an RMS norm in Triton, a softmax in C, an MLP; each with its references and a backward."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.toolchain import find_toolchain

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

EPSILON = 1e-6


# --- an RMS norm ---


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w  # a global number is an input where sizes are


def other_norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + 1e-6))


def torch_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPSILON)


NORMS = (norm, other_norm, torch_norm)
NORM_EXAMPLE = torch.empty(4, 8), torch.empty(8)


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


def norm_rows_backward(x, w, dy, dx, columns, epsilon, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    squares, products = 0.0, 0.0
    for j in range(columns):
        each = tl.load(x + row * columns + j).to(tl.float32)
        step = tl.load(dy + row * columns + j).to(tl.float32) * tl.load(w + j).to(tl.float32)
        squares += each * each
        products += each * step
    scale = 1 / tl.sqrt(squares / columns + epsilon)
    value = tl.load(x + row * columns + at, inside, other=0.0).to(tl.float32)
    step = tl.load(dy + row * columns + at, inside, other=0.0).to(tl.float32)
    step *= tl.load(w + at, inside, other=0.0).to(tl.float32)
    change = scale * (step - value * scale * scale * products / columns)
    tl.store(dx + row * columns + at, change.to(dx.dtype.element_ty), inside)


def norm_launchers() -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """What launches both kernels; the environment says whether they are compiled or interpreted."""
    forward, backward = triton.jit(norm_rows), triton.jit(norm_rows_backward)

    def launch(x: Tensor, w: Tensor) -> Tensor:
        x, columns = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        block = triton.next_power_of_2(columns)
        forward[(x.numel() // columns,)](x, w.contiguous(), out, columns, EPSILON, BLOCK=block)
        return out

    def launch_backward(x: Tensor, w: Tensor, y: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, dy, columns = x.contiguous(), dy.contiguous(), x.shape[-1]
        dx = torch.empty_like(x)
        block = triton.next_power_of_2(columns)
        backward[(x.numel() // columns,)](x, w.contiguous(), dy, dx, columns, EPSILON, BLOCK=block)
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPSILON)
        return dx, (dy.float() * normed).reshape(-1, columns).sum(0).to(w.dtype)

    return launch, launch_backward


# --- a softmax ---

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
void softmax_backward(const float *y, const float *dy, float *out, long rows, long columns) {
  for (long i = 0; i < rows; ++i, y += columns, dy += columns, out += columns) {
    float sum = 0;
    for (long j = 0; j < columns; ++j) sum += y[j] * dy[j];
    for (long j = 0; j < columns; ++j) out[j] = y[j] * (dy[j] - sum);
  }
}
"""


def c_launchers(folder: Path) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]:
    (folder / "softmax.c").write_text(SOURCE)
    command = [*find_toolchain().command, "-O2", "-shared", "-fPIC", "softmax.c", "-o", "softmax.so", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "softmax.so"))

    def launched(function: Callable[..., object], *given: Tensor) -> Tensor:
        given = tuple(t.contiguous() for t in given)
        out = torch.empty_like(given[0])
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (*given, out))
        columns = out.shape[-1]
        function(*pointers, ctypes.c_long(out.numel() // columns), ctypes.c_long(columns))
        return out

    def rows(x: Tensor) -> Tensor:
        return launched(library.softmax, x)

    return rows, lambda x, y, dy: launched(library.softmax_backward, y, dy)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def by_reciprocal(x: Tensor) -> Tensor:
    e = (x - x.max(-1, keepdim=True).values).exp()
    return torch.reciprocal(e.sum(-1, keepdim=True)) * e


SOFTMAXES = (softmax, by_hand, by_reciprocal)


# --- a gated MLP ---


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def mlp_backward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, y: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    rows, steps = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
    h, u = rows @ gate, rows @ up
    s = torch.sigmoid(h)
    inner = steps @ down.mT
    dh, du = inner * u * (s * (1 + h * (1 - s))), inner * h * s
    return (dh @ gate.mT + du @ up.mT).view_as(x), rows.mT @ dh, rows.mT @ du, (h * s * u).mT @ steps


def by_einsum(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = torch.mm(x, gate)
    return torch.einsum("sn,nd->sd", torch.mm(x, up) * h / (1 + torch.exp(-h)), down)


def by_linear(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.linear(x, up.t()) * F.silu(F.linear(x, gate.t())), down.t())


MLPS = (mlp, by_einsum, by_linear)
MLP_EXAMPLE = torch.empty(4, 8), torch.empty(8, 16), torch.empty(8, 16), torch.empty(16, 8)


# --- a model as transformers writes them ---


class Norm(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width) + 0.5)
        self.variance_epsilon = EPSILON

    def forward(self, hidden: Tensor) -> Tensor:
        given = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden.to(given)


class GatedMLP(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(inner, width, bias=False)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Attention(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.o_proj = torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5 + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        self.self_attn, self.mlp = Attention(width, 2), GatedMLP(width, 3 * width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Llama(torch.nn.Module):
    def __init__(self, layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = Norm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        n = hidden.shape[1]
        mask = torch.full((n, n), -1e9, device=hidden.device).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.norm(hidden)
