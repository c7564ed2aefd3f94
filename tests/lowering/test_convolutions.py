"""Convolutions on GPUs: the bias and the change of memory format belong to the kernels around the library's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_function

import onepass
from onepass.autograd.partition import partition
from onepass.backend import make_backend, record_compilations
from onepass.lowering import decomposition_table

from ..checking import DEVICE, compare, compile_direct, execute, fresh, strides_that_matter, to_float64
from ..unbuilt import unbuilt

aten = torch.ops.aten
GPU = (
    {"strict": True, "cache": False}
    if DEVICE == "cuda"
    else {"target": "triton-interpret", "strict": True, "cache": False}
)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def numbers(*shape: int, last: bool = False) -> torch.Tensor:
    x = torch.randint(-8, 9, shape, generator=torch.Generator(DEVICE).manual_seed(sum(shape))) / 8
    return x.to(memory_format=LAST[len(shape)]) if last else x


def between(convolution: Callable[..., torch.Tensor], **geometry: Any) -> Callable[..., list[torch.Tensor]]:
    """The convolution with element-wise operations on both sides."""
    return lambda x, weight, *bias: [torch.tanh(convolution(torch.sigmoid(x), weight, *bias, **geometry))]


# name -> (function, its operands)
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "1d": (between(F.conv1d, padding=1), (numbers(2, 4, 7), numbers(6, 4, 3), numbers(6))),
    "1d transposed input": (between(F.conv1d), (numbers(2, 7, 4).mT, numbers(6, 4, 3), numbers(6))),
    "2d": (between(F.conv2d, stride=2), (numbers(2, 4, 6, 7), numbers(6, 4, 3, 3), numbers(6))),
    "2d, weight last": (between(F.conv2d), (numbers(2, 4, 6, 7), numbers(6, 4, 3, 3, last=True), numbers(6))),
    "2d, input last": (between(F.conv2d), (numbers(2, 4, 6, 7, last=True), numbers(6, 4, 3, 3), numbers(6))),
    "2d, 1 x 1": (between(F.conv2d), (numbers(2, 4, 1, 1), numbers(6, 4, 1, 1, last=True), numbers(6))),
    "2d, no bias": (between(F.conv2d), (numbers(2, 4, 6, 7), numbers(6, 4, 3, 3, last=True))),
    "2d, one channel": (between(F.conv2d), (numbers(2, 1, 6, 7), numbers(6, 1, 3, 3, last=True), numbers(6))),
    "no batch": (between(F.conv2d), (numbers(4, 6, 7), numbers(6, 4, 3, 3), numbers(6))),
    "groups": (between(F.conv2d, groups=2), (numbers(2, 4, 6, 7), numbers(6, 2, 3, 3, last=True), numbers(6))),
    "depthwise": (between(F.conv2d, groups=4), (numbers(2, 4, 6, 7), numbers(4, 1, 3, 3), numbers(4))),
    "3d": (between(F.conv3d), (numbers(2, 3, 4, 5, 4), numbers(4, 3, 2, 2, 2, last=True), numbers(4))),
    "transposed 1d": (between(F.conv_transpose1d, stride=2), (numbers(2, 4, 5), numbers(4, 6, 3), numbers(6))),
    "transposed": (
        between(F.conv_transpose2d, stride=2, groups=2, output_padding=1),
        (numbers(2, 4, 5, 4), numbers(4, 3, 3, 3, last=True), numbers(6)),
    ),
}  # fmt: skip


def graphs(function: Callable[..., Any], *operands: torch.Tensor, target: str = "sm_90") -> list[torch.fx.Graph]:
    """The graphs that are compiled: forward, and backward where operands have gradients."""
    found: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(module.graph)
        return module.forward

    table = decomposition_table(target)
    run = aot_function(function, fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=table)
    (result,) = run(*operands)
    if result.requires_grad:
        result.sum().backward()
    return found


def calls(graph: torch.fx.Graph, target: Any) -> list[torch.fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_strides_are_eagers(name: str, training: bool, dtype: torch.dtype) -> None:
    function, operands = CASES[name]
    given = [x.detach().to(dtype).requires_grad_(training) for x in operands]
    ours = compile_direct(function, given, make_backend(GPU))
    wide = execute(function, [to_float64(x) for x in given], training)
    got, expected = execute(ours, fresh(given), training), execute(function, fresh(given), training)
    if dtype is torch.float32:
        compare(got, expected, wide)
    for mine, true in zip((*got.outputs, *got.gradients), (*wide.outputs, *wide.gradients), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=2**-5, atol=2**-5 if dtype is torch.bfloat16 else 1e-4)
    for mine, theirs in zip(got.outputs, expected.outputs, strict=True):
        assert strides_that_matter(mine) == strides_that_matter(theirs)


def test_an_empty_batch() -> None:
    """The gradient of its weight is zeros in eager's format, which torch's rules for shapes do not know of others."""
    run = torch.compile(between(F.conv2d), backend="onepass", options=GPU)
    found = []
    for function in (run, between(F.conv2d)):
        x, weight = (y.bfloat16().requires_grad_() for y in (numbers(0, 4, 6, 7), numbers(6, 4, 3, 3)))
        found.append(torch.autograd.grad(function(x, weight)[0].sum(), (x, weight)))
    torch.testing.assert_close(*found, check_stride=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_library_has_nothing_to_copy_or_add(name: str, dtype: torch.dtype) -> None:
    """It computes with 16-bit numbers in channels-last, whatever it is given."""
    function, operands = CASES[name]
    forward, backward = graphs(function, *(x.detach().to(dtype).requires_grad_() for x in operands))
    (call,) = calls(forward, aten.convolution.default)
    assert call.args[2] is None
    (gradient,) = calls(backward, aten.convolution_backward.default)
    assert gradient.args[-1] == [True, True, False]
    if call.meta["val"].ndim < 4:
        return
    is_last = dtype is torch.bfloat16 or any(x.ndim > 3 and x.stride(1) == 1 for x in operands)
    memory_format = LAST[call.meta["val"].ndim] if is_last else torch.contiguous_format
    weights = (call.args[1], gradient.args[2]) if dtype is torch.bfloat16 and name != "2d, input last" else ()
    for node in (call, call.args[0], *gradient.args[:2], *weights):
        assert node.meta["val"].is_contiguous(memory_format=memory_format)


@pytest.mark.skipif(DEVICE != "cpu", reason="of tensors on a CPU")
def test_on_a_cpu_the_library_does_both() -> None:
    function, operands = CASES["2d, weight last"]
    for target in ("cpu", "auto"):
        (graph,) = graphs(function, *operands, target=target)
        (call,) = calls(graph, aten.convolution.default)
        assert call.args[2] is not None
        assert not calls(graph, aten.clone.default)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64][DEVICE != "cpu" :])  # no integers on a GPU
def test_other_types_stay_whole(dtype: torch.dtype) -> None:
    x, weight, bias = (x.to(dtype) for x in CASES["2d"][1])
    run = torch.compile(lambda *xs: F.conv2d(*xs) + 1, backend="onepass", options=GPU)
    torch.testing.assert_close(run(x, weight, bias), F.conv2d(x, weight, bias) + 1)


def test_one_program_serves_every_size() -> None:
    run = onepass.jit(lambda *xs: between(F.conv2d)(*xs)[0], dynamic=True, fullgraph=True, options=GPU)
    weight, bias = numbers(6, 4, 3, 3, last=True), numbers(6)
    with record_compilations() as records:
        for batch, side in (
            (2, 7),
            (3, 9),
            (5, 12),
        ):  # sizes that differ from all others, or dynamo takes them for equal
            x = numbers(batch, 4, side, side)
            torch.testing.assert_close(run(x, weight, bias), between(F.conv2d)(x, weight, bias)[0])
    assert len(records) == 1


def test_a_norm_a_convolution_and_a_sum_are_two_kernels() -> None:
    """The first writes the format that the convolution computes in, the second adds the bias."""

    def block(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = F.silu(F.layer_norm(x.flatten(2), (256,)).view(x.shape) * scale)
        return x + F.conv2d(y, weight, bias, padding=1)

    operands = numbers(4, 64, 16, 16), numbers(64, 1, 1), numbers(64, 64, 3, 3, last=True), numbers(64)
    with unbuilt():
        explained = onepass.explain(block, *(x.bfloat16() for x in operands), target="sm_90", options={"strict": True})
    (graph,) = explained.graphs
    assert len(graph.kernels) == 2 and len(graph.externs) == 1, str(explained)


def test_what_lies_between_convolutions_is_in_their_format() -> None:
    """The input is copied once; the first result is scaled and stored as the second convolution reads it."""

    def block(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = torch.relu(F.conv2d(x, weight, padding=1) * scale)
        return torch.relu(F.conv2d(y, weight, padding=1) * scale + y)

    operands = numbers(4, 64, 16, 16), numbers(64, 64, 3, 3), numbers(64, 1, 1)
    with unbuilt():
        explained = onepass.explain(block, *(x.bfloat16() for x in operands), target="sm_90", options={"strict": True})
    (graph,) = explained.graphs
    one = 2 * 4 * 64 * 16 * 16
    written = sorted(k.bytes_written for k in graph.kernels)
    assert written == [one, one, 2 * 64 * 64 * 9 + one], str(explained)  # input and weight share a launch
    assert len(graph.externs) == 2
