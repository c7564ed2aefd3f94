"""One graph of a program as a file that runs by itself: the part that fails, or else the graph that takes longest.

Tensors are made anew with the same shapes, strides, types and ranges of integers; nobody's data is written.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import UnusableProgram
from ..explain.capture import freshly_compiled, lent, run_backward
from ..explain.text import one_line, time_text
from .shrink import shrunk

_FILE = '''"""{title}"""

from math import inf, nan

import torch
from torch import device


class Graph(torch.nn.Module):
{attributes}
{code}

def made(shape, strides, dtype, device, low=None, high=None, grad=False):
    """A tensor of a layout; integers are between low and high."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if all(shape) else 0
    values = torch.randn(size) if low is None else torch.randint(low, high + 1, (size,))
    return values.to(device=device, dtype=dtype).as_strided(shape, strides).requires_grad_(grad)


def inputs():
    torch.manual_seed(0)
    return [
{inputs}
    ]


if __name__ == "__main__":
    import onepass

    graph = Graph()
    with torch.set_grad_enabled({grad}):
        want = graph(*inputs())
        got = torch.compile(graph, backend="onepass", options={{"strict": True}})(*inputs())
        for ours, eager in zip(got, want):
            if isinstance(eager, torch.Tensor) and eager.numel():
                print("largest difference to eager{random}:", (ours.double() - eager.double()).abs().max().item())
        print(onepass.profile(graph, *inputs()))
'''


@dataclass(slots=True)
class _Captured:
    graph: GraphModule
    inputs: list[str]
    code: str
    seconds: float = 0.0
    problem: str = ""
    left_out: int = 0  # operations that it fails without

    def shrink(self, inputs: Sequence[Any], fails: Callable[[GraphModule, list[Any]], bool]) -> None:
        """The smallest part that fails in the place of the whole."""
        before = len(self.graph.graph.nodes)
        with suppress(Exception):
            self.graph, given = shrunk(self.graph, inputs, fails)
            self.inputs, self.code = [_input_text(i) for i in given], self.graph.code
            self.left_out = before - len(self.graph.graph.nodes)


def _fails_as(kind: type[Exception], backend: Callable[..., Any], graph: GraphModule, inputs: list[Any]) -> bool:
    try:
        backend(graph, inputs)
    except Exception as error:
        return type(error) is kind
    return False


def repro_text(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: Callable[..., Any],
    name: str,
    number: int | None = None,
) -> str:
    """The file for one graph: the one of that number from 1 on, else the first that fails, else the slowest."""
    captured: list[_Captured] = []

    def capturing(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        own = _Captured(graph, [_input_text(i) for i in inputs], graph.code)
        captured.append(own)
        try:
            compiled = backend(graph, inputs)
        except Exception as error:
            own.problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            own.shrink(inputs, partial(_fails_as, type(error), backend))
            eager: Callable[..., Any] = graph.forward
            return eager

        def timed(*given: Any) -> Any:
            start = time.perf_counter()
            result = compiled(*given)
            own.seconds = time.perf_counter() - start  # of the last call, in which nothing is compiled
            return result

        return timed

    with lent(function, args, kwargs) as own:
        compiled = freshly_compiled(own.function, capturing)
        for _ in range(2):
            result = compiled(*own.args, **own.kwargs)
            if torch.is_grad_enabled():
                run_backward(result)
    return _text(_chosen(captured, number), captured, name)


def _chosen(captured: Sequence[_Captured], number: int | None) -> _Captured:
    if not captured:
        raise UnusableProgram("no tensor operation was captured", "Name a function that computes with tensors")
    if number is not None:
        if not 1 <= number <= len(captured):
            raise UnusableProgram(f"there is no graph {number}", f"Graphs are numbered 1 to {len(captured)}")
        return captured[number - 1]
    failing = next((c for c in captured if c.problem), None)
    return failing or max(captured, key=lambda c: c.seconds)


def _text(chosen: _Captured, captured: Sequence[_Captured], name: str) -> str:
    why = one_line(chosen.problem) or f"it takes {time_text(1e6 * chosen.seconds)} forward"
    part = f", {chosen.left_out} of its nodes left out" if chosen.left_out else ""
    title = f"Graph {captured.index(chosen) + 1} of {len(captured)} of {one_line(name)}{part}: {why}."
    title = title.replace("\\", "/").replace('"', "'")
    code = "\n".join(f"    {line}".rstrip() for line in chosen.code.strip().splitlines()) + "\n"
    inputs = "\n".join(f"        {text}," for text in chosen.inputs)
    attributes = "\n".join(_attributes(chosen.graph))
    draws = re.search(r"\b(dropout|rand\w*|bernoulli|multinomial|normal)\w*\(", chosen.code)
    random = ", which draws other random numbers" if draws else ""
    return _FILE.format(
        random=random, title=title, attributes=attributes, code=code, inputs=inputs, grad=torch.is_grad_enabled()
    )


def _attributes(graph: GraphModule) -> Iterator[str]:
    """Tensors that are part of the graph."""
    names = {str(n.target) for n in graph.graph.nodes if n.op == "get_attr"}
    names |= {str(n.target) for n in graph.graph.nodes if n.op == "call_module"}
    found = {name: _attribute(graph, name) for name in sorted(names)}
    if any(not isinstance(value, torch.Tensor) or not re.fullmatch(r"\w+", n) for n, value in found.items()):
        raise UnusableProgram("the graph holds graphs of its own", "Use --graph to choose another one")
    if found:
        yield "    def __init__(self):\n        super().__init__()"
        for name, value in found.items():
            yield f'        self.register_buffer("{name}", {_input_text(value)})'
        yield ""


def _attribute(graph: GraphModule, name: str) -> Any:
    value: Any = graph
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _input_text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        hint = getattr(getattr(value, "node", None), "hint", value)
        return repr(hint) if isinstance(hint, bool | int | float | None) else "None"
    shape, strides = (tuple(int(n) for n in sizes) for sizes in (value.shape, value.stride()))
    options = ""
    if not (value.is_floating_point() or value.is_complex()):
        real = value.numel() and not value.is_meta and type(value) in (torch.Tensor, torch.nn.Parameter)
        low, high = (int(value.min()), int(value.max())) if real else (0, 1)
        options = f", {low}, {high}"
    elif value.requires_grad:
        options = ", grad=True"
    return f'made({shape}, {strides}, {value.dtype}, "{value.device}"{options})'
