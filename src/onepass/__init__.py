"""onepass: a kernel-fusion compiler for PyTorch.

import onepass
fast = torch.compile(model, backend="onepass")
print(onepass.explain(model, example))
print(onepass.profile(model, example))
onepass.export(model, example, path="model.onepass")
run = onepass.load("model.onepass")  # needs nothing of what compiles
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .version import VERSION

if TYPE_CHECKING:
    from .api import explain, profile
    from .backend import FallbackWarning, jit
    from .errors import OnepassError
    from .explain import Explanation
    from .explain.profile import Profile
    from .exporting import export
    from .plugging import KernelWarning, kernel
    from .plugging import replace_by as replace
    from .runtime.loading import load
    from .steering import fuse, keep, no_fuse, recompute, save

__version__ = VERSION
__all__ = [
    "Explanation",
    "FallbackWarning",
    "KernelWarning",
    "OnepassError",
    "Profile",
    "explain",
    "export",
    "fuse",
    "jit",
    "keep",
    "kernel",
    "load",
    "no_fuse",
    "profile",
    "recompute",
    "replace",
    "save",
]


def load_all() -> None:
    """Import everything and make the backend known to torch: seconds, which some uses of the package do without."""
    package = import_module(".explain", __name__)
    from .api import explain, profile
    from .backend import FallbackWarning, jit, register
    from .errors import OnepassError
    from .explain import Explanation
    from .explain.profile import Profile
    from .exporting import export
    from .plugging import KernelWarning, kernel
    from .plugging import replace_by as replace
    from .runtime.loading import load
    from .steering import fuse, keep, no_fuse, recompute, save

    # The function stands where Python puts the package of its name: it shares the package's names, so that
    # `import onepass.explain.measure as m` and `onepass.explain.measure` work.
    explain.__dict__ = package.__dict__
    named = Explanation, FallbackWarning, KernelWarning, OnepassError, Profile
    public = *named, explain, export, fuse, jit, keep, kernel, load, no_fuse, profile, recompute, replace, save
    globals().update(zip(__all__, public, strict=True))
    register()


def torch_backend(graph: Any, example_inputs: Any, **settings: Any) -> Any:
    """What torch finds by the entry point. It is here at once: threads that ask at the same time would else each wait
    for an import and then register it, and torch refuses the second."""
    from .backend import onepass

    return onepass(graph, example_inputs, **settings)


class _Package(ModuleType):
    """This module, whose `explain` is the function even after Python has imported the package of that name."""

    @property
    def explain(self) -> Any:
        if "explain" not in globals():
            load_all()
        return globals()["explain"]

    @explain.setter
    def explain(self, package: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package


def _is_command() -> bool:
    """Whether this process is the command `onepass`, or `python -m onepass`."""
    name = sys.argv[0].replace("\\", "/").rsplit("/", 1)[-1] if sys.argv else ""
    return name.removesuffix(".exe") == "onepass" or (name == "-m" and sys.orig_argv[1:3] == ["-m", "onepass"])


def _is_installed() -> bool:
    """Whether torch finds the backend by itself."""
    return bool(metadata.entry_points(group="torch_dynamo_backends", name="onepass"))


def __getattr__(name: str) -> Any:
    if name == "load":  # needs no compiler
        from .runtime.loading import load

        return load
    if name in __all__:
        load_all()
        return globals()[name]
    raise AttributeError(f"module 'onepass' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, "__version__"))


if not (_is_command() or _is_installed()):
    load_all()
