"""The page of all operators of torch: what becomes of each when it is compiled, from the tables that decide it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._ops import OpOverloadPacket

from onepass.lowering import graph  # registers all rules
from onepass.lowering.contractions import CONTRACTIONS
from onepass.lowering.decompositions import decomposition_table
from onepass.lowering.reasons import why_library
from onepass.lowering.registry import RULES

HEAD = """# Operators

What becomes of each operator of `torch.ops.aten` (torch 2.13) in a compiled program. A name stands for all its
overloads; in-place forms become the others before the compiler sees them, and are left out. A program is right
whichever group an operator is in: an operator that no kernel computes runs as eager does, and `onepass.explain` says
why. This page is generated from the tables of `lowering/` (`pytest --update-golden tests/docs`).
"""
KERNEL = "Computed by kernels"
PRODUCT = "A kernel or the library, whichever is predicted or measured to be faster"
APART = "Taken apart into other operators first"
WITHOUT_REASON = "no lowering rule"
assert graph.RULE_MODULES


def operators_page() -> str:
    groups: dict[str, list[str]] = {}
    for name in sorted(_names()):
        groups.setdefault(_group(getattr(torch.ops.aten, name)), []).append(name)
    order = [KERNEL, PRODUCT, APART, *sorted(groups.keys() - {KERNEL, PRODUCT, APART, WITHOUT_REASON}), WITHOUT_REASON]
    return HEAD + "".join(_section(title, groups[title]) for title in order if title in groups)


def _section(title: str, names: list[str]) -> str:
    called = title if title in (KERNEL, PRODUCT, APART) else f"As eager: {title}"
    return f"\n## {called}\n\n{len(names)}: {', '.join(f'`{name}`' for name in names)}\n"


def _names() -> Iterable[str]:
    """Operators of tensors that a compiled graph may hold."""
    registered = (n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    for name in {n.partition(".")[0] for n in registered}:
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, OpOverloadPacket):
            continue
        schemas = [overload._schema for overload in _overloads(packet)]
        takes = any("Tensor" in str(a.type) for s in schemas for a in (*s.arguments, *s.returns))
        if takes:
            yield name


def _overloads(packet: OpOverloadPacket) -> list[torch._ops.OpOverload]:
    """The overloads of a graph: torch dispatches them, and they change nothing in place."""
    found = [getattr(packet, name) for name in packet.overloads()]
    return [o for o in found if torch._C._dispatch_has_kernel(o.name()) and not o._schema.is_mutable]


def _is_made_of_others(overload: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def _group(packet: OpOverloadPacket) -> str:
    overloads = _overloads(packet)
    if any(o in CONTRACTIONS for o in overloads):
        return PRODUCT
    if any(o in RULES for o in overloads):
        return KERNEL
    table = decomposition_table()
    if any(o in table or _is_made_of_others(o) for o in overloads):
        return APART
    return why_library(overloads[0])
