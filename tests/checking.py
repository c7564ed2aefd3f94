"""Is a compiled program right? The questions every end-to-end test asks, in one place.

`compile_direct` hands a function to the backend as dynamo would, without dynamo's tracing (faster);
`Run` is what a call did: outputs, mutated inputs, gradients; `compare` judges it against eager and a
float64 reference: integers exact, floats |ours - f64| <= 2 |eager - f64| + tolerance, the same dtypes,
strides and aliasing. ONEPASS_TEST_BACKEND names another backend, to try the tests themselves;
ONEPASS_TEST_DEVICE=cuda runs them on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

BACKEND = os.environ.get("ONEPASS_TEST_BACKEND", "onepass")
DEVICE = os.environ.get("ONEPASS_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# (relative, absolute), those of torch.testing, a little wider where sums are long.
TOLERANCE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (2e-6, 1e-5),
    torch.float16: (2e-3, 1e-4),
    torch.bfloat16: (1.6e-2, 1e-4),
}
_COMPONENT = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}

Function = Callable[..., Any]
Compiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def backend_callable(name: str = BACKEND) -> Compiler:
    """The dynamo backend of that name: takes a graph and example inputs, gives a callable."""
    if name == "onepass":
        import onepass  # noqa: F401  (registers the backend)
    from torch._dynamo.backends.registry import lookup_backend

    compiler: Compiler = lookup_backend(name)
    return compiler


def compiled(function: Function, backend: str = BACKEND, **settings: Any) -> Function:
    """torch.compile with the backend under test; internal errors are raised, not hidden by falling back."""
    if backend == "onepass":
        import onepass  # noqa: F401

        settings.setdefault("options", {"strict": True})
    result: Function = torch.compile(function, backend=backend, **settings)
    return result


def compile_direct(function: Function, tensors: Sequence[torch.Tensor], compiler: Compiler) -> Function:
    """The backend's result for `function(*tensors) -> list of tensors`, without dynamo in front."""

    def call(*args: torch.Tensor) -> Any:  # a graph names its functions by module; a lambda or exec'd text has none
        return function(*args)

    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    graph.output(graph.call_function(call, tuple(inputs)))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return compiler(module, list(tensors))


@dataclass
class Run:
    """What one call did."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]  # after the call: mutation shows here
    gradients: list[torch.Tensor | None] = field(default_factory=list)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested result, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def execute(
    function: Function, inputs: Sequence[torch.Tensor], gradients: bool, seed: int = 0, skipped: Collection[int] = ()
) -> Run:
    """Call, then differentiate a fixed random combination of the outputs, but for those at skipped positions."""
    torch.manual_seed(seed)
    outputs = tensors_of(function(*inputs))
    run = Run(outputs, list(inputs))
    if gradients:
        written = [x for x in inputs if x.requires_grad and not x.is_leaf]  # they carry gradients on
        wanted = [o for k, o in enumerate(outputs) if k not in skipped]
        run.gradients = _differentiate([*wanted, *written], [x for x in inputs if x.is_leaf], seed)
    return run


def _differentiate(outputs: list[torch.Tensor], inputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor | None]:
    wanted = [x for x in inputs if x.requires_grad]
    useful = [o for o in outputs if o.requires_grad]
    if not wanted or not useful:
        return []
    generator = torch.Generator("cpu").manual_seed(seed)
    weights = [tangent(o, generator) for o in useful]
    return list(torch.autograd.grad(useful, wanted, weights, allow_unused=True))


def tangent(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A gradient for an output whose value does not depend on the output's dtype."""
    eighths = torch.randint(-8, 9, output.shape, generator=generator, device="cpu")
    return (eighths.to(torch.float64) / 8).to(output.device, output.dtype)


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The same value in float64 (complex128 for complex), other types as they are; a leaf as it was."""
    wide = {
        **dict.fromkeys(FLOATS, torch.float64),
        torch.complex64: torch.complex128,
        torch.complex32: torch.complex128,
    }.get(tensor.dtype)
    if wide is None:
        return tensor
    return tensor.detach().to(wide).requires_grad_(tensor.requires_grad)


def fresh(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same strides, offsets, aliasing among one another and requires_grad."""
    storages: dict[int, torch.UntypedStorage] = {}
    objects: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in objects:
            objects[id(tensor)] = _copy(tensor, storages).requires_grad_(tensor.requires_grad)
    return [objects[id(tensor)] for tensor in tensors]


