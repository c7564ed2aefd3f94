"""onepass: a kernel-fusion compiler for PyTorch.

import onepass
fast = torch.compile(model, backend="onepass")
print(onepass.explain(model, example))
"""

from __future__ import annotations

from . import explain as _package
from .api import explain, profile
from .backend import FallbackWarning, jit, register
from .errors import OnepassError
from .explain import Explanation
from .explain.profile import Profile

__version__ = "0.1.0"
__all__ = ["Explanation", "FallbackWarning", "OnepassError", "Profile", "explain", "jit", "profile"]

# The function stands where Python puts the package of its name: it shares the package's names, so that
# `import onepass.explain.measure as m` and `onepass.explain.measure` work.
explain.__dict__ = _package.__dict__
register()
