"""Where an FX node came from: its name, its operation, and the user's line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch.fx import Node

from ..ir.program import Origin

_FRAME = re.compile(r'File "(?P<path>[^"\n]*)", line (?P<line>\d+), in [^\n]*(?:\n\s*(?P<code>[^\n]*))?')

# Code that calls the user's, or is called by it: torch and the package's own `explain`.
_CALLERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1] / "explain"))


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
    """The innermost frame of the user's own code, as `path:line: code`; of any code where none is."""
    frames = list(_FRAME.finditer(stack_trace))
    if not frames:
        return ""
    own = [f for f in frames if not f["path"].startswith(_CALLERS)]
    last = (own or frames)[-1]
    place = f"{last['path']}:{last['line']}"
    code = (last["code"] or "").strip()
    return f"{place}: {code}" if code else place
