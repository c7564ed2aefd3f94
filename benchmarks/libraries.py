"""Contractions as libraries offer them: attention by SDPA and flex_attention, the bare matmuls by cuBLAS.

Each maker takes a workload's arguments and gives the function that is timed; block masks, concatenated and dequantised
weights are made before. What stands around an attention is compiled by Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .workloads import Arguments

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Maker = Callable[[Arguments], Callable[..., Any]]
Program = Callable[..., Tensor]  # of an attention and the workload's arguments
BACKENDS = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}


def inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


def sdpa(causal: bool, program: Program | None = None) -> dict[str, Maker]:
    """Attention by cuDNN and by FlashAttention, in the midst of a program if one is given."""

    def maker(backend: SDPBackend) -> Maker:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        if program is None:
            return lambda arguments: attend
        library = torch.compiler.disable(attend)  # Inductor compiles what is before and what is after it
        return lambda arguments: inductor(lambda *given: program(library, *given))

    return {system: maker(backend) for system, backend in BACKENDS.items()}


def sdpa_decode() -> dict[str, Maker]:
    """The query heads that share a key head as rows of one query: the same sums, and no key is read twice."""

    def maker(attend: Callable[..., Tensor]) -> Maker:
        def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            batch, _, _, width = q.shape
            return attend(q.reshape(batch, k.shape[1], -1, width), k, v).reshape(q.shape)

        return lambda arguments: decode

    return {system: maker(make(())) for system, make in sdpa(causal=False).items()}


def flex(
    mask: Callable[..., Tensor] | None = None,
    score: Callable[[Arguments], Callable[..., Tensor]] | None = None,
    program: Program | None = None,
    batch: int | None = None,
    **options: Any,
) -> dict[str, Maker]:
    """Attention by compiled flex_attention, with a block mask and a change of the scores if given.

    `batch`: how many there are, where the mask differs between them.
    """

    def make(arguments: Arguments) -> Callable[..., Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        given, rows = dict(options), arguments[0].shape[-2]
        if mask is not None:
            given["block_mask"] = create_block_mask(mask, batch, None, rows, rows, device=arguments[0].device)
        if score is not None:
            given["score_mod"] = score(arguments)
        if program is None:
            compiled = inductor(flex_attention)
            return lambda q, k, v, *rest: compiled(q, k, v, **given)
        around = program
        return inductor(lambda *a: around(lambda q, k, v: flex_attention(q, k, v, **given), *a))

    return {"flex": make}


def epilogue() -> dict[str, Maker]:
    """A linear layer and GELU as one call of cuBLASLt; torch has no public name for it."""
    call = getattr(torch, "_addmm_activation", None)
    make: Maker = lambda arguments: lambda x, weight, bias: call(bias, x, weight.t(), use_gelu=True)  # noqa: E731
    return {"cublaslt": make} if call is not None else {}


def bare(make: Maker) -> dict[str, Maker]:
    """The matmuls alone: not the same work."""
    return {"cublas": make}
