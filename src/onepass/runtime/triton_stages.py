"""Triton's stages, one after another: from a function to machine code, without its cache.

`triton.compile` first makes a key of the whole package and of every function a kernel calls, and writes each stage
as text to a cache of its own; a kernel that comes here is known to be new, and onepass keeps the result itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# CPython 3.11 fails where two threads make syntax trees at once; reading a function is Python's work from end to end.
_reading = threading.Lock()


@dataclass(frozen=True, slots=True)
class Staged:
    """What the stages gave as text or bytes, by the stage's name, and what they said of the kernel."""

    texts: Mapping[str, Any]
    facts: Mapping[str, Any]


Edits = Mapping[str, Callable[[str], str]]  # of the text of a stage, before the next


def run_stages(function: Any, target: Any, options: dict[str, Any], edits: Edits, instead: Mapping[str, Any]) -> Staged:
    """Compile an `ASTSource` for a `GPUTarget`. `instead`: modules in the place of others, by the others' names."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options({**options, **function.parse_options()})
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, parsed, function.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(parsed), {**backend.get_module_map(), **instead}
    facts: dict[str, Any] = {"target": target, **vars(parsed)}
    with _reading:
        module = function.make_ir(target, parsed, functions, modules, context)
    texts: dict[str, Any] = {}
    for name, stage in stages.items():
        module = stage(module, facts)
        if isinstance(module, str) and name in edits:
            module = edits[name](module)
        if isinstance(module, str | bytes):
            texts[name] = module
    return Staged(texts, facts)


def _after_fork() -> None:
    """Whoever was reading is not in the child."""
    global _reading
    _reading = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
