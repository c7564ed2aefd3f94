"""Scans give eager's values: every operation, type, dimension and layout, on threads and tiles, and backward."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from tests.checking import Run, compare, execute, fresh, tensors_of, to_float64
from torch import Tensor
from torch._functorch.aot_autograd import aot_function

import onepass
from onepass.compilation import compile_graph
from onepass.ir.options import Options
from onepass.ir.record import CompileRecord
from onepass.ir.target import find_target
from onepass.lowering.torch_private import associative_scan_op

from .tracing import Traced

TARGETS = ("cpu", "triton-interpret")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
SMOOTH = (torch.cumsum, torch.cumprod, torch.logcumsumexp)
Function = Callable[[Tensor], list[Tensor]]


def compiled(function: Callable[..., object], target: str, **settings: object) -> Callable[..., object]:
    if target != "cpu":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    return onepass.jit(function, options={"target": target, "strict": True}, **settings)


def every_scan(x: Tensor) -> list[Tensor]:
    """All operations along all dimensions, counted from both ends."""
    found: list[Tensor] = []
    for dim in range(-1, x.ndim - 1):
        found += [x.cumsum(dim), x.cumprod(dim), *x.cummax(dim), *x.cummin(dim)]
        if x.is_floating_point():
            found.append(x.logcumsumexp(dim))
    return found


def check(function: Function, x: Tensor, target: str) -> None:
    ours, eager = (tensors_of(f(x)) for f in (compiled(function, target), function))
    # positions of extremes that float64 tells apart, and 16 bits do not, are eager's
    exact = None if not x.is_floating_point() else Run(tensors_of(function(to_float64(x))), [])
    if exact is not None:
        exact.outputs = [e if e.is_floating_point() else t for e, t in zip(exact.outputs, eager, strict=True)]
    compare(Run(ours, []), Run(eager, []), exact)
    assert [o.stride() for o in ours] == [o.stride() for o in eager]


def example(dtype: torch.dtype, *shape: int) -> Tensor:
    torch.manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64).to(dtype)
    low, high = {torch.bool: (0, 2), torch.uint8: (0, 5)}.get(dtype, (-3, 4))
    return torch.randint(low, high, shape).to(dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_types(dtype: torch.dtype, target: str) -> None:
    check(every_scan, example(dtype, 3, 70), target)


@pytest.mark.parametrize("target", TARGETS)
def test_layouts(target: str) -> None:
    check(every_scan, example(torch.float32, 5, 67, 3).permute(2, 0, 1), target)
    check(every_scan, example(torch.float32, 8, 66)[::2, 1::2], target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (1, 1, 5), (3, 0), (0, 4)])
def test_few_elements(shape: tuple[int, ...], target: str) -> None:
    dims = range(-1, max(1, len(shape)) - 1)

    def function(x: Tensor) -> list[Tensor]:
        return [y for d in dims for y in (x.cumsum(d) + 1, x.cumprod(d), *x.cummax(d), x.logcumsumexp(d))]

    x = example(torch.float32, *shape)
    if shape == (3, 0):  # eager has no extremes of nothing
        check(lambda x: [x.cumsum(0), x.cumsum(1), x.cumprod(1)], x, target)
    else:
        check(function, x, target)


@pytest.mark.parametrize("target", TARGETS)
def test_ties_and_numbers_that_are_none(target: str) -> None:
    inf, nan = math.inf, math.nan
    rows = [
        [1, 2, 2, 1, 2],
        [nan, 1, nan, 2, 3],
        [-inf, -inf, -inf, 0, inf],
        [inf, -inf, inf, nan, 1],
        [0.0, -0.0, 0, 1, 0],
    ]
    check(every_scan, torch.tensor(rows), target)
    check(lambda x: list(x.cummax(-1)) + list(x.cummin(-1)), torch.tensor([[3, 3, 1, 3, 0, 0]]), target)


def test_accumulates_as_widely_as_eager() -> None:
    """A float32 scan has float64 states on a CPU, a 16-bit one float32 states."""
    x = torch.rand(3, 20000) * 1e-3 + 1000
    check(lambda x: [x.cumsum(-1), x.logcumsumexp(-1)], x, "cpu")
    check(lambda x: [x.cumsum(-1)], torch.ones(2, 5000, dtype=torch.bfloat16) / 4, "cpu")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.int64, torch.float64])
def test_result_of_another_type(dtype: torch.dtype, target: str) -> None:
    x = example(torch.float32, 4, 33)
    check(lambda x: [x.cumsum(-1, dtype=dtype), x.cumprod(0, dtype=dtype)], x, target)


def gated(x: Tensor, g: Tensor, dim: int) -> Tensor:
    return (torch.sigmoid(g) * x).cumsum(dim) * F.silu(g)


FUSED: dict[str, Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]] = {
    "gated rows": lambda x, g: gated(x, g, -1),
    "gated columns": lambda x, g: gated(x, g, 0),
    "from the end": lambda x, g: x.flip(-1).cumsum(-1).flip(-1) * g,
    "from the end, columns": lambda x, g: (x * g).flip(0).logcumsumexp(0).flip(0),
    "both ways": lambda x, g: x.cumsum(-1) * g.flip(-1).cumsum(-1).flip(-1),
    "softmax, then a scan": lambda x, g: x.softmax(-1).cumsum(-1) * g,
    "reductions of a scan": lambda x, g: (x.cumsum(-1).sum(-1), (g * x.cumsum(-1)).amax(-1)),
    "a scan over its maximum": lambda x, g: x.cumsum(-1) / (1 + x.cumsum(-1).abs().amax(-1, keepdim=True)),
    "scan of a scan": lambda x, g: (x.cumsum(-1) * 0.1).cumsum(-1) + g,
    "two scans": lambda x, g: (x.cumsum(-1), (g * 0.1).cumprod(-1), (x + g).cumsum(-1)),
    "along both axes": lambda x, g: x.cumsum(0).cumsum(1) + g,
    "shifted": lambda x, g: x.cumsum(-1)[:, 2:] - x.cumsum(-1)[:, :-2] + g[:, 1:-1],
    "one position before": lambda x, g: torch.cat([g[:, :1], x.cumsum(-1)[:, :-1]], -1) * x.cumsum(-1),
    "one before, from the end": lambda x, g: F.pad(x.flip(-1).cummax(-1)[0].flip(-1)[:, 1:], (0, 1), value=3.0) * g,
    "transposed": lambda x, g: x.cumsum(-1).t().contiguous() * 2,
    "reshaped": lambda x, g: x.view(-1).cumsum(0).view(x.shape) * g,
    "padded": lambda x, g: torch.cat([F.pad(x, (1, 0)).cumsum(-1), g.cumsum(-1)], -1),
    "gathered": lambda x, g: x.flatten()[(g > 0).flatten().cumsum(0) - 1],
    "repeated": lambda x, g: x.cumsum(-1)[:, None, :] * g[None],
    "the same for all columns": lambda x, g: x[:, 0].cumsum(0)[:, None] * g,
    "the same for all rows": lambda x, g: x[0].cumsum(0) * g,
    "one column": lambda x, g: x.cumsum(-1)[:, -1] + g.cumsum(0)[0, 0],
    "recurrence": lambda x, g: torch.sigmoid(g).cumprod(-1) * (x / torch.sigmoid(g).cumprod(-1)).cumsum(-1),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FUSED)
def test_around_scans(name: str, target: str) -> None:
    torch.manual_seed(0)
    inputs, function = (torch.randn(6, 90), torch.randn(6, 90)), FUSED[name]
    if name == "recurrence":
        inputs = inputs[0][:, :9], inputs[1][:, :9]
    ours, eager = (Run(tensors_of(f(*inputs)), []) for f in (compiled(function, target), function))
    compare(ours, eager, Run(tensors_of(function(*map(to_float64, inputs))), []))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["gated rows", "from the end", "reductions of a scan", "softmax, then a scan"])
def test_sweeps_of_several_tiles(name: str, target: str) -> None:
    """Rows too long for a tile: the state goes from tile to tile, the last of which is not full."""
    torch.manual_seed(0)
    inputs, function = (torch.randn(2, 9001), torch.randn(2, 9001)), FUSED[name]
    ours, eager = (Run(tensors_of(f(*inputs)), []) for f in (compiled(function, target), function))
    compare(ours, eager, Run(tensors_of(function(*map(to_float64, inputs))), []))


LONG: dict[str, Function] = {
    "sum": lambda x: [(x * 2).cumsum(0) + 1],
    "sum from the end": lambda x: [x.flip(0).cumsum(0).flip(0)],
    "product": lambda x: [(1 + x * 1e-3).cumprod(0)],
    "extremes": lambda x: [*x.cummax(0), *x.round().cummin(0)],
    "two scans": lambda x: [x.cumsum(0), (x > 0).cumsum(0)],
    "sum of few exponentials": lambda x: [torch.where(x > 3, x, -math.inf).flip(0).logcumsumexp(0)],
    "sum of exponentials": lambda x: [x.logcumsumexp(0)],
}


@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.parametrize("name", LONG)
def test_few_long_rows(name: str, columns: tuple[int, ...]) -> None:
    """Programs share a row out in chunks, the last of which is shorter."""
    torch.manual_seed(0)
    check(LONG[name], torch.randn(70001, *columns), "cpu")


def test_few_long_rows_of_any_length() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 2).flip(0).cumsum(0).flip(0) + x.cumsum(0)

    ours = compiled(function, "cpu", dynamic=True)
    for length in (100_001, 70_000, 64, 3):
        x = torch.rand(length)
        compare(Run([ours(x)], []), Run([function(x)], []), Run([function(x.double())], []))


def test_few_long_rows_on_tiles() -> None:
    torch.manual_seed(0)
    x = torch.randn(70001, 3)
    check(lambda x: [x.cumsum(0), x.flip(0).cumsum(0).flip(0)], x, "triton-interpret")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["gated rows", "gated columns", "from the end", "softmax, then a scan"])
def test_dynamic_sizes(name: str, target: str) -> None:
    function = FUSED[name]
    ours = compiled(function, target, dynamic=True)
    for shape in ((5, 70), (17, 33), (130, 5), (2, 2), (3, 1100)):
        inputs = torch.randn(shape), torch.randn(shape)
        torch.testing.assert_close(ours(*inputs), function(*inputs))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", ["gated rows", "gated columns", "softmax, then a scan", "both ways", "products", "exponentials"]
)
def test_gradients(name: str, target: str) -> None:
    more = {
        "products": lambda x, g: (x * 0.1 + 1).cumprod(-1) * g,
        "exponentials": lambda x, g: x.logcumsumexp(-1) * g + x.cummax(-1)[0],
    }
    function = (FUSED | more)[name]
    torch.manual_seed(0)
    inputs = [torch.randn(4, 40, requires_grad=True) for _ in range(2)]
    runs = [execute(f, fresh(inputs), True) for f in (compiled(function, target), function)]
    compare(*runs, execute(function, [to_float64(x) for x in inputs], True))


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    """h = a * h + b along the rows, step by step."""
    h, found = torch.zeros_like(a[:, 0]), []
    for k in range(a.shape[1]):
        h = a[:, k] * h + b[:, k]
        found.append(h)
    return torch.stack(found, 1)


def pairs(a: Tensor, b: Tensor) -> Tensor:
    """The same as dynamo hands it over on a GPU: torch's scan of pairs runs along the first dimension."""
    return 2 * associative_scan_op(lambda a, b, c, d: [a * c, c * b + d], [a.t(), b.t()], ())[1].t()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear_recurrences(dtype: torch.dtype, target: str) -> None:
    records: list[CompileRecord] = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        found = compile_graph(graph, find_target(target), Options(target=target, cache=False), "inference")
        records.append(found.record)
        return make_boxed_func(lambda *arguments: found.call(list(arguments)))

    torch.manual_seed(0)
    a, b = torch.rand(3, 5000).to(dtype), torch.randn(3, 5000).to(dtype)
    found = aot_function(pairs, fw_compiler=compiler)(a, b)
    torch.testing.assert_close(found, (2 * recurrence(a.double(), b.double())).to(dtype))
    (record,) = records
    assert len(record.kernels) == 1 and not record.externs


