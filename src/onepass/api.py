"""What users call beside `torch.compile(f, backend="onepass")`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .explain import Explanation, run_recorded
from .explain.profile import Profile
from .ir.target import find_target
from .profiling import Wanted, measure_program, note_issue


def explain(
    function: Callable[..., Any],
    /,
    *args: Any,
    target: str | None = None,
    operations: bool = False,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile `function(*args, **kwargs)`, forward and backward, and say what was fused and why.

    `operations`: of kernels for NVIDIA's chips, also which part of their instructions belongs to which operation.

    Takes a function, a module, or the result of `torch.compile`. It runs once, on copies of the
    arguments; parameters, buffers, gradients and random generators are left as they were.
    """
    from .backend import make_backend, record_compilations, watch_compilations

    chosen = _chosen(target, {**_uncached(operations), **(options or {})})
    with watch_compilations() as compiled:
        records = run_recorded(function, args, kwargs, make_backend(chosen), record_compilations)
    if operations:
        note_issue(compiled)
    return Explanation(records)


def profile(
    function: Callable[..., Any],
    /,
    *args: Any,
    beside: Iterable[str] = ("eager",),
    operations: bool = False,
    seconds: float = 3.0,
    target: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Profile:
    """Run `function(*args, **kwargs)`, forward and backward, and say where its time goes, kernel by kernel.

    `beside`: what it takes turns with, of "eager", "inductor" and "aot_eager". `operations`: kernels are rebuilt, too,
    without each of their operations, to see what it costs. `seconds`: that all rounds together should take. Times are
    of the device on GPUs. The program runs on copies of its arguments; what it holds is left as it was.
    """
    from .backend import make_backend, record_compilations, watch_compilations

    chosen = _chosen(target, {**_uncached(operations), **(options or {})})
    wanted = Wanted(tuple(beside), seconds, operations)
    backend = make_backend(chosen)
    return measure_program(function, args, kwargs, backend, record_compilations, watch_compilations, wanted)


def _uncached(operations: bool) -> dict[str, Any]:
    """A look into kernels needs their plans, which the cache does not keep."""
    return {"cache": False} if operations else {}


def _chosen(target: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    if target is not None:
        find_target(target)  # an unknown name is an error here, not a graph that runs as eager
    return {**(options or {}), **({"target": target} if target else {})}
