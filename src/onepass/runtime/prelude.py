"""The files that generated kernels include or call, and what a built kernel is known by because of them."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

PRELUDE_FOLDER = Path(__file__).parents[1] / "codegen"


@functools.cache
def prelude_digest() -> str:
    """Changes with what generated Triton calls, and with how machine code is made of it."""
    called = [PRELUDE_FOLDER / f"triton_{name}.py" for name in ("prelude", "hardware", "nvidia")]
    made_by = [Path(__file__).with_name(f"{name}.py") for name in ("triton_kernels", "triton_private", "assembler")]
    return hashlib.sha256(b"".join(f.read_bytes() for f in (*called, *made_by))).hexdigest()