def test_steps_of_a_scan() -> None:
    """A step that is a monoid is a scan of it; any other runs as eager does, with the reason."""
    x = torch.rand(9, 4)

    def traced(step: Callable[..., list[Tensor]]) -> tuple[Tensor, list[str]]:
        run = Traced(lambda x: associative_scan_op(step, [x], ())[0])
        return run(x), [e.why for e in run.program.externs()]

    steps: list[tuple[Callable[..., list[Tensor]], Tensor]] = [
        (lambda a, b: [a + b], x.cumsum(0)),
        (lambda a, b: [b * a], x.cumprod(0)),
        (lambda a, b: [torch.maximum(a, b)], x.cummax(0)[0]),
    ]
    for step, expected in steps:
        result, reasons = traced(step)
        torch.testing.assert_close(result, expected)
        assert reasons == []
    _, reasons = traced(lambda a, b: [a * b + 1])
    assert reasons[0] == "a step that is no known monoid"


def test_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.cumsum(-1).sum(-1)
        x.cumsum_(-1)
        return y + x.amax(-1)

    inputs = torch.randn(5, 80)
    runs = [execute(f, [inputs.clone()], False) for f in (compiled(function, "cpu"), function)]
    compare(*runs, None)


def test_integers_have_no_exponentials() -> None:
    """Eager's error, not another one."""
    with pytest.raises((RuntimeError, NotImplementedError), match="not implemented"):
        compiled(lambda x: x.logcumsumexp(0), "cpu")(torch.arange(5))


