"""Whether a kernel without an operation still has the form of the whole one, so that their times can be compared.

An operation can be what lets a kernel do everything in one sweep (an exponential's sum follows its maximum), or what is
done behind a sum (the scale of a product's operand). Without it the scheduler finds another form, which does more work:
its time says nothing about the operation. A form that does less is the operation's: a maximum that needs a sweep of its
own costs that sweep. Of an exponential the whole kernel can be kept, with something cheap in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from ..analysis.access import estimate
from ..ir.expr import Pointwise, const, postorder
from ..ir.kernel import Contract, Kernel, Let, LoadElement, LoadTile, ScheduledGroup, Statement, rewritten, walk
from ..ir.program import Buffer, Define
from ..runtime.kernels import LoadedKernel

MORE = 1.25  # times what the whole kernel reads or holds: above it is another form; single elements are read in any
SMALL = 7 * 1024  # bytes of shared memory that never limit how many programs are resident: an H200 holds 32 at most
EXPONENTIALS = ("exp", "exp2")
OTHER_FORM = "without it the kernel has another form: "


def other_form(whole: Sequence[Kernel], version: Sequence[Kernel], inputs: Collection[Buffer]) -> str:
    """How the kernels of a version do more than those of the whole; empty where they do not."""
    for buffer in inputs:
        if [buffer in k.reads for k in whole] != [buffer in k.reads for k in version]:
            return OTHER_FORM + "another of its launches reads an input"
    products, others = (sum(isinstance(s, Contract) for k in ks for s in walk(k.body)) for ks in (whole, version))
    if others > products:
        return f"{OTHER_FORM}{others} matrix products, not {products}"
    for buffer in inputs:
        before, after = (sum(_loaded(k, buffer) for k in ks) for ks in (whole, version))
        if after > MORE * before:
            return f"{OTHER_FORM}it reads an input {after / before:.1f} times as often"
    return ""


def _loaded(kernel: Kernel, buffer: Buffer) -> int:
    """The elements of a buffer that a kernel loads, as often as its loops do."""
    total = 0
    for s in walk(kernel.body):
        match s:
            case LoadElement() if s.buffer is buffer:
                total += prod(estimate(a.extent) for a in s.offset.axes)
            case LoadTile() if s.descriptor.buffer is buffer:
                total += prod(s.descriptor.block) * prod(estimate(a.extent) for a in s.row.axes | s.column.axes)
    return total


def in_place(whole: ScheduledGroup, removed: Collection[Define], members: Collection[Define]) -> ScheduledGroup | None:
    """The whole's kernels without an exponential, those of running sums included; None where it is not the only one.

    No program has this form without one: a sum follows a growing maximum because exponentials turn differences into
    factors. The larger of the exponent and -1 is as bounded, so that sums stay finite.
    """
    if [m for m in members if _has_exponential(m)] != list(removed):
        return None

    def change(s: Statement) -> Statement:
        if isinstance(s, Let) and s.op in EXPONENTIALS:
            return replace(s, op="maximum", args=(*s.args, const(-1.0, s.var.dtype)))
        return s

    return replace(whole, kernels=tuple(replace(k, body=rewritten(k.body, change), like=None) for k in whole.kernels))


def _has_exponential(define: Define) -> bool:
    return any(isinstance(e, Pointwise) and e.op in EXPONENTIALS for e in postorder([define.value]))


def other_memory(whole: Sequence[LoadedKernel], version: Sequence[LoadedKernel]) -> str:
    """Whether a version needs so much more shared memory that fewer of its programs can be resident."""
    before, after = (
        max(getattr(getattr(k.function, "built", None), "shared", 0) for k in ks) for ks in (whole, version)
    )
    return f"{OTHER_FORM}{after} bytes of shared memory, not {before}" if after > MORE * max(before, SMALL) else ""
