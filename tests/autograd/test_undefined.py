"""Results that nobody differentiates: backward is what eager's is without them, None where eager gives None."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import onepass
from onepass.backend import MOST_SETS, record_compilations

from ..checking import DEVICE
from ..unbuilt import unbuilt

OPTIONS = {"cache": False, "strict": True}
BAR = 1e-4 if DEVICE == "cpu" else 2e-3  # attention of the library adds up in another order on a GPU
Results = tuple[Tensor, ...]


def head(x: Tensor, w: Tensor, b: Tensor) -> Results:
    """A loss and what it is made of, the bias in one part alone."""
    hidden = torch.tanh(x @ w)
    scores = hidden * b
    return scores.float().square().mean(), scores, hidden


def views(x: Tensor, w: Tensor, b: Tensor) -> Results:
    y = (x @ w).view(2, -1, w.shape[1]).permute(1, 0, 2)
    parts = torch.cat([y[:, 0], y[:, 1] + b]), y.sum((0, 1)), y[:1].expand(3, 2, -1)
    return torch.stack(parts[1:2]).sum(), *parts


def residual(x: Tensor, w: Tensor, b: Tensor) -> Results:
    """Sums with nothing on either side, and a difference."""
    h = x @ w + b
    y = h + F.silu(h)
    return (y - h).square().sum(), h, y, h.clone()


def attention(x: Tensor, w: Tensor, b: Tensor) -> Results:
    q = (x @ w + b).view(1, 2, -1, 8)
    return (o := F.scaled_dot_product_attention(q, q, q)).amax(), o, torch.where(q > 0, o, q)


def convolved(x: Tensor, w: Tensor, b: Tensor) -> Results:
    y = (x @ w)[None]
    return F.avg_pool1d(y, 2).sum(), F.conv1d(y.mT, torch.diag(b)[:, :, None]), y * 2


def operands() -> list[Tensor]:
    made = torch.Generator(DEVICE).manual_seed(3)
    return [torch.randn(*s, generator=made, device=DEVICE).requires_grad_() for s in ((32, 24), (24, 16), (16,))]


def gradients(function: Callable[..., Results], kept: tuple[int, ...], xs: list[Tensor]) -> list[Tensor | None]:
    found = function(*xs)
    total = sum((found[k] * (k + 2)).sum() for k in kept)
    return list(torch.autograd.grad(total, xs, allow_unused=True))


@pytest.mark.parametrize("function", [head, views, residual, attention, convolved])
def test_gradients_are_eagers_for_every_set_of_results(function: Callable[..., Results]) -> None:
    torch._dynamo.reset()
    xs, run = operands(), torch.compile(function, backend="onepass", options=OPTIONS)
    for count in (1, 2, 3):
        for kept in itertools.combinations(range(3), count):
            for mine, eagers in zip(gradients(run, kept, xs), gradients(function, kept, xs), strict=True):
                assert (mine is None) == (eagers is None)
                if mine is not None:
                    torch.testing.assert_close(mine, eagers, rtol=BAR, atol=BAR)


def test_each_set_is_compiled_once() -> None:
    torch._dynamo.reset()
    xs, run = operands(), torch.compile(head, backend="onepass", options=OPTIONS)
    with record_compilations() as records:
        for kept in ((0,), (0,), (0, 1), (2,), (0,), (0, 1)):
            gradients(run, kept, xs)
    assert [r.direction for r in records] == ["forward", "backward", "backward", "backward"]


def test_sizes_known_at_run_time() -> None:
    """Their tangents are tensors of zeros, as torch has it."""
    torch._dynamo.reset()
    run = torch.compile(head, backend="onepass", options=OPTIONS, dynamic=True)
    for rows in (5, 9, 12):
        xs = [operands()[0][:rows].detach().requires_grad_(), *operands()[1:]]
        for mine, eagers in zip(gradients(run, (0,), xs), gradients(head, (0,), xs), strict=True):
            assert mine is not None
            torch.testing.assert_close(mine, torch.zeros_like(mine) if eagers is None else eagers, rtol=1e-4, atol=1e-4)


def test_other_peoples_backward_still_gets_zeros() -> None:
    """A result that another compiled function made, and that ours hands on."""
    torch._dynamo.reset()

    def first(x: Tensor) -> Results:
        return x.sin(), x.cos()

    theirs = torch.compile(first, backend="aot_eager")
    ours = torch.compile(lambda a, b: (a * 2, b.exp(), a), backend="onepass", options=OPTIONS)
    x = operands()[0]
    (found,) = torch.autograd.grad(ours(*theirs(x))[0].sum(), x)
    torch.testing.assert_close(found, 2 * x.cos())


@pytest.mark.skipif(DEVICE != "cpu", reason="plans do not run")
def test_a_loss_and_its_logits_read_no_zeros() -> None:
    """Backward of a head reads the logits and writes their gradient, nothing else of that size."""
    rows, columns = 512, 4096

    def function(x: Tensor, w: Tensor, y: Tensor) -> tuple[Any, ...]:
        logits = x @ w
        return F.cross_entropy(logits.float(), y), logits

    x, w = (torch.randn(*s, dtype=torch.bfloat16).requires_grad_() for s in ((rows, 64), (64, columns)))
    with unbuilt():
        explained = onepass.explain(function, x, w, torch.zeros(rows, dtype=torch.int64), target="sm_90")
    backward = explained.graphs[-1]
    moved = sum(k.bytes_read + k.bytes_written for k in backward.kernels)
    assert moved < 1.1 * 2 * (2 * rows * columns), str(explained)


def test_a_derivative_of_two_gradients() -> None:
    """A user's operation may have two, or call them what it likes: one that is missing is zeros for it."""
    torch._dynamo.reset()

    @torch.library.custom_op("onepass_tests::pair", mutates_args=())
    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @torch.library.custom_op("onepass_tests::pair_backward", mutates_args=())
    def pair_backward(grad_first: Tensor, grad_second: Tensor) -> Tensor:
        return grad_first * 2 + grad_second * 3

    pair.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    pair_backward.register_fake(lambda first, second: torch.empty_like(first))
    pair.register_autograd(lambda ctx, first, second: pair_backward(first, second))

    def function(x: Tensor) -> Results:
        first, second = pair(x)
        return first.sin(), second.cos()

    x, run = operands()[0], torch.compile(function, backend="onepass", options=OPTIONS)
    for kept, wanted in ((0, 2 * (2 * x).cos()), (1, -3 * (3 * x).sin())):
        torch.testing.assert_close(torch.autograd.grad(run(x)[kept].sum(), x)[0], wanted)