@pytest.mark.rotating
@pytest.mark.parametrize("target", TARGETS)
def test_random(target: str) -> None:
    """Operations before, along and after, over shapes, types and layouts."""
    before: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x * x,
        lambda x: x.flip(0),
        lambda x: x[..., 1:],
        lambda x: x > 0,
    ]
    after: list[Callable[[Tensor], object]] = [
        lambda r: r,
        lambda r: (r * 2, r + 1),
        lambda r: (r, r.sum(-1)),
        lambda r: r.flip(-1),
        lambda r: r.transpose(0, -1).contiguous(),
        lambda r: r[..., 1:] * 2 + r[..., :-1],
        lambda r: r.reshape(-1) * 2,
    ]
    generator = random.Random(torch.initial_seed())
    for _ in range(25):
        shape = generator.choice([(5,), (130,), (7, 13), (3, 67, 5), (2, 1, 64), (64, 65), (1, 300), (33, 2)])
        dtype = generator.choice((torch.float32, torch.float64, torch.int64, torch.int8))
        x = example(dtype, *shape)
        x = x.transpose(0, -1).contiguous().transpose(0, -1) if generator.random() < 0.3 else x
        scan = generator.choice((torch.cumsum, torch.cumprod, torch.cummax, torch.cummin))
        dim, first, last = generator.randrange(-x.ndim, x.ndim), generator.choice(before), generator.choice(after)

        def function(x: Tensor) -> list[Tensor]:
            return [o for r in tensors_of(scan(first(x), dim)) for o in tensors_of(last(r))]  # noqa: B023

        check(function, x, target)
