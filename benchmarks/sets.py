"""The workloads of each set and device. On the CPU memory-bound ones have 64 MiB or more, but for lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from . import functions as f
from .contractions import CONTRACTIONS
from .masks import MASKS
from .models import cases
from .systems import LIBRARIES, SYSTEMS
from .training import TRAINING
from .workloads import Arguments, Workload

BF16, F32 = torch.bfloat16, torch.float32


def _normal(shape: tuple[int, ...], dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, dtype=F32).to(dtype)


def _rows(scale: float, columns: int = 4096, dtype: torch.dtype = F32) -> tuple[int, int]:
    full = (64 << 20) // (columns * dtype.itemsize)
    return max(16, int(full * scale)), columns


def _full(count: int, dtype: torch.dtype = F32, vectors: int = 0) -> Callable[[float], Arguments]:
    """`count` matrices of 64 MiB, then `vectors` rows."""

    def build(scale: float) -> Arguments:
        shape = _rows(scale, dtype=dtype)
        matrices = [_normal(shape, dtype) for _ in range(count)]
        return (*matrices, *(_normal((shape[1],), dtype) for _ in range(vectors)))

    return build


def _classes(scale: float) -> Arguments:
    rows, columns = _rows(scale, 32768)
    return _normal((rows, columns)), torch.randint(0, columns, (rows,))


def _images(scale: float) -> Arguments:
    batch = max(1, int(16 * scale))
    return _normal((batch, 64, 128, 128)), _normal((64,)), _normal((64,))


def _optimiser_state(scale: float) -> Arguments:
    rows, columns = _rows(scale)
    parameter, gradient, mean = (_normal((rows, columns)) for _ in range(3))
    return parameter, gradient, mean, _normal((rows, columns)).square()


def _many(sizes: Sequence[int], lists: int) -> Callable[[float], Arguments]:
    """Lists of tensors of these sizes; the last of four holds squares."""

    def build(scale: float) -> Arguments:
        found = [[_normal((max(1, int(n * scale)),)) for n in sizes] for _ in range(lists)]
        return tuple(x.square() if k == 3 else x for k, own in enumerate(found) for x in own)

    return build


def _each(operations: int, lists: int) -> Callable[[Arguments], float]:
    """Operations of every element of the first list."""
    return lambda arguments: operations * sum(x.numel() for x in arguments) / lists


UNEQUAL = [34_000 * k + 17 for k in range(1, 65)]  # together 71 million elements
SMALL = [37 * k * k % 20_000 + 1 for k in range(150)]


def _sized(
    rows: int, columns: int, count: int = 1, vectors: int = 0, dtype: torch.dtype = BF16
) -> Callable[[float], Arguments]:
    """`count` matrices of a given size, then `vectors` rows."""

    def build(scale: float) -> Arguments:
        shape = max(16, int(rows * scale)), columns
        matrices = [_normal(shape, dtype) for _ in range(count)]
        return (*matrices, *(_normal((columns,), dtype) for _ in range(vectors)))

    return build


def _vocabulary(scale: float) -> Arguments:
    rows, columns = max(16, int(8192 * scale)), 128256
    return _normal((rows, columns), BF16), torch.randint(0, columns, (rows,))


CPU: tuple[Workload, ...] = (
    Workload("chain of 4 point-wise ops", f.chain, _full(2), 4, jax="chain"),
    Workload("sigmoid(x) * tanh(x + 1)", f.sigmoid_tanh, _full(1), 4, jax="sigmoid_tanh"),
    Workload("bias + GELU", f.bias_gelu, _full(1, vectors=1), 6, jax="bias_gelu"),
    Workload(
        "bias + GELU + dropout", f.bias_gelu_dropout, _full(1, vectors=1), 8, random=True, jax="bias_gelu_dropout"
    ),
    Workload(
        "bias + dropout + residual + LayerNorm", f.bias_dropout_residual_layernorm, _full(2, vectors=3), 11,
        random=True, jax="bias_dropout_residual_layernorm",
    ),
    Workload("LayerNorm", f.layernorm, _full(1, vectors=2), 7, jax="layernorm"),
    Workload("RMSNorm + SiLU", f.rmsnorm_silu, _full(1, vectors=1), 6, jax="rmsnorm_silu"),
    Workload("softmax", f.softmax, _full(1), 5, jax="softmax"),
    Workload("log-softmax", f.log_softmax, _full(1), 5, jax="log_softmax"),
    Workload("cross-entropy", f.cross_entropy, _classes, 4, jax="cross_entropy"),
    Workload("group norm + SiLU", f.groupnorm_silu, _images, 9),
    Workload("full sum", f.full_sum, _full(1), 1, jax="full_sum"),
    Workload("column sum", f.column_sum, _full(1), 1, jax="column_sum"),
    Workload("abs max, abs mean, square mean", f.statistics, _full(1), 5, jax="statistics"),
    Workload("transpose + relu", f.transpose_relu, _full(1), 1, jax="transpose_relu"),
    Workload("cat of two branches", f.concatenate, _full(2), 2, jax="concatenate"),
    Workload("Adam update", f.adam_update, _optimiser_state, 15, jax="adam_update"),
    Workload("Adam update of 150 small tensors", f.many_adam_updates, _many(SMALL, 4), _each(15, 4)),
    Workload("LayerNorm, forward + backward", f.layernorm, _full(1, vectors=2), 20, train=True, jax="layernorm"),
    Workload("cross-entropy, forward + backward", f.cross_entropy, _classes, 7, train=True, jax="cross_entropy"),
    Workload("SwiGLU, forward + backward", f.swiglu, _full(2), 11, train=True, jax="swiglu"),
    Workload("gate * cumsum", f.gated_cumsum, _full(2), 8, jax="gated_cumsum"),
    Workload("bias + GELU, bfloat16", f.bias_gelu, _full(1, BF16, 1), 6, jax="bias_gelu"),
    Workload("LayerNorm, bfloat16", f.layernorm, _full(1, BF16, 2), 7, jax="layernorm"),
    Workload("softmax, bfloat16", f.softmax, _full(1, BF16), 5, jax="softmax"),
)  # fmt: skip

GPU: tuple[Workload, ...] = (
    Workload("64 unequal updates, fp32", f.many_updates, _many(UNEQUAL, 2), _each(2, 2)),
    Workload("Adam update of 150 small tensors, fp32", f.many_adam_updates, _many(SMALL, 4), _each(15, 4)),
    Workload("4-op chain, 4096^2, fp32", f.four_ops, _sized(4096, 4096, dtype=F32), 4, jax="four_ops"),
    Workload("sigmoid*tanh, 8192^2, fp32", f.sigmoid_tanh, _sized(8192, 8192, dtype=F32), 4, jax="sigmoid_tanh"),
    Workload(
        "bias + GELU, 16384x4096", f.bias_gelu, _sized(16384, 4096, vectors=1), 6, jax="bias_gelu", hand="bias_gelu"
    ),
    Workload(
        "bias + GELU + dropout", f.bias_gelu_dropout, _sized(16384, 4096, vectors=1), 8,
        random=True, jax="bias_gelu_dropout",
    ),
    Workload(
        "bias + dropout + residual + LayerNorm", f.bias_dropout_residual_layernorm, _sized(16384, 4096, 2, 3), 11,
        random=True, jax="bias_dropout_residual_layernorm",
    ),
    Workload(
        "LayerNorm 16384x4096", f.layernorm, _sized(16384, 4096, vectors=2), 7, jax="layernorm", hand="layernorm"
    ),
    Workload("RMSNorm + SiLU 16384x8192", f.rmsnorm_silu, _sized(16384, 8192, vectors=1), 6, jax="rmsnorm_silu"),
    Workload("softmax 16384x4096", f.softmax, _sized(16384, 4096), 5, jax="softmax", hand="softmax"),
    Workload("softmax 2048x131072", f.softmax, _sized(2048, 131072), 5, jax="softmax"),
    Workload("sum(relu(2x)) 16384x8192", f.relu_sum, _sized(16384, 8192), 3, jax="relu_sum"),
    Workload(
        "column sum of x*y, 32768x4096", f.column_sum_of_product, _sized(32768, 4096, 2), 2,
        jax="column_sum_of_product", hand="column_sum_of_product",
    ),
    Workload(
        "LayerNorm forward + backward", f.layernorm, _sized(16384, 4096, vectors=2), 20, train=True, jax="layernorm"
    ),
    Workload("RMSNorm forward + backward", f.rmsnorm, _sized(16384, 4096, vectors=1), 14, train=True, jax="rmsnorm"),
    Workload(
        "SwiGLU forward + backward, 16384x14336", f.swiglu, _sized(16384, 14336, 2), 11, train=True, jax="swiglu"
    ),
    Workload(
        "cross-entropy 8192x128256", f.cross_entropy, _vocabulary, 4, jax="cross_entropy", hand="cross_entropy"
    ),
    Workload("cross-entropy forward + backward", f.cross_entropy, _vocabulary, 7, train=True, jax="cross_entropy"),
    Workload("relu(a+b), sigmoid(a*c) 8192^2", f.two_outputs, _sized(8192, 8192, 3), 4, jax="two_outputs"),
    Workload(
        "gate * cumsum, 4096x8192, fp32", f.gated_cumsum, _sized(4096, 8192, 2, dtype=F32), 8,
        jax="gated_cumsum", hand="gated_cumsum",
    ),
)  # fmt: skip


class Named(Protocol):
    """A workload, or a row of the models."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Set:
    """Workloads per device; the systems measured unless others are asked for, and those that can be asked for.

    `processes`: host time per call and compile times of fresh processes are measured too.
    """

    workloads: Mapping[str, tuple[Named, ...]]
    systems: tuple[str, ...]
    available: tuple[str, ...]
    rounds: dict[str, int]
    processes: bool


