"""What users call beside `torch.compile(f, backend="onepass")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .explain import Explanation, run_recorded
from .ir.target import find_target


def explain(
    function: Callable[..., Any],
    /,
    *args: Any,
    target: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile `function(*args, **kwargs)`, forward and backward, and say what was fused and why.

    Takes a function, a module, or the result of `torch.compile`. It runs once, on copies of the
    arguments; parameters, buffers, gradients and random generators are left as they were.
    """
    from .backend import make_backend, record_compilations

    if target is not None:
        find_target(target)  # an unknown name is an error here, not a graph that runs as eager
    chosen = {**(options or {}), **({"target": target} if target else {})}
    return Explanation(run_recorded(function, args, kwargs, make_backend(chosen), record_compilations))
