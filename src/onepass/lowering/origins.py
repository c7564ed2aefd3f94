"""Where an FX node came from: its name, its operation, and the user's line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch.fx import Node

from ..ir.program import Origin

_FRAME = re.compile(r'File "(?P<path>[^"\n]*)", line (?P<line>\d+), in [^\n]*(?:\n\s*(?P<code>[^\n]*))?')
_TORCH = str(Path(torch.__file__).parent) + os.sep
_EXPLAIN = str(Path(__file__).parents[1] / "explain") + os.sep  # it calls the user's function


def origin_of(node: Node) -> Origin:
    """The origin of a node; its line is empty where torch recorded none."""
    return Origin(node.name, operation_name(node.target), _user_line(node.meta.get("stack_trace") or ""))


def operation_name(target: object) -> str:
    """`aten.add.Tensor`, `getitem`, ..."""
    if isinstance(target, str):
        return target
    text = str(target)
    return getattr(target, "__name__", text) if text.startswith("<") else text


def _user_line(stack_trace: str) -> str:
    """The innermost frame outside torch (of torch where all are), as `path:line: code`."""
    frames = [f for f in _FRAME.finditer(stack_trace) if not f["path"].startswith(_EXPLAIN)]
    if not frames:
        return ""
    last = next((f for f in reversed(frames) if not f["path"].startswith(_TORCH)), frames[-1])
    place = f"{last['path']}:{last['line']}"
    code = (last["code"] or "").strip()
    return f"{place}: {code}" if code else place
