"""`onepass::recurrence`: h[t] = a[t] * h[t - 1] + b[t] along the first dimension, one scan of linear maps.

`first` is what comes before the first step; none is zero. Its gradient is the same recurrence from the other end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, Load, Part, Reduce, Scan, literal, pointwise, postorder
from ..ir.poly import Poly
from ..ir.program import Buffer, Define
from .context import Context
from .registry import RULES, Unsupported
from .scans import along
from .values import Ref, axes_of, own_point

_library = torch.library.Library("onepass", "FRAGMENT")
_library.define(
    "recurrence(Tensor a, Tensor b, Tensor? first, bool reverse) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _recurrence(a: Tensor, b: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """Step by step, with a state as wide as a kernel's."""
    wide = torch.float32 if b.dtype.itemsize < 4 else b.dtype
    state = torch.zeros(b.shape[1:], dtype=wide, device=b.device) if first is None else first.to(wide)
    found = torch.empty_like(b, memory_format=torch.contiguous_format)
    for t in reversed(range(b.shape[0])) if reverse else range(b.shape[0]):
        state = a[t].to(wide) * state + b[t].to(wide)
        found[t] = state
    return found


def _fake(a: Tensor, b: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


_library.impl("recurrence", _recurrence, "CompositeExplicitAutograd")
torch.library.register_fake("onepass::recurrence", _fake, lib=_library)
recurrence = torch.ops.onepass.recurrence.default


def before(states: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """What each step of a recurrence begins with."""
    edge = torch.zeros_like(states[:1]) if first is None else first.unsqueeze(0)
    return torch.cat([states[1:], edge] if reverse else [edge, states[:-1]])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, bool], output: Tensor) -> None:
    a, _, first, ctx.reverse = inputs
    ctx.save_for_backward(a, first, output)


def _gradient(ctx: Any, tangent: Tensor) -> tuple[Tensor | None, ...]:
    a, first, states = ctx.saved_tensors
    following = before(a, None, not ctx.reverse)  # the step after multiplies a state by its own factor
    own = recurrence(following, tangent, None, not ctx.reverse)
    of_a = (own * before(states, first, ctx.reverse)).to(a.dtype) if ctx.needs_input_grad[0] else None
    end = -1 if ctx.reverse else 0
    of_first = None if first is None else (a[end] * own[end]).to(first.dtype)
    return of_a, own, of_first, None


torch.library.register_autograd("onepass::recurrence", _gradient, setup_context=_keep, lib=_library)


def _lowered(ctx: Context, a: Ref, b: Ref, first: Ref | None, reverse: bool) -> Expr:
    if not (a.dtype.is_float and b.dtype.is_float):
        raise Unsupported("a recurrence of integers")
    dtype = ctx.out.dtype
    point, over, at = along(b, 0)
    factor, term = (ctx.convert(ctx.computing(x.at(point), x.dtype), dtype.compute) for x in (a, b))
    if first is not None:
        start = ctx.convert(ctx.computing(first.at(own_point(b.shape)[1:]), first.dtype), dtype.compute)
        begun = factor * start + term
        if over is None:
            return begun
        edge = over.extent - 1 if reverse else Poly.ZERO
        at_edge = pointwise("eq", Index(over.poly()), Index(edge) if edge.terms else literal(0, DType.I64))
        term = pointwise("where", at_edge, begun, term)
    return term if over is None else Part(Scan("linear", (factor, term), over, at, reverse), 1)


RULES[recurrence] = _lowered


def is_state(ctx: Context, buffer: Buffer) -> bool:
    """Whether a tensor holds states of a recurrence, or is computed from them and as large."""
    defines = {s.buffer: s.value for s in ctx.statements if isinstance(s, Define)}
    seen, waiting = set[Buffer](), [buffer]
    while waiting:
        if (found := waiting.pop()) in seen or found not in defines:
            continue
        seen.add(found)
        nodes = list(postorder([defines[found]]))
        if any(isinstance(e, Scan) and e.monoid == "linear" for e in nodes):
            return True
        if not any(isinstance(e, Reduce) for e in nodes):
            waiting += [e.buffer for e in nodes if isinstance(e, Load) and len(e.axes) == len(axes_of(found.shape))]
    return False
