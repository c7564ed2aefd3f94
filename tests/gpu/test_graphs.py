"""Programs as CUDA graphs on a real GPU: what callers see is what they see without, and launching takes less.

Run with `-s` to see times. Every test says how its program runs where it is not one launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass.backend import watch_compilations
from onepass.compilation import Compiled
from onepass.runtime.recording import Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs CUDA")
D = 64


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    """Tensors are made on the GPU where it is said, whatever the default device is; errors of one test stay there."""
    default = torch.get_default_device()
    torch.set_default_device(None)
    yield
    torch.cuda.synchronize()
    torch.set_default_device(default if default.type != "cpu" else None)


def compiled(function: Callable[..., Any], graphs: str = "on", dynamic: bool | None = None, **options: Any) -> Any:
    settings = {"strict": True, "tune": "off", "graphs": graphs, **options}
    return torch.compile(function, backend="onepass", options=settings, dynamic=dynamic)


@contextmanager
def one_launch(several: bool = False) -> Iterator[list[Compiled]]:
    """Graphs compiled inside must all have been recorded."""
    with watch_compilations() as found:
        yield found
    how = [c.record.graph for c in found]
    assert how, "nothing was compiled"
    assert all(h.startswith("one launch") for h in how), how
    print("\n   ", *how, sep="\n    ")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def kernels(x: torch.Tensor) -> torch.Tensor:
    """Four kernels of ours with `fuse=False`."""
    return torch.cos(torch.sin(x) + 1) * 2


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Kernels and calls of the library in turn."""
    return x + F.gelu(F.layer_norm(x, (D,)) @ w) @ v


def exact(function: Callable[..., Any], *args: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = function(*(a.double() for a in args))
    return found.float()


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)


def weights(*seeds: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda")
    return [torch.randn(D, D, device="cuda", generator=generator.manual_seed(s)) / 8 for s in seeds]


def test_kernels_of_ours_at_new_addresses() -> None:
    """The smallest case: only nodes whose parameters are patched."""
    run = compiled(kernels, fuse=False)
    with one_launch():
        kept = [(x, run(x)) for x in (randn(100) for _ in range(20))]
    for x, y in kept:
        close(y, exact(kernels, x))
    assert len({y.data_ptr() for _, y in kept}) == 20


@pytest.mark.parametrize("fuse", [True, False])
def test_outputs_are_kept_over_100_calls(fuse: bool) -> None:
    """Without fusion, calls of the library and kernels follow each other."""
    run, (w, v) = compiled(block, fuse=fuse), weights(1, 2)
    with one_launch():
        kept = [(x, run(x, w, v)) for x in (randn(32, D) for _ in range(100))]
    for x, y in kept:
        close(y, exact(block, x, w, v))


@pytest.mark.parametrize("fuse", [True, False])
def test_an_output_is_fed_back(fuse: bool) -> None:
    run, (w, v), x = compiled(block, fuse=fuse), weights(1, 2), randn(32, D)
    ours, eager = x, x.double()
    with one_launch():
        for _ in range(10):
            ours, eager = run(ours, w, v), block(eager, w.double(), v.double())
    torch.testing.assert_close(ours.double(), eager, rtol=1e-2, atol=1e-2)


def test_outputs_are_freed_in_any_order() -> None:
    run, (w, v) = compiled(block), weights(1, 2)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for k in range(60):
        x = randn(32, D)
        held.append((x, run(x, w, v)))
        if k % 3 == 2:
            del held[k % len(held)]
    for x, y in held:
        close(y, exact(block, x, w, v))


@pytest.mark.parametrize("fuse", [True, False])
def test_two_models_in_turn(fuse: bool) -> None:
    run, models = compiled(block, fuse=fuse), [weights(1, 2), weights(3, 4)]
    with one_launch():
        for k in range(20):
            x = randn(32, D)
            close(run(x, *models[k % 2]), exact(block, x, *models[k % 2]))


def test_parameters_are_changed_in_place_and_replaced() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(D), torch.nn.Linear(D, D), torch.nn.GELU(), torch.nn.Linear(D, D))
    model = model.cuda().requires_grad_(False)
    run = compiled(model)
    with one_launch():
        for k in range(16):
            x = randn(32, D)
            if k % 5 == 4:
                model[1].weight = torch.nn.Parameter(torch.randn(D, D, device="cuda") / 8, requires_grad=False)
            model[3].weight.mul_(1.1)
            close(run(x), model(x))


