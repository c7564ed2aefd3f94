"""What only a real GPU can show: launches, streams, graphs, misaligned pointers, large tensors, the CPU's numbers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STRICT = {"strict": True}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BAR = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-9}


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="onepass", options=STRICT, **settings)


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype).requires_grad_(grad)


def close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype is dtype
    scale = 1 + exact.abs().max().item()
    assert (ours.double() - exact).abs().max().item() <= BAR[dtype] * scale


def test_a_kernel_runs() -> None:
    """The smoke test: one launch, right values, and it was ours."""
    x = randn(1000, 130)
    run = compiled(lambda x: torch.relu(x * 2 + 1).softmax(-1))
    torch.testing.assert_close(run(x), torch.relu(x * 2 + 1).softmax(-1))
    explanation = onepass.explain(lambda x: torch.relu(x * 2 + 1).softmax(-1), x)
    assert len(explanation.kernels) == 1 and explanation.graphs[0].target.startswith(("sm_", "gfx"))
    assert explanation.graphs[0].kernels[0].registers > 0


STEPS = {
    "layer norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w, w),
    "rms norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w),
    "softmax": lambda x, w: (x * w).softmax(-1),
    "cross entropy": lambda x, w: F.cross_entropy(x * w, torch.arange(x.shape[0], device=x.device) % x.shape[1]),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, w, w, training=True),
    "gelu and column sums": lambda x, w: (F.gelu(x + w), (x * w).sum(0)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(33, 70), (257, 4096), (5, 40001)])
@pytest.mark.parametrize("name", STEPS)
def test_training_steps(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, w = randn(*shape, dtype=dtype, grad=True), randn(shape[1], dtype=dtype, grad=True)
    function = STEPS[name]

    def step(function: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = function(*inputs)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        gradients = torch.autograd.grad(outputs, inputs, [torch.full_like(o, 0.25) for o in outputs])
        return [*outputs, *gradients]

    exact = step(function, x.detach().double().requires_grad_(), w.detach().double().requires_grad_())
    eager = step(function, x, w)
    for ours, plain, wide in zip(step(compiled(function), x, w), eager, exact, strict=True):
        assert ours.stride() == plain.stride()
        error, allowed = (ours.double() - wide).abs().max(), 2 * (plain.double() - wide).abs().max()
        scale = 1 + wide.abs().max()
        assert error <= allowed + BAR[dtype] * scale, f"{error} against eager's {allowed / 2}"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2 if dtype is torch.bool else 100, (67, 131), device="cuda").to(dtype)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(0), x.amax(-1), x.max(-1)[1], x.float().cumsum(0), x == x.t()[:67, :67].amax(), x | x.flip(0)]

    for ours, eager in zip(compiled(function)(x), function(x), strict=True):
        assert torch.equal(ours, eager)


def test_dropout_is_the_cpus_and_the_same_in_backward() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.3)

    results = {}
    for device in ("cpu", "cuda"):
        torch._dynamo.reset()
        x = torch.ones(129, 260, device=device, requires_grad=True)
        torch.manual_seed(7)
        y = compiled(function)(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, y)
        results[device] = y.detach().cpu()
    assert torch.equal(results["cpu"], results["cuda"])
    assert 0.25 < (results["cpu"] == 0).float().mean() < 0.35


def test_misaligned_pointers_take_their_own_variant() -> None:
    storage = randn(4099)
    run = compiled(lambda x: x.sin() * 2)
    for start in (0, 1, 2, 3):
        x = storage[start : start + 4096]
        torch.testing.assert_close(run(x), x.sin() * 2)


def test_the_current_stream_is_used() -> None:
    run, x = compiled(lambda x: x * 2 + 1), randn(1 << 22)
    run(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        y = run(x)
        assert not side.query()  # the launch did not wait
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(y, x * 2 + 1)


def test_launches_can_be_captured() -> None:
    run, x = compiled(lambda x: (x * 2).softmax(-1)), randn(64, 1000)
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    x.copy_(randn(64, 1000))
    graph.replay()
    torch.testing.assert_close(y, (x * 2).softmax(-1))


def test_calls_from_several_threads() -> None:
    default = torch.get_default_device()
    torch.set_default_device(None)  # threads have none, and dynamo guards on it: they would all compile again
    try:
        run, x = compiled(lambda x: (x + 1).sum(-1)), randn(300, 500)
        expected = run(x)
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(lambda: all(torch.equal(run(x), expected) for _ in range(20))) for _ in range(8)]
        assert all(call.result() for call in calls)
    finally:
        torch.set_default_device(default if default.type != "cpu" else None)


def test_offsets_beyond_32_bits() -> None:
    x = torch.ones(3, (1 << 30) + 3, device="cuda", dtype=torch.int8)
    x[2, -5:] = 2
    y = compiled(lambda x: x + 1)(x)
    assert y[2, -6:].tolist() == [2, 3, 3, 3, 3, 3] and int(y[0, 0]) == 2


@pytest.mark.parametrize("first", [(64, 4096), (63, 4099)])
def test_sizes_that_are_multiples_of_8_or_not(first: tuple[int, int]) -> None:
    """Whichever size comes first, later ones get a variant that does not assume it; so does a pointer off 16 bytes."""
    run = compiled(lambda x: (F.gelu(x).softmax(-1), x.sum(0)), dynamic=True)
    space = randn(70 * 5000, dtype=torch.bfloat16)
    for rows, columns, start in [(*first, 0), (64, 4099, 0), (63, 4096, 0), (40, 520, 0), (64, 4096, 3), (17, 33, 1)]:
        x = space[start : start + rows * columns].view(rows, columns)
        exact = x.double()
        for ours, expected in zip(run(x), (F.gelu(exact).softmax(-1), exact.sum(0)), strict=True):
            close(ours, expected, torch.bfloat16)


def test_dynamic_sizes() -> None:
    run = torch.compile(lambda x: F.layer_norm(x, x.shape[-1:]).softmax(0), backend="onepass", dynamic=True)
    for rows, columns in ((7, 30), (64, 1000), (300, 4097), (2, 2)):
        x = randn(rows, columns)
        torch.testing.assert_close(run(x), F.layer_norm(x, x.shape[-1:]).softmax(0), rtol=1e-4, atol=1e-5)


TUNED: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": lambda x, w: (x * w).softmax(-1),
    "layer norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w, w),
}


@pytest.mark.parametrize("shape", [(30_000, 1111), (300, 131_072)])
@pytest.mark.parametrize("name", TUNED)
def test_tuned_kernels(name: str, shape: tuple[int, int]) -> None:
    """`tune="max"` measures every large kernel, says what it tried, and what it takes computes the same."""
    function = TUNED[name]
    inputs = randn(*shape), randn(shape[1])
    options = {**STRICT, "tune": "max", "cache": False}
    state = torch.cuda.get_rng_state()
    values = torch.compile(function, backend="onepass", options=options)(*inputs)
    close(values, function(*(x.double() for x in inputs)), torch.float32)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    explanation = onepass.explain(function, *inputs, options=options)
    print(explanation)  # `pytest -s` shows what was tried
    large = [k for k in explanation.kernels if k.predicted_us >= 30]
    assert large
    for kernel in large:
        assert kernel.tuning and kernel.trials and sum(t.chosen for t in kernel.trials) == 1
        times = [t.time_us for t in kernel.trials if not t.problem and not t.spilled_bytes]
        (chosen,) = (t for t in kernel.trials if t.chosen)
        assert chosen.time_us > 1 and (chosen.time_us <= 1.02 * min(times) or chosen is kernel.trials[0])
        assert kernel.spilled_bytes == 0


def test_quick_tuning_is_quick() -> None:
    x = randn(4096, 3001)
    function = lambda x: (x * 3).softmax(-1)  # noqa: E731
    onepass.explain(lambda x: x + 1, x, options={"cache": False})  # Triton is loaded
    explanation = onepass.explain(function, x, options={**STRICT, "cache": False, "tune": "quick"})
    (graph,) = explanation.graphs
    assert graph.stage_seconds["tune"] < 2.5
    assert len(graph.kernels[0].trials) <= 5


def test_nothing_is_timed_while_a_graph_is_captured() -> None:
    from onepass.ir.source import Launch, Trial
    from onepass.runtime.device import current_chip
    from onepass.runtime.stopwatch import DeviceStopwatch, stopwatch_for

    chip = current_chip()
    assert stopwatch_for(chip, "cuda") is not None
    graph, x = torch.cuda.CUDAGraph(), randn(4)
    with torch.cuda.graph(graph):
        x += 1
        assert stopwatch_for(chip, "cuda") is None
        timing = DeviceStopwatch("here").time(Trial((), (Launch(0, (), (), "1", "cuda:0"),)), [])
    assert "captured" in timing.problem


def test_a_bad_index_is_not_silent() -> None:
    """As in eager, the program stops with an error of the device; in a process of its own, since it is lost."""
    import subprocess
    import sys

    text = (
        "import torch, onepass\n"
        "x = torch.ones(10, device='cuda'); i = torch.tensor([1, 11], device='cuda')\n"
        "torch.compile(lambda x, i: x[i] * 2, backend='onepass')(x, i); torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode != 0 and "device-side assert" in done.stderr
