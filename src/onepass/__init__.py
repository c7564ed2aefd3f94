"""onepass: a kernel-fusion compiler for PyTorch.

    import onepass
    fast = torch.compile(model, backend="onepass")
    print(onepass.explain(model, example))
"""

from __future__ import annotations

import torch._dynamo

from .api import explain
from .backend import FallbackWarning, jit, onepass
from .errors import OnepassError
from .explain import Explanation

__version__ = "0.1.0"
__all__ = ["Explanation", "FallbackWarning", "OnepassError", "explain", "jit"]

if "onepass" not in torch._dynamo.list_backends(()):  # run from a source folder: no entry point
    torch._dynamo.register_backend(compiler_fn=onepass, name="onepass")
