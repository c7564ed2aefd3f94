"""What a random program may do: templates over the values there are.

Kinds: "exact" (rounds correctly or moves data), "smooth" (may differ in the last place), "kink"
(continuous, its derivative jumps), "jump" (discontinuous).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .generate import State


@dataclass(frozen=True)
class Proposal:
    """A statement to try. `written`: what an in-place one changes."""

    text: str
    kind: str
    in_place: bool = False
    written: str = ""


SMOOTH = (
    "torch.tanh({a})",
    "torch.sigmoid({a})",
    "torch.sin({a})",
    "torch.cos({a})",
    "torch.exp(torch.sin({a}))",
    "torch.erf({a})",
    "F.gelu({a})",
    "F.gelu({a}, approximate='tanh')",
    "F.silu({a})",
    "F.softplus({a})",
    "torch.log1p({a}.square())",
    "torch.rsqrt({a}.square() + 1)",
    "torch.atan({a})",
    "torch.expm1(torch.tanh({a}))",
    "torch.sqrt({a}.square() + 1)",
    "torch.asinh({a})",
    "torch.sinh(torch.tanh({a}))",
    "torch.log({a}.square() + 0.5)",
    "torch.reciprocal({a}.square() + 1)",
    "F.logsigmoid({a})",
    "F.mish({a})",
    "torch.exp2(torch.cos({a}))",
    "torch.log2({a}.square() + 1)",
    "({a}.square() + 1).pow(0.3)",
    "torch.acosh({a}.square() + 2)",
    "torch.tan({a} * 0.25)",
    "torch.erfc({a})",
    "{a} / 3",
    "F.tanhshrink({a})",
    "F.softsign({a} * 1.5)",
    "torch.special.expit({a})",
    "torch.lgamma({a}.square() + 1)",
    "torch.digamma({a}.square() + 1)",
    "2 ** ({a} * 0.5)",
    "torch.sinc({a})",
    "F.glu({a}, {e})",
    "torch.special.log_ndtr({a})",
    "torch.nan_to_num({a} / 3)",
)
EXACT_UNARY = (
    "{a} * 0.5",
    "{a} + 1",
    "1 - {a}",
    "-{a}",
    "{a} * {a}",
    "{a} + {a}",
    "{a}.clone()",
    "torch.positive({a})",
    "{a} ** 2",
    "torch.nan_to_num({a})",
    "{a} / 2",
    "torch.square({a})",
    "torch.rsub({a}, 1, alpha=2)",
)
KINKS = (
    "{a}.abs()",
    "F.relu({a})",
    "{a}.clamp(-0.5, 0.75)",
    "F.leaky_relu({a}, 0.25)",
    "F.hardtanh({a})",
    "F.relu6({a})",
    "{a}.clamp(min=0.25)",
    "F.hardswish({a})",
    "F.hardsigmoid({a})",
    "F.elu({a})",
    "F.softshrink({a})",
    "F.celu({a})",
    "F.selu({a})",
    "F.threshold({a}, 0.5, 0.25)",
    "F.prelu({a}, torch.full((1,), 0.25, dtype={a}.dtype))",
    "torch.xlogy({a}.abs(), {a}.square() + 1)",
)
JUMPS = (
    "torch.sign({a})",
    "torch.floor({a})",
    "torch.ceil({a})",
    "torch.round({a})",
    "torch.trunc({a})",
    "{a} > 0",
    "{a} <= 0.5",
    "{a} == 0",
    "{a}.to(i64)",
    "{a}.to(i32)",
    "{a} != 1",
    "torch.isnan({a})",
    "{a}.to(b8)",
    "{a} // 0.75",
    "{a} % 0.75",
    "torch.frac({a})",
    "torch.signbit({a})",
    "torch.logical_not({a})",
    "torch.fmod({a}, 0.75)",
    "torch.remainder({a}, -0.75)",
    "torch.heaviside({a}, {a} * 0.5)",
    "{a}.to(u8)",
    "{a}.to(i8)",
    "torch.bucketize({a}, torch.tensor([-1.0, 0.0, 1.0], dtype={a}.dtype))",
    "torch.isclose({a}, {a} * 2)",
)
BINARY_SMOOTH = (
    "{a} / ({b}.square() + 1)",
    "torch.atan2({a}, {b}.square() + 1)",
    "torch.lerp({a}, {b}, 0.3)",
    "{a} * torch.sigmoid({b})",
    "torch.logaddexp({a}, {b})",
    "torch.addcmul({a}, {a}, {b}, value=0.7)",
    "torch.exp(-({a} - {b}).square())",
    "torch.hypot({a} + 3, {b})",
    "torch.addcdiv({a}, {b}, {a}.square() + 1)",
    "torch.xlogy({b}.square() + 0.5, {a}.square() + 1)",
    "torch.lerp({a}, {b}, torch.sigmoid({a}))",
    "torch.logaddexp2({a}, {b})",
    "({a}.square() + 1) ** ({b} * 0.25)",
)
BINARY_EXACT = ("{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.add({a}, {b}, alpha=2)", "{b} - {a}")
BINARY_KINKS = (
    "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})",
    "torch.fmax({a}, {b})",
    "torch.where({a} > {b}, {a}, {b} * 0.5)",
    "{a}.clamp(max={b})",
)
COMPARISONS = ("{a} < {b}", "{a} >= {b}", "{a} == {b}", "torch.ne({a}, {b})")
INTEGER = (
    "{a} + 3",
    "{a} * 2",
    "-{a}",
    "{a} // 3",
    "{a} % 5",
    "torch.div({a}, 3, rounding_mode='trunc')",
    "{a} & 6",
    "{a} | 1",
    "{a} ^ 5",
    "{a} << 1",
    "{a} >> 1",
    "~{a}",
    "{a}.abs()",
    "{a}.clamp(-3, 4)",
    "{a} > 1",
    "{a} == 2",
    "{a}.to(f32)",
    "{a}.to(f64)",
    "{a}.to(bf16)",
    "{a}.to(u8)",
    "{a}.to(i32)",
    "{a}.to(b8)",
    "{a}.sign()",
    "{a} * 1.5",
    "{a} / 4",
    "torch.fmod({a}, 3)",
    "torch.square({a})",
    "{a} * 100003 * {a}",
    "{a}.to(i8) * 50",
    "{a}.to(i16) * 9999",
    "{a}.to(u8) - 200",
    "{a}.to(i32) * 2000000011",
    "{a} * 6148914691236517205",
    "{a}.to(i32) << 29",
    "torch.gcd({a}, torch.full_like({a}, 6))",
    "{a} ** 3",
    "{a}.to(i16)",
    "torch.div({a}, -4, rounding_mode='floor')",
    "F.one_hot({a}.abs() % 5, 5)",
    "torch.bitwise_not({a}) >> 2",
)
INTEGER_BINARY = (
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "{a} & {b}",
    "{a} | {b}",
    "{a} ^ {b}",
    "{a} < {b}",
    "{a} == {b}",
    "torch.maximum({a}, {b})",
    "{a} // ({b}.abs() + 1)",
    "{a} % ({b}.abs() + 1)",
)
LOGIC = (
    "~{a}",
    "{a} & {b}",
    "{a} | {b}",
    "{a} ^ {b}",
    "torch.logical_or({a}, {b})",
    "{a}.to(f32)",
    "{a}.to(i64)",
    "{a}.any()",
    "{a}.all()",
    "{a}.sum()",
)
REDUCTIONS = (
    ("{a}.sum({d}, keepdim={k})", "exact"),
    ("{a}.mean({d}, keepdim={k})", "smooth"),
    ("{a}.amax({d}, keepdim={k})", "kink"),
    ("{a}.amin({d}, keepdim={k})", "kink"),
    ("{a}.var({d}, keepdim={k})", "smooth"),
    ("{a}.var({d}, correction=0, keepdim={k})", "smooth"),
    ("torch.std({a}, {d}, correction=0, keepdim={k})", "kink"),
    ("torch.logsumexp({a}, {d}, keepdim={k})", "smooth"),
    ("{a}.norm(2, {d}, keepdim={k})", "kink"),
    ("{a}.norm(1, {d}, keepdim={k})", "kink"),
    ("torch.var_mean({a}, {d}, keepdim={k})[0]", "smooth"),
    ("torch.var_mean({a}, {d}, keepdim={k})[1]", "smooth"),
    ("(1 + {a} * 0.125).prod({e}, keepdim={k})", "smooth"),
    ("{a}.argmax({e}, keepdim={k})", "jump"),
    ("{a}.argmin({e}, keepdim={k})", "jump"),
    ("{a}.max({e}, keepdim={k})[0]", "kink"),
    ("{a}.max({e}, keepdim={k})[1]", "jump"),
    ("{a}.min({e}, keepdim={k})[1]", "jump"),
    ("torch.count_nonzero({a}, {e})", "jump"),
    ("{a}.sum()", "exact"),
    ("{a}.mean()", "smooth"),
    ("{a}.amax()", "kink"),
    ("{a}.cumsum({e})", "exact"),
    ("torch.linalg.vector_norm({a}, float('inf'), {d}, keepdim={k})", "kink"),
    ("{a}.sum({d}, dtype=f64)", "exact"),
    ("({a} > 0).any({e}, keepdim={k})", "jump"),
    ("({a} > 0).all({e}, keepdim={k})", "jump"),
    ("{a}.argmax()", "jump"),
    ("torch.aminmax({a}, dim={e}, keepdim={k})[0]", "kink"),
    ("torch.sort({a}, dim={e}, stable=True)[0]", "kink"),
    ("torch.cummax({a}, {e})[0]", "kink"),
    ("torch.cumprod(1 + {a} * 0.125, {e})", "smooth"),
    ("torch.logcumsumexp({a}, {e})", "smooth"),
    ("{a}.var()", "smooth"),
    ("torch.std_mean({a} * 3, {d}, correction=0, keepdim={k})[1]", "smooth"),
    ("{a}.nansum({d}, keepdim={k})", "exact"),
    ("torch.diff({a}, dim={e})", "exact"),
    ("{a}.sum({d}, keepdim={k}, dtype=f32)", "exact"),
    ("torch.cummax({a}, {e})[1]", "jump"),
    ("torch.sort({a}, dim={e}, stable=True)[1]", "jump"),
)
INTEGER_REDUCTIONS = (
    "{a}.sum({d}, keepdim={k})",
    "{a}.amax({d}, keepdim={k})",
    "{a}.prod({e}, keepdim={k})",
    "{a}.argmin({e}, keepdim={k})",
    "{a}.any({e}, keepdim={k})",
    "{a}.min({e}, keepdim={k})[1]",
    "{a}.cumsum({e})",
    "{a}.sum({d}, dtype=i32)",
    "{a}.sum({d}, dtype=u8)",
    "{a}.cumprod({e})",
    "{a}.prod()",
    "{a}.to(f32).mean({d})",
)
NORMS = (
    "torch.softmax({a}, {e})",
    "torch.log_softmax({a}, {e})",
    "F.layer_norm({a}, {a}.shape[-1:])",
    "F.layer_norm({a}, {a}.shape[-2:])",
    "F.rms_norm({a}, {a}.shape[-1:], eps=1e-3)",
    "F.normalize({a} + 3, dim={e})",
    "F.softmin({a}, dim={e})",
    "F.group_norm({a}, 1)",
    "torch.softmax({a}, {e}, dtype=f32)",
    "{a} - {a}.mean({d}, keepdim=True)",
    "F.layer_norm({a}, {a}.shape[-1:], {a}.detach().flatten()[: {a}.shape[-1]])",
    "F.mse_loss({a}, {a} * 0.5)",
    "F.batch_norm({a}, None, None, training=True, eps=0.1)",
    "torch.softmax({a} * 4, {e}).sum({e})",
    "F.local_response_norm({a}, 3)",
    "F.instance_norm({a}, eps=0.1)",
    "F.cosine_similarity({a} + 3, {b} + 3, dim={e})",
    "torch.softmax({a}.masked_fill({a}.detach() > 1, float('-inf')), {e})",
    "F.batch_norm({a}, {a}.detach().flatten()[: {a}.shape[1]], torch.ones({a}.shape[1]), eps=0.1)",
)
VIEWS = (
    "{a}.transpose({e}, {f})",
    "{a}.flatten()",
    "{a}.unsqueeze({e})",
    "{a}.squeeze()",
    "{a}.reshape(-1)",
    "{a}.select({e}, 0)",
    "{a}.select({e}, -1)",
    "{a}[1:]",
    "{a}[:-1]",
    "{a}[..., ::2]",
    "{a}[..., 1:]",
    "{a}.narrow({e}, 0, 1)",
    "{a}.unsqueeze(0).expand(3, *{a}.shape)",
    "{a}.diagonal()",
    "{a}.chunk(2, {e})[0]",
    "{a}.movedim({e}, {f})",
    "{a}.T",
    "{a}.contiguous()",
    "{a}.split(({a}.shape[{e}] + 2) // 3 or 1, {e})[0]",  # a few pieces, however long it is
    "{a}.unflatten({e}, (1, -1))",
    "{a}.view_as({a})",
    "{a}.permute(*reversed(range({a}.dim())))",
    "{a}.unfold({e}, 2, 1)",
    "{a}.flatten(0, 1)",
    "{a}.detach()",
    "{a}.reshape({a}.shape[-1], -1)",
    "{a}.transpose(0, -1).reshape({a}.shape)",
    "{a}.unbind({e})[-1]",
    "{a}.tensor_split(2, {e})[-1]",
    "{a}[None, ..., None]",
    "{a}.mT",
    "{a}.view(-1, {a}.shape[-1])",
    "{a}.unfold({e}, 3, 2)",
    "{a}.to(memory_format=torch.channels_last)",
    "{a}.expand(2, *{a}.shape)[1]",
)
MOVES = (
    "{a}.flip({e})",
    "{a}.roll(1, {e})",
    "{a}.roll(2)",
    "{a}.repeat(2, *[1] * ({a}.dim() - 1))",
    "torch.cat([{a}, {b}], {e})",
    "torch.stack([{a}, {b}])",
    "F.pad({a}, (1, 2))",
    "F.pad({a}, (0, 1, 2, 0), value=0.5)",
    "torch.tril({a})",
    "torch.triu({a}, 1)",
    "torch.cat([{a}, torch.zeros_like({a})], {e})",
    "torch.cat([{a}[1:], {a}[:1]])",
    "F.pad({a}, (-1, 1))",
    "{a}.tile(2)",
    "torch.stack([{a}, {b}, {a}], -1)",
    "torch.cat([{a}, {b}, {a}], {e})",
    "{a}.repeat_interleave(2, {e})",
    "torch.rot90({a}, 1, (0, 1))",
    "F.pad({a}.unsqueeze(0), (1, 1), mode='reflect')",
    "torch.hstack([{a}, {b}])",
    "F.pad({a}.unsqueeze(0), (1, 2), mode='replicate')",
    "F.pad({a}.unsqueeze(0), (1, 1), mode='circular')",
    "torch.block_diag({a}, {b})",
    "F.pixel_shuffle({a}.expand(4, *{a}.shape[-2:]), 2)",
    "torch.meshgrid({a}.flatten()[:5], {b}.flatten()[:7], indexing='ij')[0]",
    "torch.diag_embed({a})",
    "torch.dstack([{a}, {b}])",
)
INDEXING = (
    "torch.index_select({a}, {e}, {i}.flatten() % {a}.shape[{e}])",
    "{a}[{i}.flatten() % {a}.shape[0]]",
    "{a}[..., {i}.flatten() % {a}.shape[-1]]",
    "F.embedding({i} % {a}.shape[0], {a})",
    "{a}[torch.arange({a}.shape[0] - 1, -1, -1)]",
    "{a}[[0, -1]]",
    "{a}[:, [0, 0, 1]]",
    "torch.gather({a}, {e}, {a}.detach().argsort({e}, stable=True))",
    "torch.take({a}, {i} % {a}.numel())",
    "torch.index_add({a}, 0, {i}.flatten() % {a}.shape[0], {a}[:1].expand({i}.numel(), *{a}.shape[1:]))",
    "torch.scatter({a}, {e}, torch.zeros_like({a}, dtype=i64), 0.5)",
    "torch.take_along_dim({a}, torch.zeros_like({a}, dtype=i64), {e})",
    "{a}.index_fill({e}, torch.zeros(1, dtype=i64), 0.25)",
    "torch.slice_scatter({a}, {a}[:1] * 0.5, 0, 0, 1)",
    "torch.select_scatter({a}, {a}.select({e}, 0) * 0.5, {e}, -1)",
    "torch.index_put({a}, ({i}.flatten() % {a}.shape[0],), {a}[:1], accumulate=True)",
    "torch.scatter_add({a}, {e}, torch.zeros_like({a}, dtype=i64), {a})",
    "torch.scatter_reduce({a}, {e}, torch.zeros_like({a}, dtype=i64), {b}, 'sum')",
    "{a}.index_copy(0, torch.zeros(1, dtype=i64), {a}[-1:] * 0.5)",
    "torch.diagonal_scatter({a}, {a}.diagonal() * 0.5)",
    "{a}[{i}.flatten() % {a}.shape[0], {i}.flatten() % {a}.shape[1]]",
    "{a}[..., None, {i}.flatten() % {a}.shape[-1]]",
    "{a}[torch.arange({a}.shape[0])[:, None], {i}.flatten() % {a}.shape[1]]",
)
MASKED = (
    "torch.where({m}, {a}, {b})",
    "{a}.masked_fill({m}, 0.5)",
    "torch.where({m}, {a}, 0.0)",
    "{a} * {m}",
    "torch.where({m}, {a}, -{a})",
    "torch.where({m}, {a}, {b} * 2) + {a}",
    "{a}.masked_fill(~{m}, -1)",
    "torch.masked_fill({a} * 2, {m}.any(), 0.25)",
    "torch.where({m}, 1.5, {a})",
)
CASTS = (
    "{a}.to(f32)",
    "{a}.to(f64)",
    "{a}.to(bf16)",
    "{a}.to(f16)",
    "{a}.to(f32).to(bf16)",
    "{a}.to({b}.dtype)",
    "{a} * torch.tensor(0.5, dtype=f64)",
)
CREATION = (
    "torch.zeros_like({a})",
    "torch.ones_like({a})",
    "torch.full_like({a}, 0.25)",
    "torch.arange({a}.numel(), dtype=i64) % 7",
    "{a}.new_zeros(3, 5)",
    "torch.eye(4, dtype=f32)",
    "torch.linspace(0, 1, 5, dtype=f64)",
    "torch.arange({a}.shape[-1]).to(f32) * 0.125",
)
CONTRACTIONS = (
    "{a} @ {a}.transpose(-1, -2)",
    "torch.matmul({a} * 0.25, {a}.mT)",
    "torch.einsum('...i,...i->...', {a}, {a})",
    "F.linear({a}, {b})",
    "{a} @ {b}",
    "torch.einsum('...ij,...kj->...ik', {a}, {b})",
    "torch.outer({a}.flatten()[:7], {b}.flatten()[:5])",
    "F.scaled_dot_product_attention({a}, {b}, {b})",
    "F.scaled_dot_product_attention({a}, {a}, {b}, is_causal=True)",
    "torch.softmax({a} @ {b}.mT, -1) @ {b}",
    "torch.addmm({a}[:1, :1], {a}, {a}.T, beta=0.5)",
    "F.conv2d({a}, {b}[:2, :, :2, :2])",
    "F.conv1d({a}, {b}[:2, :, :3], padding=1)",
)
POOLING = (
    ("F.avg_pool2d({a}, 2)", "smooth"),
    ("F.avg_pool2d({a}, 3, 2, 1)", "smooth"),
    ("F.avg_pool2d({a}, 3, 1, 1, count_include_pad=False)", "smooth"),
    ("F.avg_pool1d({a}, 2, 1)", "smooth"),
    ("F.max_pool2d({a}, 2)", "kink"),
    ("F.max_pool2d({a}, 3, 2, 1)", "kink"),
    ("F.max_pool2d({a}, 2, ceil_mode=True)", "kink"),
    ("F.max_pool1d({a}, 3, 1)", "kink"),
    ("F.max_pool2d({a}, 3, 1, 1, return_indices=True)[1]", "jump"),
    ("F.adaptive_avg_pool2d({a}, (1, 2))", "smooth"),
    ("F.adaptive_max_pool2d({a}, 2)", "kink"),
    ("F.interpolate({a}, scale_factor=2)", "exact"),
    ("F.interpolate({a}, size=(5, 3), mode='bilinear')", "smooth"),
    ("F.unfold({a}, 2)", "exact"),
)
LOSSES = (
    ("F.cross_entropy({a}, {i}.flatten()[: {a}.shape[0]].to(i64) % {a}.shape[1])", "smooth"),
    ("F.cross_entropy({a}, {i}.flatten()[: {a}.shape[0]].to(i64) % {a}.shape[1], label_smoothing=0.1)", "smooth"),
    ("F.cross_entropy({a}, {i}.flatten()[: {a}.shape[0]].to(i64) % {a}.shape[1], ignore_index=1)", "smooth"),
    ("F.cross_entropy({a}, torch.softmax({b}, 1), reduction='sum')", "smooth"),
    ("F.nll_loss({a}, {i}.flatten()[: {a}.shape[0]].to(i64) % {a}.shape[1], reduction='none')", "exact"),
    ("F.binary_cross_entropy_with_logits({a}, torch.sigmoid({b}))", "smooth"),
    ("F.binary_cross_entropy(torch.sigmoid({a}), torch.sigmoid({b}))", "smooth"),
    ("F.kl_div(torch.log_softmax({a}, -1), torch.softmax({b}, -1), reduction='sum')", "smooth"),
    ("F.smooth_l1_loss({a}, {b}, beta=0.5)", "kink"),
    ("F.huber_loss({a}, {b}.to({a}.dtype), reduction='none')", "kink"),
    ("F.l1_loss({a}, {b})", "kink"),
)
UPDATES = (
    ("{w}.add_({b})", "exact"),
    ("{w}.mul_(0.5)", "exact"),
    ("{w}.copy_({b})", "exact"),
    ("{w}[1:] += at_once({w}[:-1])", "exact"),
    ("{w}[:-1] += at_once({w}[1:])", "exact"),
    ("{w}.copy_(at_once({w}.transpose(0, -1)))", "exact"),
    ("{w}.zero_()", "exact"),
    ("{w}[..., 0] = 1", "exact"),
    ("{w}.relu_()", "kink"),
    ("{w}.transpose(0, -1).add_(1)", "exact"),
    ("{w}.clamp_(-1, 1)", "kink"),
    ("{w}[0].copy_({b})", "exact"),
    ("{w}.copy_({w}.roll(1, 0))", "exact"),
    ("{w}.fill_(0.75)", "exact"),
    ("{w}.tanh_()", "smooth"),
    ("{w}[::2] *= 0.5", "exact"),
    ("{w}[..., 1:].sub_(at_once({w}[..., :-1]))", "exact"),
    ("{w}.sub_({w}.amax())", "kink"),
    ("{w}.copy_({w}.flip(0))", "exact"),
    ("{w}.index_add_(0, torch.zeros(1, dtype=i64), {w}[:1].clone())", "exact"),
    ("{w}.masked_fill_({w} > 0, 0.5)", "jump"),
    ("{w}.view(-1)[: {w}.numel() // 2] *= 2", "exact"),
    ("{w}.flatten()[0:1].add_(1)", "exact"),
    ("{w}.diagonal().fill_(0.5)", "exact"),
    ("{w}[{m}] = 0.5", "exact"),
    ("{w}.index_put_(({i}.flatten() % {w}.shape[0],), {w}[:1].clone(), accumulate=True)", "exact"),
    ("{w}.scatter_add_(0, torch.zeros_like({w}, dtype=i64), {w}.clone())", "exact"),
    ("torch.add({w}, {b}, out={w})", "exact"),
    ("{w}.unsqueeze_(0)", "exact"),
    ("{w}.transpose_(0, -1)", "exact"),
    ("{w}.squeeze_()", "exact"),
    ("{w}.addcmul_({w}, {b}, value=0.5)", "exact"),
    ("{w}.cumsum_(0)", "exact"),
    ("{w}.fill_diagonal_(1)", "exact"),
    ("{w}.tril_()", "exact"),
    ("{w}.index_copy_(0, torch.zeros(1, dtype=i64), {w}[-1:].clone())", "exact"),
    ("{w}[..., -1] = at_once({w}[..., 0])", "exact"),
    ("{w}.unbind(0)[0].mul_(2)", "exact"),
    ("{w}.chunk(2, 0)[-1].neg_()", "exact"),
    ("torch._foreach_mul_([{w}, {w}[:0]], 2)", "exact"),
    ("{w}.detach().add_(1)", "exact"),
    ("with torch.no_grad(): {w}.mul_(0.5)", "exact"),
    ("{w}[1:2, ..., :2] = {b}", "exact"),
    ("{w}.T[0].sub_(1)", "exact"),
    ("{w}.sigmoid_()", "smooth"),
    ("{w}.lerp_({b}, 0.3)", "smooth"),
    ("{w}.div_(3)", "smooth"),
    ("{w}.logical_not_()", "jump"),
    ("{w}.floor_()", "jump"),
    ("{w}[{w} < 0] = 1", "jump"),
)


def propose(state: State) -> Proposal | None:
    """One statement to try, of a random family."""
    rng = state.rng
    family = rng.choices(list(FAMILIES), [weight for _, weight in FAMILIES.values()])[0]
    return FAMILIES[family][0](state, rng)


def _pick(state: State, rng: random.Random, wanted: str) -> str | None:
    """A value of a class: float, integer, bool or any. Recent ones twice as likely, so that chains grow."""
    names = [n for n in state.names() if wanted == "any" or _class(state.value(n)) == wanted]
    return rng.choice(names + names[-4:]) if names else None


def _class(tensor: torch.Tensor) -> str:
    if tensor.dtype is torch.bool:
        return "bool"
    return "float" if tensor.is_floating_point() else "integer"


def _unary(templates: tuple[str, ...], kind: str, wanted: str = "float") -> Callable[..., Proposal | None]:
    return _fill(tuple((t, kind) for t in templates), wanted)


def _fill(templates: tuple[tuple[str, str], ...], wanted: str) -> Callable[..., Proposal | None]:
    """A family: choose a template and fill it.

    {a}, {b} are values, {i} an integer one, {m} a mask; {d} dimensions, {e}, {f} one dimension, {k} keepdim.
    """

    def build(state: State, rng: random.Random) -> Proposal | None:
        template, kind = rng.choice(templates)
        fields = {"a": _pick(state, rng, wanted), "b": _pick(state, rng, wanted), "i": "", "m": ""}
        if fields["a"] is None:
            return None
        if "{i}" in template:
            fields["i"] = _pick(state, rng, "integer")
        if "{m}" in template:
            fields["m"] = _pick(state, rng, "bool")
        if fields["i"] is None or fields["m"] is None:
            return None
        rank = max(state.value(str(fields["a"])).dim(), 1)
        dimensions = tuple(sorted(rng.sample(range(rank), rng.randint(1, rank))))
        fields |= {
            "d": str(dimensions),
            "e": str(rng.randrange(rank)),
            "f": str(rng.randrange(rank)),
            "k": rng.choice(("True", "False")),
        }
        return Proposal(template.format(**fields), kind)

    return build


def _update(state: State, rng: random.Random) -> Proposal | None:
    written, other = _pick(state, rng, "any"), _pick(state, rng, "any")
    if written is None:
        return None
    template, kind = rng.choice(UPDATES)
    fields = {"i": _pick(state, rng, "integer"), "m": _pick(state, rng, "bool")}
    if any(name in template and not fields[name[1]] for name in ("{i}", "{m}")):
        return None
    return Proposal(template.format(w=written, b=other, **fields), kind, in_place=True, written=written)


FAMILIES: dict[str, tuple[Callable[..., Proposal | None], int]] = {
    "smooth": (_unary(SMOOTH, "smooth"), 14),
    "exact": (_unary(EXACT_UNARY, "exact"), 6),
    "kink": (_unary(KINKS, "kink"), 6),
    "jump": (_unary(JUMPS, "jump"), 5),
    "binary smooth": (_unary(BINARY_SMOOTH, "smooth"), 7),
    "binary exact": (_unary(BINARY_EXACT, "exact"), 10),
    "mixed": (_unary(BINARY_EXACT, "exact", "any"), 4),
    "binary kink": (_unary(BINARY_KINKS, "kink"), 3),
    "comparison": (_unary(COMPARISONS, "jump"), 3),
    "integer": (_unary(INTEGER, "exact", "integer"), 5),
    "integer binary": (_unary(INTEGER_BINARY, "exact", "integer"), 4),
    "logic": (_unary(LOGIC, "exact", "bool"), 3),
    "reduction": (_fill(REDUCTIONS, "float"), 14),
    "integer reduction": (_unary(INTEGER_REDUCTIONS, "exact", "integer"), 3),
    "norm": (_unary(NORMS, "smooth"), 7),
    "view": (_unary(VIEWS, "exact", "any"), 14),
    "move": (_unary(MOVES, "exact", "any"), 9),
    "indexing": (_unary(INDEXING, "exact", "float"), 5),
    "masked": (_unary(MASKED, "exact"), 5),
    "cast": (_unary(CASTS, "exact"), 5),
    "creation": (_unary(CREATION, "exact", "any"), 2),
    "contraction": (_unary(CONTRACTIONS, "smooth"), 3),
    "pooling": (_fill(POOLING, "float"), 4),
    "loss": (_fill(LOSSES, "float"), 3),
    "update": (_update, 18),
}
