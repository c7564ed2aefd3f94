"""Where an FX node came from: its name, its operation, and the user's line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch.fx import Node

from .program import Origin

_FRAME = re.compile(r'File "(?P<path>[^"\n]*)", line (?P<line>\d+), in [^\n]*(?:\n\s*(?P<code>[^\n]*))?')
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = (  # these call the user's function, or are called in it
    str(Path(__file__).parents[1] / "explain") + os.sep,
    str(Path(__file__).parents[1] / "steering.py"),
)


def origin_of(node: Node) -> Origin:
    """The origin of a node; its line is empty where torch recorded none."""
    return Origin(node.name, operation_name(node.target), _user_line(node.meta.get("stack_trace") or ""))


def operation_name(target: object) -> str:
    """`aten.add.Tensor`, `getitem`, ..."""
    if isinstance(target, str):
        return target
    text = str(target)
    return getattr(target, "__name__", text) if text.startswith("<") else text


def frames_of(node: Node) -> list[tuple[str, int]]:
    """The file and the line of every call that led to a node."""
    return [
        (f["path"].replace(os.sep, "/"), int(f["line"])) for f in _FRAME.finditer(node.meta.get("stack_trace") or "")
    ]


def _user_line(stack_trace: str) -> str:
    """The innermost frame outside torch (of torch where all are), as `path:line: code`."""
    frames = [f for f in _FRAME.finditer(stack_trace) if not f["path"].startswith(_OWN)]
    if not frames:
        return ""
    last = next((f for f in reversed(frames) if not f["path"].startswith(_TORCH)), frames[-1])
    place = f"{last['path']}:{last['line']}"
    code = (last["code"] or "").strip()
    return f"{place}: {code}" if code else place