def test_inputs_are_overwritten() -> None:
    """A step of an optimiser, written out: parameters and state are changed in place."""

    def step(parameters: list[torch.Tensor], state: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for p, m in zip(parameters, state, strict=True):
            m.mul_(0.9).add_(p * 0.1)
            p.sub_(m * 0.01)
        return (x @ parameters[0]).relu() @ parameters[1]

    run = compiled(step)
    ours, eager = [[randn(D, D), randn(D, D)] for _ in range(2)], []
    eager = [[t.clone() for t in tensors] for tensors in ours]
    with one_launch():
        for _ in range(12):
            x = randn(16, D)
            torch.testing.assert_close(run(*ours, x), step(*eager, x), rtol=1e-2, atol=1e-1)
    for a, b in zip([*ours[0], *ours[1]], [*eager[0], *eager[1]], strict=True):
        close(a, b)


def test_many_tensors_share_a_table() -> None:
    shapes = [(17, 5), (64, 64), (1000,), (3, 7, 11), (256,), (33, 2), (128, 9), (5,), (77,), (2, 2)]

    def update(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
        total = torch.stack([(g * g).sum() for g in gradients]).sum()
        scale = torch.rsqrt(total + 1)
        for p, g in zip(parameters, gradients, strict=True):
            p.sub_(g * scale)
        return total

    run = compiled(update)
    ours = [randn(*s) for s in shapes]
    eager = [p.clone() for p in ours]
    with one_launch():
        for _ in range(10):
            gradients = [randn(*s) for s in shapes]
            close(run(ours, gradients), update(eager, gradients))
    for a, b in zip(ours, eager, strict=True):
        close(a, b)


def test_misaligned_inputs_take_their_own_variant() -> None:
    run, storage = compiled(kernels, fuse=False), randn(4099)
    with one_launch():
        for start in (0, 0, 0, 0, 1, 2, 3, 0, 1):
            x = storage[start : start + 4096]
            close(run(x), exact(kernels, x))


def test_dropout_differs_and_reproduces() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout((x @ w).relu(), 0.5) @ w

    (w,), x = weights(1), randn(32, D)

    def series(graphs: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        run = compiled(function, graphs)
        torch.manual_seed(7)
        return [run(x, w) for _ in range(8)]

    without = series("off")
    with one_launch():
        ours = series("on")
    for a, b in zip(ours, without, strict=True):
        close(a, b)
    assert not torch.equal(ours[5], ours[6])


def test_training_with_two_forwards_before_a_backward() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return block(x, w, v).square().mean()

    run, (w, v) = compiled(loss), weights(1, 2)
    for t in (w, v):
        t.requires_grad_()

    def gradients(function: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        w.grad = v.grad = None
        first, second = function(x, w, v), function(y, w, v)
        first.backward()
        second.backward()
        assert w.grad is not None and v.grad is not None
        return [first.detach(), second.detach(), w.grad.clone(), v.grad.clone()]

    with one_launch():
        for _ in range(6):
            x, y = randn(32, D), randn(32, D)
            for a, b in zip(gradients(run, x, y), gradients(loss, x, y), strict=True):
                close(a, b)


def test_training_with_an_optimizer() -> None:
    def trained(graphs: str) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(D, D), torch.nn.GELU(), torch.nn.LayerNorm(D), torch.nn.Linear(D, 8)
        )
        model = model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = compiled(lambda x, y: F.cross_entropy(model(x), y), graphs)
        losses = []
        for _ in range(15):
            x, y = randn(32, D), torch.randint(0, 8, (32,), device="cuda")
            optimizer.zero_grad()
            value = run(x, y)
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses

    without = trained("off")
    with one_launch():
        ours = trained("on")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(without), rtol=1e-3, atol=1e-3)


def test_sizes_change() -> None:
    run, (w, v) = compiled(block, dynamic=True), weights(1, 2)
    with one_launch():
        for rows in [5, 32, 77] * 6 + list(range(2, 30)):
            x = randn(rows, D)
            close(run(x, w, v), exact(block, x, w, v))


def test_streams() -> None:
    run, (w, v) = compiled(block), weights(1, 2)
    streams = [torch.cuda.Stream() for _ in range(3)]
    kept = []
    torch.cuda.synchronize()
    with one_launch():
        for _ in range(10):
            for stream in streams:
                with torch.cuda.stream(stream):
                    x = randn(256, D)
                    kept.append((x, run(x, w, v)))
        torch.cuda.synchronize()
    for x, y in kept:
        close(y, exact(block, x, w, v))


def test_threads() -> None:
    run, (w, v) = compiled(block), weights(1, 2)
    x = randn(32, D)
    with one_launch():
        for _ in range(5):
            wanted = run(x, w, v)

        def calls(seed: int) -> bool:
            inputs = [x + 0 for _ in range(50)]
            return all(torch.allclose(run(i, w, v), wanted, rtol=1e-3, atol=1e-3) for i in inputs)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(calls, range(8)))


def test_a_user_captures_our_call() -> None:
    run, (w, v), x = compiled(block), weights(1, 2), randn(32, D)
    with one_launch():
        for _ in range(5):
            run(x, w, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x, w, v)
        x.copy_(randn(32, D))
        graph.replay()
        close(y, exact(block, x, w, v))
        close(run(x, w, v), exact(block, x, w, v))


@pytest.mark.parametrize("error", [RuntimeError("broken"), torch.cuda.OutOfMemoryError("no memory")])
def test_an_error_in_capture(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise error

    run, (w, v) = compiled(block), weights(1, 2)
    monkeypatch.setattr(Recorder, "finish", fails)
    with watch_compilations() as found:
        for _ in range(6):
            x = randn(32, D)
            close(run(x, w, v), exact(block, x, w, v))
    assert found[0].record.graph.startswith("none: recording failed"), found[0].record.graph
    monkeypatch.undo()
    torch._dynamo.reset()
    other = compiled(lambda x: block(x, w, v))
    with one_launch():
        for _ in range(6):
            close(other(x), exact(block, x, w, v))


def test_waiting_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real error of the driver inside a capture leaves torch usable."""
    run, (w, v) = compiled(block), weights(1, 2)
    finish = Recorder.finish

    def waits(self: Recorder, results: Any) -> None:
        torch.ones(1, device="cuda").item()
        finish(self, results)

    monkeypatch.setattr(Recorder, "finish", waits)
    with watch_compilations() as found:
        for _ in range(6):
            x = randn(32, D)
            close(run(x, w, v), exact(block, x, w, v))
    assert found[0].record.graph.startswith("none: recording failed"), found[0].record.graph
    side = torch.cuda.Stream()  # events of tensors used on several streams are still looked at
    y = randn(1 << 20)
    y.record_stream(side)
    del y
    torch.cuda.synchronize()
    close(run(x, w, v), exact(block, x, w, v))


def test_memory_after_10000_calls() -> None:
    run, (w, v) = compiled(block), weights(1, 2)
    with one_launch():
        for _ in range(20):
            run(randn(32, D), w, v)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(10_000):
            run(randn(32, D), w, v)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before[0] and torch.cuda.memory_reserved() <= before[1] + (4 << 20)


def test_a_profile_is_of_the_steps() -> None:
    run, (w, v), x = compiled(block), weights(1, 2), randn(32, D)
    with one_launch():
        for _ in range(5):
            run(x, w, v)
        with torch.profiler.profile() as profile:
            close(run(x, w, v), exact(block, x, w, v))
    assert any("onepass graph" in event.name for event in profile.events())


def test_auto_records_what_waits_for_the_host() -> None:
    small, large = compiled(kernels, "auto", fuse=False), compiled(lambda x: kernels(x), "auto", fuse=False)
    with watch_compilations() as found:
        for _ in range(6):
            small(randn(100))
        for _ in range(6):
            large(randn(1 << 28))
    how = [c.record.graph for c in found]
    assert how[0].startswith("one launch") and how[1].startswith("none: launching takes"), how


def wall_us(run: Callable[..., Any], *args: torch.Tensor, calls: int = 300) -> float:
    """Microseconds of a call, the best of five rounds; the device is waited for at the end of each."""
    for _ in range(10):
        run(*args)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            run(*args)
        torch.cuda.synchronize()
        best = min(best, 1e6 * (time.perf_counter() - started) / calls)
    return best


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = torch.sin(x) + 1
    return x


def layers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = block(x, w, v)
    return x


@pytest.mark.parametrize("name", ["20 kernels", "6 blocks"])
def test_wall_time(name: str) -> None:
    function, args = (chain, (randn(1000),)) if name == "20 kernels" else (layers, (randn(64, D), *weights(1, 2)))
    times = {}
    for graphs in ("off", "on"):
        torch._dynamo.reset()
        times[graphs] = wall_us(compiled(function, graphs, fuse=name != "20 kernels"), *args)
    torch._dynamo.reset()
    times["eager"] = wall_us(function, *args)
    times["empty"] = wall_us(torch.compile(lambda *a: None, backend="eager"), *args)
    print(f"\n    {name}: " + ", ".join(f"{k} {v:.1f} us" for k, v in times.items()))
    assert times["on"] < times["off"], times


def test_the_mode_has_a_name() -> None:
    run = torch.compile(block, backend="onepass", mode="reduce-overhead")
    (w, v), x = weights(1, 2), randn(32, D)
    with one_launch():
        for _ in range(5):
            close(run(x, w, v), exact(block, x, w, v))
    assert "CUDA graph" in str(onepass.explain(block, x, w, v, options={"graphs": "on"}))
