"""Optimiser steps and other lists of tensors: eager's values over many steps, whatever shares a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import onepass

TARGETS = ["cpu", "triton-interpret"]
# 0, 1, primes, whole tiles, one element more; enough of a kind to be one body.
SIZES = [(0,), (1,), (2,), (3,), (7,), (31, 3), (64,), (5, 5), (257,), (1024,), (1025,), (13, 17), (4099,)]


def tensors(
    sizes: Sequence[tuple[int, ...]] = SIZES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in sizes]


def compiled(f: Callable[..., object], target: str, precision: str = "fused") -> Callable[..., object]:
    options: dict[str, str | int | bool | Callable[..., object]] = {"target": target, "precision": precision}
    return torch.compile(f, backend="onepass", options=options)  # type: ignore[no-any-return]


def updates(ps: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
    return [p - 0.1 * g for p, g in zip(ps, gs, strict=True)]


def launches(f: Callable[..., object], *args: object, target: str) -> int:
    return sum(len(graph.kernels) for graph in onepass.explain(f, *args, target=target).graphs)


# --- values ---


@pytest.mark.rotating
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.float64])
def test_updates_of_unequal_sizes(target: str, dtype: torch.dtype) -> None:
    ps, gs = tensors(dtype=dtype), tensors(dtype=dtype, seed=1)

    def scaled(ps: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
        return [p - 3 * g for p, g in zip(ps, gs, strict=True)]

    f = updates if dtype.is_floating_point else scaled
    found = compiled(f, target, "eager")(ps, gs)
    for own, wanted in zip(found, f(ps, gs), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(own, wanted)
    assert launches(f, ps, gs, target=target) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_strided_and_shared_tensors(target: str) -> None:
    ps, gs = tensors(), tensors(seed=1)
    ps[8] = torch.randn(514)[::2]
    gs[9] = torch.randn(1025)[1:]
    ps[11], gs[5] = torch.randn(17, 13).t(), torch.randn(3, 31).t()
    gs[6] = ps[6]
    ps[4] = ps[3].expand(4, 3)[0]  # another view of the same storage
    gs[4] = torch.randn(3)
    found = compiled(updates, target)(ps, gs)
    for own, wanted in zip(found, updates(ps, gs), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(own, wanted)
        assert own.stride() == wanted.stride()


@pytest.mark.rotating
@pytest.mark.parametrize("target", TARGETS)
def test_reductions_and_rows_beside_updates(target: str) -> None:
    def mixed(gs: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
        rows = [torch.softmax(x, -1) for x in xs]
        return [*(g.norm() for g in gs), *rows, *(x.sum(-1) for x in xs[:2]), *(2 * g for g in gs[:5])]

    gs, xs = tensors(), tensors([(3, 7), (5, 64), (1, 129), (33, 100), (64, 32), (8, 50)], seed=2)
    found = compiled(mixed, target)(gs, xs)
    exact = mixed([g.double() for g in gs], [x.double() for x in xs])
    for own, eager, wanted in zip(found, mixed(gs, xs), exact, strict=True):  # type: ignore[arg-type]
        assert own.dtype == eager.dtype and own.shape == eager.shape
        torch.testing.assert_close(own.double(), wanted, rtol=1e-5, atol=1e-6)
    assert launches(mixed, gs, xs, target=target) <= 3


@pytest.mark.parametrize("target", TARGETS)
def test_sizes_known_at_run_time(target: str) -> None:
    ps, gs = tensors(SIZES[3:9]), tensors(SIZES[3:9], seed=1)
    f = onepass.jit(updates, dynamic=True, target=target)
    for extra in (0, 3, 130):
        own = [torch.cat([p.flatten(), torch.ones(extra)]) for p in ps]
        more = [torch.cat([g.flatten(), torch.ones(extra)]) for g in gs]
        for found, wanted in zip(f(own, more), updates(own, more), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("target", TARGETS)
def test_an_index_out_of_range_still_raises(target: str) -> None:
    def pick(xs: list[Tensor], index: Tensor) -> list[Tensor]:
        return [x[index] * 2 for x in xs]

    xs = tensors([(50 + k,) for k in range(9)])
    found = compiled(pick, target)(xs, torch.tensor([0, 49, -50]))
    for own, wanted in zip(found, pick(xs, torch.tensor([0, 49, -50])), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(own, wanted)
    if target == "cpu":
        with pytest.raises(IndexError):
            compiled(pick, target)(xs, torch.tensor([0, 53]))


# --- changes in place ---


@pytest.mark.parametrize("target", TARGETS)
def test_an_input_is_read_before_another_kernel_overwrites_it(target: str) -> None:
    def swap(xs: list[Tensor]) -> list[Tensor]:
        before = [x.flip(0) + 1 for x in xs]
        for x in xs:
            x.mul_(3)
        return before

    xs = tensors([(100 + k,) for k in range(10)])
    wanted = [x.clone() for x in xs]
    expected = swap(wanted)
    found = compiled(swap, target)(xs)
    for own, other in zip((*xs, *found), (*wanted, *expected), strict=True):  # type: ignore[misc]
        torch.testing.assert_close(own, other)


def run(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    dtype: torch.dtype,
    steps: int,
    target: str = "",
    clip: bool = False,
    sizes: Sequence[tuple[int, ...]] = SIZES,
) -> list[Tensor]:
    """Parameters and state after some steps; compiled for a target where one is given. float64: of bfloat16 numbers."""
    start = tensors(sizes, torch.bfloat16 if dtype is torch.float64 else dtype)
    ps = [p.to(dtype).requires_grad_() for p in start]
    optimizer = make(ps)

    def step() -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(ps, 1.0)
        optimizer.step()

    call = compiled(step, target) if target else step
    for k in range(steps):
        rounded = torch.bfloat16 if dtype is torch.float64 else dtype
        for p, g in zip(ps, tensors(sizes, rounded, seed=k + 1), strict=True):
            g = g.to(dtype)
            p.grad = g if p.grad is None else p.grad.copy_(g)
        call()
    state = [s for p in ps for s in optimizer.state[p].values() if isinstance(s, Tensor)]
    return [p.detach() for p in ps] + [p.grad for p in ps if p.grad is not None] + state


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "adamw single": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "adam amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True, weight_decay=0.1, foreach=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "groups": lambda ps: torch.optim.AdamW(
        [{"params": ps[:6]}, {"params": ps[6:], "weight_decay": 0.0}], lr=1e-2, foreach=True
    ),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_are_those_of_eager(name: str) -> None:
    torch.compiler.reset()
    eager, own = (run(OPTIMIZERS[name], torch.float32, 50, target) for target in ("", "cpu"))
    for mine, wanted in zip(own, eager, strict=True):
        assert mine.dtype == wanted.dtype
        torch.testing.assert_close(mine, wanted)


@pytest.mark.rotating
def test_fifty_steps_of_bfloat16_round_no_more_than_eager() -> None:
    torch.compiler.reset()
    make = OPTIMIZERS["adamw"]
    eager, own = (run(make, torch.bfloat16, 50, target) for target in ("", "cpu"))
    exact = run(make, torch.float64, 50)
    errors = [0.0, 0.0]
    for mine, rounded, wanted in zip(own, eager, exact, strict=True):
        assert mine.dtype == rounded.dtype
        errors[0] += float((mine.double() - wanted).square().sum())
        errors[1] += float((rounded.double() - wanted).square().sum())
    assert 0 < errors[0] < 1.1 * errors[1]


@pytest.mark.rotating
@pytest.mark.parametrize("target", TARGETS)
def test_steps_with_a_clipped_norm(target: str) -> None:
    torch.compiler.reset()
    eager, own = (run(OPTIMIZERS["adamw"], torch.float32, 3, t, clip=True, sizes=SIZES[2:]) for t in ("", target))
    for mine, wanted in zip(own, eager, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def test_bfloat16_parameters_with_float32_state() -> None:
    def step(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor]) -> None:
        wide = torch._foreach_mul([g.float() for g in gs], 0.1)
        torch._foreach_mul_(ms, 0.9)
        torch._foreach_add_(ms, wide)
        for p, m in zip(ps, ms, strict=True):
            p.copy_(p.float() - 0.01 * m)

    results = []
    for target in ("", "cpu"):
        ps, ms = tensors(dtype=torch.bfloat16), tensors(seed=3)
        call = compiled(step, target) if target else step
        for k in range(5):
            call(ps, tensors(dtype=torch.bfloat16, seed=k), ms)
        results.append([*ps, *ms])
    for own, wanted in zip(*results, strict=True):
        torch.testing.assert_close(own, wanted)
