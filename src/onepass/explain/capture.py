"""Run a program once to see it compiled, and leave everything as it was.

`run_recorded` compiles a callable with a given backend, calls it on copies of its arguments, runs its
backward if that was not compiled yet, and returns the records. Parameters, buffers, gradients,
optimiser state and random generators are what they were before.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..analysis.reach import reached
from ..ir.record import CompileRecord
from .memoryless import has_no_memory, made_fake
from .planning import planning
from .torch_private import dynamo_config


@dataclass(frozen=True, slots=True)
class Lent:
    """A program whose runs leave nothing behind: the function itself and arguments of its own."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    memoryless: bool  # it can be planned, but not run


@contextmanager
def lent(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Lent]:
    """The program on copies of its arguments; what it holds is afterwards as it was before."""
    original = uncompiled(function)
    holders = list(_held(original))
    modules = [m for h in holders if isinstance(h, torch.nn.Module) for m in h.modules()]
    memoryless = any(map(has_no_memory, (*_tensors_of((args, kwargs)), *_stateful_tensors(holders))))
    own = made_fake(modules, (args, kwargs)) if memoryless else nullcontext(_copied((args, kwargs)))
    here = dynamo_config.patch(automatic_dynamic_shapes=False)  # sizes of an earlier call are no matter of this one
    with _preserved(holders, modules), own as (own_args, own_kwargs), planning(memoryless), here:
        yield Lent(original, own_args, own_kwargs, memoryless)


def run_recorded(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: Callable[..., Any],
    recorder: Callable[[], AbstractContextManager[list[CompileRecord]]],
) -> list[CompileRecord]:
    """The records of every graph of `function(*args, **kwargs)`, forward and backward."""
    with lent(function, args, kwargs) as own, recorder() as records:
        result = freshly_compiled(own.function, backend)(*own.args, **own.kwargs)
        directions = [record.direction for record in records]
        if directions.count("backward") < directions.count("forward"):
            run_backward(result)
    return list(records)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compile` was given, if `function` is its result; else the function itself."""
    inner = getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", None)
    return inner if callable(inner) else function


def freshly_compiled(function: Callable[..., Any], backend: Callable[..., Any] | str) -> Callable[..., Any]:
    """The function compiled as if for the first time."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # Compiled code hangs on code objects: one of our own keeps the user's function free of our entries
    # and of the limit on recompilations.
    code = entry.__code__.replace(co_name="entry")
    fresh = types.FunctionType(code, entry.__globals__, "entry", None, entry.__closure__)
    compiled: Callable[..., Any] = torch.compile(fresh, backend=backend)
    return compiled


def _copied(tree: Any) -> Any:
    """A deep copy that keeps storage sharing; non-leaf tensors become leaves of their own."""
    memo: dict[int, Any] = {}

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            detached = leaf.detach()
            # Whatever also refers to this tensor must meet the same copy.
            memo[id(leaf)] = copy.deepcopy(detached, memo).requires_grad_()
            memo[id(memo)] = [*memo.get(id(memo), []), detached]  # alive as long as its id is a key
        try:
            return copy.deepcopy(leaf, memo)
        except Exception:
            return leaf  # a lock, a generator, a handle: it cannot be copied, so it is passed as it is

    return pytree.tree_map(copy_leaf, tree)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case dict() | list() | tuple():
            for item in value.values() if isinstance(value, dict) else value:
                yield from _tensors_of(item)


def run_backward(result: Any) -> None:
    """Backward of the losses, or of all results where no result is a number. Nothing accumulates into `.grad`."""
    outputs = [t for t in _tensors_of(result) if t.requires_grad]
    outputs = [t for t in outputs if t.ndim == 0] or outputs
    if leaves := _leaves(outputs):
        torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)


def _leaves(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves an autograd graph accumulates into."""
    found: dict[int, torch.Tensor] = {id(t): t for t in outputs if t.grad_fn is None}
    start = [t.grad_fn for t in outputs if t.grad_fn is not None]
    for node in reached(start, lambda node: (n for n, _ in node.next_functions if n is not None)):
        if (variable := getattr(node, "variable", None)) is not None:
            found[id(variable)] = variable
    return list(found.values())


@contextmanager
def _preserved(holders: list[Any], modules: list[torch.nn.Module]) -> Iterator[None]:
    """Random generators and every module, optimiser and tensor that a function holds, as they were."""
    optimisers = [h for h in holders if isinstance(h, torch.optim.Optimizer)]
    attributes = [(m.__dict__, _shallow(m.__dict__)) for m in modules]
    states = [(o.state, {key: dict(value) for key, value in o.state.items()}) for o in optimisers]
    tensors = _stateful_tensors(holders)
    gradients = [(t, t.grad) for t in tensors if t.is_leaf]
    tensors += [g for _, g in gradients if g is not None]
    values = [(t, t.detach().clone()) for t in tensors if not has_no_memory(t)]
    python_state = random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            _lend_buffers(modules)
            yield
        finally:
            random.setstate(python_state)
            for current, saved in (*attributes, *states):
                _restore_mapping(current, saved)
            for tensor, gradient in gradients:
                tensor.grad = gradient
            for tensor, value in values:
                if not torch.equal(tensor.detach(), value):
                    # .data: a user's pending backward must not see a changed version.
                    tensor.data.copy_(value)


def _lend_buffers(modules: Iterable[torch.nn.Module]) -> None:
    """Put copies in place of buffers: a user's pending backward may need the untouched originals."""
    copies: dict[int, torch.Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())


def _held(function: Callable[..., Any]) -> Iterator[Any]:
    """Modules, optimisers and tensors reachable from a callable: itself, its closure, its globals."""
    stack: list[Any] = [function]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case torch.nn.Module() | torch.optim.Optimizer() | torch.Tensor():
                yield value
            case functools.partial():
                stack.extend((value.func, *value.args, *value.keywords.values()))
            case types.MethodType():
                stack.extend((value.__self__, value.__func__))
            case types.FunctionType():
                stack.extend(_captured(value))
            case list() | tuple():
                stack.extend(value)
            case dict():
                stack.extend(value.values())


def _captured(function: types.FunctionType) -> Iterator[Any]:
    found = inspect.getclosurevars(function)
    kept = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, types.FunctionType)
    yield from found.nonlocals.values()
    # Globals hold whole libraries; only state is of interest there.
    yield from (value for value in found.globals.values() if isinstance(value, kept))


def _stateful_tensors(holders: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for holder in holders:
        match holder:
            case torch.nn.Module():
                found += holder.parameters()
            case torch.optim.Optimizer():
                found += [p for group in holder.param_groups for p in group["params"]]
                found += _tensors_of(dict(holder.state))
            case _:
                found.append(holder)
    return list({id(tensor): tensor for tensor in found}.values())


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if type(value) is dict else value for key, value in attributes.items()}


def _restore_mapping(current: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for key in [k for k in current if k not in saved]:
        del current[key]
    for key, value in saved.items():
        now = current.get(key)
        if type(now) is dict and type(value) is dict:
            now.clear()
            now.update(value)
        else:
            current[key] = value