def _copy(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_conj() or plain.is_neg() or type(plain) is not torch.Tensor:
        return plain.clone()
    original = plain.untyped_storage()
    address = original.data_ptr()
    if not address:
        return plain.clone()
    if address not in storages:
        storages[address] = original.clone()
    empty = torch.empty(0, dtype=plain.dtype)
    return empty.set_(storages[address], plain.storage_offset(), plain.shape, plain.stride())


class Mismatch(AssertionError):
    """The compiled program did something else than eager."""


def compare(
    ours: Run,
    eager: Run,
    reference: Run | None,
    floor: torch.dtype | None = None,
    absolute: float = 0.0,
    draws: Sequence[Run] = (),
) -> None:
    """Raise Mismatch where values, dtypes or shapes differ.

    `floor` is the coarsest float inside the program, `absolute` widens the absolute tolerance to at least that;
    with `draws`, eager's error is the largest of its own and of theirs.
    """
    groups = [("output", "outputs"), ("input", "inputs"), ("gradient", "gradients")]
    for word, name in groups:
        mine, theirs = getattr(ours, name), getattr(eager, name)
        exact = getattr(reference, name) if reference is not None else None
        if len(mine) != len(theirs):
            raise Mismatch(f"{len(mine)} {name}, eager has {len(theirs)}")
        if exact is not None and len(exact) != len(theirs):
            exact = None
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            more = [getattr(draw, name)[i] for draw in draws]
            compare_tensor(f"{word} {i}", a, b, exact[i] if exact is not None else None, floor, absolute, more)


def compare_tensor(
    what: str,
    ours: torch.Tensor | None,
    eager: torch.Tensor | None,
    reference: torch.Tensor | None,
    floor: torch.dtype | None = None,
    absolute: float = 0.0,
    draws: Sequence[torch.Tensor | None] = (),
) -> None:
    """One tensor. Where there is no reference, eager is it."""
    if ours is None or eager is None:
        # An unused input's gradient may be None or zeros.
        present = ours if ours is not None else eager
        if present is not None and bool(present.detach().abs().max() != 0 if present.numel() else False):
            raise Mismatch(f"{what}: a gradient here, none there")
        return
    if ours.dtype != eager.dtype or ours.shape != eager.shape:
        raise Mismatch(f"{what}: {describe(ours)}, eager gives {describe(eager)}")
    if ours.layout != eager.layout:
        raise Mismatch(f"{what}: layout {ours.layout}, eager gives {eager.layout}")
    ours, eager = dense(ours), dense(eager)
    if not (eager.is_floating_point() or eager.is_complex()):
        if not torch.equal(ours, eager):
            raise Mismatch(f"{what}: {int((ours != eager).sum())} of {ours.numel()} elements are not equal to eager's")
        return
    if reference is not None and reference.shape != eager.shape:
        reference = None
    relative, least = tolerance(eager.dtype, floor)
    reference = dense(reference) if reference is not None else eager
    others = [_wide(dense(draw)) for draw in draws if draw is not None]
    _compare_floats(what, _wide(ours), _wide(eager), _wide(reference), relative, max(least, absolute), others)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _compare_floats(
    what: str,
    ours: torch.Tensor,
    eager: torch.Tensor,
    reference: torch.Tensor,
    relative: float,
    absolute: float,
    draws: Sequence[torch.Tensor],
) -> None:
    # What eager overflows or makes NaN, a better computation may keep finite: eager itself decides there.
    odd = ~torch.isfinite(eager)
    same = torch.where(torch.isnan(eager), torch.isnan(ours), ours == eager)
    finite = torch.isfinite(reference)
    allowed = odd & finite & ((ours - reference).abs() <= absolute + relative * reference.abs())
    bad_odd = odd & ~same & ~allowed
    reference = torch.where(odd, torch.zeros_like(reference), reference)
    error = torch.where(odd, torch.zeros_like(ours), (ours - reference).abs())
    theirs = torch.where(odd, torch.zeros_like(eager), (eager - reference).abs())
    for draw in draws:
        theirs = theirs.fmax((draw - reference).abs().nan_to_num(0, 0, 0))
    # A reference that overflows where eager does not (or the reverse) says nothing about us.
    useless = ~torch.isfinite(theirs)
    error = torch.where(useless, (ours - eager).abs(), error)
    theirs = torch.where(useless, torch.zeros_like(theirs), theirs)
    size = torch.where(useless, eager.abs(), reference.abs())
    limit = 2 * theirs + absolute + relative * size
    bad = bad_odd | ~(error <= limit)
    if bool(bad.any()):
        where = torch.nonzero(bad)[0].tolist()
        at = tuple(where)
        raise Mismatch(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements differ; at {where} ours {ours[at].item()!r}, "
            f"eager {eager[at].item()!r}, float64 {reference[at].item()!r}; error {error[at].item():.3g} "
            f"above 2 x {theirs[at].item():.3g} + tolerance = {limit[at].item():.3g}"
        )


def tolerance(dtype: torch.dtype, floor: torch.dtype | None) -> tuple[float, float]:
    """Relative and absolute, the coarser of the tensor's own type and of the program's coarsest float."""
    own = TOLERANCE[_COMPONENT.get(dtype, dtype)]
    inside = TOLERANCE[floor] if floor is not None else own
    return max(own[0], inside[0]), max(own[1], inside[1])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Values in a plain strided tensor."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def describe(tensor: torch.Tensor) -> str:
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else "-"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {strides}"


def strides_that_matter(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of dimensions longer than 1; None where no element has an address."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def compare_strides(ours: Run, *acceptable: Run) -> None:
    """Outputs are laid out as one of the acceptable runs has them."""
    for i, mine in enumerate(ours.outputs):
        wanted = [strides_that_matter(run.outputs[i]) for run in acceptable]
        if strides_that_matter(mine) not in wanted:
            raise Mismatch(f"output {i}: {describe(mine)}, eager gives {describe(acceptable[0].outputs[i])}")


def aliasing(run: Run) -> set[tuple[str, int, int]]:
    """Which outputs share storage with which inputs and with one another."""
    ins, outs = [storage(x) for x in run.inputs], [storage(x) for x in run.outputs]
    found = {("input", i, j) for i, o in enumerate(outs) for j, x in enumerate(ins) if o == x and o is not None}
    pairs = ((i, j) for i in range(len(outs)) for j in range(i))
    return found | {("output", i, j) for i, j in pairs if outs[i] == outs[j] and outs[i] is not None}


def storage(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided:
        return None
    address: int = tensor.untyped_storage().data_ptr()
    return address or None


def compare_aliasing(ours: Run, *acceptable: Run) -> None:
    mine = aliasing(ours)
    if all(mine != aliasing(run) for run in acceptable):
        raise Mismatch(f"aliasing {sorted(mine)}, eager has {sorted(aliasing(acceptable[0]))}")


def near_as_eager(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], slack: float = 1e-3) -> None:
    """A program compiled for the interpreter: results and gradients are nearly as near to float64's as eager's."""

    def found(function: Callable[..., torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        own = [x.detach().clone() for x in inputs]
        own = [x.to(dtype) if dtype is not None and x.is_floating_point() else x for x in own]
        differentiated = [x.requires_grad_() for x in own if x.is_floating_point()]
        result = function(*own)
        return [result, *torch.autograd.grad(result.double().square().sum(), differentiated)]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="onepass", options={"target": "triton-interpret", "cache": False})
    for exact, eager, own in zip(found(function, torch.float64), found(function), found(compiled), strict=True):
        off, allowed = ((t.double() - exact).abs().max() for t in (own, eager))
        assert own.isfinite().all() and off <= 2 * allowed + slack * (1 + exact.abs().max()), (off, allowed)
