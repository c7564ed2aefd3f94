"""onepass: a kernel-fusion compiler for PyTorch.

import onepass
fast = torch.compile(model, backend="onepass")
print(onepass.explain(model, example))
"""

from __future__ import annotations

from .api import explain
from .backend import FallbackWarning, jit, register
from .errors import OnepassError
from .explain import Explanation

__version__ = "0.1.0"
__all__ = ["Explanation", "FallbackWarning", "OnepassError", "explain", "jit"]

register()