MEMORY, MODELS = "memory", "models"
SETS = {
    MEMORY: Set({"cpu": CPU, "cuda": GPU}, SYSTEMS, SYSTEMS, {"cpu": 9, "cuda": 30}, processes=True),
    # on the CPU only in quick runs; autotuning takes minutes
    **{
        name: Set(
            {"cpu": workloads, "cuda": workloads}, ("eager", "inductor", *LIBRARIES, "onepass"),
            ("eager", "inductor", "inductor-max", *LIBRARIES, "onepass"), {"cpu": 3, "cuda": 12}, processes=False,
        )
        for name, workloads in (("contractions", CONTRACTIONS), ("training", TRAINING), ("masks", MASKS))
    },
    MODELS: Set(cases.ROWS, cases.SYSTEMS, cases.SYSTEMS, {"cpu": 100, "cuda": 15}, processes=True),
}  # fmt: skip


def select(device: str, only: str, name: str = MEMORY, quick: bool = False) -> list[Any]:
    """Workloads whose name contains one of the semicolon-separated words; all if there are none."""
    there = cases.TINY_ROWS if quick and name == MODELS else SETS[name].workloads[device]
    words = [word.strip().lower() for word in only.split(";") if word.strip()]
    chosen = [w for w in there if not words or any(word in w.name.lower() for word in words)]
    if not chosen:
        raise SystemExit(f"no workload matches {only!r}; there are: {'; '.join(w.name for w in there)}")
    return chosen