def test_sizes_between_known_ones() -> None:
    """Results of known sizes, a batch of any size between them and the parameters: no graph holds a size as it is."""
    torch._dynamo.reset()

    def function(x: Tensor, b: Tensor) -> Results:
        return torch.where(x > 0, b.expand_as(x), x * b).sum(0), x.cos().sum(0), b.sin()

    run = torch.compile(function, backend="onepass", options=OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for rows in (5, 9, 12):
            x, b = operands()[0][:rows, :16].detach().requires_grad_(), operands()[2]
            torch._dynamo.mark_dynamic(x, 0)
            for kept in ((0,), (1,), (2,)):
                for mine, eagers in zip(gradients(run, kept, [x, b]), gradients(function, kept, [x, b]), strict=True):
                    assert mine is not None
                    torch.testing.assert_close(mine, torch.zeros_like(mine) if eagers is None else eagers)


def test_compiled_autograd_gets_zeros() -> None:
    """It copies torch's backward graph, in which a tangent is a tensor."""
    torch._dynamo.reset()

    def function(x: Tensor, w: Tensor) -> Results:
        y = x @ w
        return y.sin(), y * 2

    run = torch.compile(function, backend="onepass", options=OPTIONS)
    for kept in (0, 1):
        found = []
        for each in (run, function):
            x, w = (t.detach().requires_grad_() for t in operands()[:2])
            total = each(x, w)[kept].sum()
            compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
            with compiled if each is run else contextlib.nullcontext():
                total.backward()
            found.append([x.grad, w.grad])
        torch.testing.assert_close(*found)


def test_compiled_autograd_runs_its_graph_by_us() -> None:
    torch._dynamo.reset()

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return torch.layer_norm(torch.tanh(x @ w), w.shape[1:]).square().mean()

    run, found = torch.compile(loss, backend="onepass", options=OPTIONS), []
    with record_compilations() as records:
        for each in (run, loss):
            x, w = (t.detach().requires_grad_() for t in operands()[:2])
            whole = torch._dynamo.compiled_autograd._enable(torch.compile(backend="onepass", options=OPTIONS))
            with whole if each is run else contextlib.nullcontext():
                each(x, w).backward()
            found.append([x.grad, w.grad])
    torch.testing.assert_close(*found)
    assert [r.direction for r in records] == ["forward", "inference"] and all(r.kernels for r in records)


def test_parts_of_a_tensor_subclass() -> None:
    """Torch passes one None for two tensors: it is asked for zeros. It has none for a subclass, and says so."""
    torch._dynamo.reset()

    def function(x: Tensor, z: Tensor) -> Results:
        return x.sin(), z.cos(), (z * 2).sum()

    def made() -> tuple[Tensor, Tensor]:
        parts = [t.detach() for t in operands()[1:2] * 2]
        return TwoTensor(*parts).requires_grad_(), operands()[2]

    run = torch.compile(function, backend="onepass", options=OPTIONS)
    x, z = made()
    found, nothing = torch.autograd.grad(run(x, z)[0].sum(), (x, z))
    torch.testing.assert_close(found.a, x.a.cos())
    torch.testing.assert_close(nothing, torch.zeros_like(z))
    with pytest.raises(RuntimeError, match=r"only called on some of them|guessed its"):
        run(x, z)[2].backward()


def test_several_backwards_of_one_forward() -> None:
    torch._dynamo.reset()
    xs, run = operands(), torch.compile(head, backend="onepass", options=OPTIONS)
    mine, eagers = run(*xs), head(*xs)
    for kept in (0, 1, 2, 0):
        for one, other in zip(
            *(torch.autograd.grad(r[kept].sum(), xs, retain_graph=True, allow_unused=True) for r in (mine, eagers)),
            strict=True,
        ):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_no_more_than_some_sets_are_compiled() -> None:
    """The others get zeros."""
    torch._dynamo.reset()
    names = ("sin", "cos", "tanh", "sigmoid", "exp")

    def function(x: Tensor, b: Tensor) -> Results:
        return tuple(getattr(x[:, :16] * b, name)() for name in names)

    xs = operands()[::2]
    run = torch.compile(function, backend="onepass", options=OPTIONS)
    with record_compilations() as records:
        for count in (1, 2, 4):
            for kept in itertools.combinations(range(5), count):
                for mine, eagers in zip(gradients(run, kept, xs), gradients(function, kept, xs), strict=True):
                    torch.testing.assert_close(mine, eagers, rtol=1e-4, atol=1e-4)
    assert len(records) == 1 + MOST_SETS + 1  # forward, the sets, and the one with zeros
