"""The files that generated kernels include or call: how they are loaded, and what built kernels are known by."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

PRELUDE_FOLDER = Path(__file__).parents[1] / "codegen"


@functools.cache
def prelude_digest() -> str:
    """Changes with what generated Triton calls, and with how machine code is made of it."""
    called = [PRELUDE_FOLDER / f"triton_{name}.py" for name in ("prelude", "hardware", "nvidia")]
    made_by = [Path(__file__).with_name(f"{name}.py") for name in ("triton_kernels", "triton_private", "assembler")]
    return hashlib.sha256(b"".join(f.read_bytes() for f in (*called, *made_by))).hexdigest()


def load_module(path: Path, name: str, **given: Any) -> ModuleType:
    """A Python file as a module of its own, with some names given before it runs."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(given)
    spec.loader.exec_module(module)
    return module
