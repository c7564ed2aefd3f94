"""Plans by their decisions: in place or not, recompute, limits, peak memory, and time for large graphs."""

from __future__ import annotations

import time

import torch

import onepass
from onepass.backend import record_compilations

STRICT = {"strict": True, "cache": False}


def explained(function: object, *arguments: torch.Tensor) -> onepass.Explanation:
    with torch.no_grad():
        return onepass.explain(function, *arguments, options=STRICT)  # type: ignore[arg-type]


def decisions(e: onepass.Explanation, kind: str) -> list[object]:
    return [d for d in e.decisions if d.kind == kind]


def test_an_update_is_in_place_where_it_reads_what_it_writes() -> None:
    def step(p: torch.Tensor, g: torch.Tensor) -> None:
        p.sub_(g * 0.1)

    e = explained(step, torch.randn(256, 256), torch.randn(256, 256))
    (decision,) = decisions(e, "in-place")
    assert decision.accepted  # type: ignore[attr-defined]
    assert e.bytes_moved == e.bytes_minimum


def test_an_update_that_reads_elsewhere_is_not() -> None:
    def transposed(x: torch.Tensor) -> None:
        x.copy_(x.t())

    def centred(x: torch.Tensor) -> None:
        x.sub_(x.mean(0))

    for function, reason in ((transposed, "another index"), (centred, "another sweep")):
        e = explained(function, torch.randn(256, 256))
        rejected = [d for d in decisions(e, "in-place") if not d.accepted]  # type: ignore[attr-defined]
        assert rejected and reason in rejected[0].reason  # type: ignore[attr-defined]


def test_a_split_cannot_be_read_again_and_says_so() -> None:
    e = explained(lambda x: x / x.sum(), torch.randn(1024, 1024))
    assert len(e.kernels) == 3
    assert any("needed again over the split axis" in d.reason for d in e.rejected)


def test_a_large_sum_of_any_size_is_split_over_programs() -> None:
    """The plan is made for the size at hand and right for every other."""
    run = torch.compile(lambda x: x.sum(), backend="onepass", options=STRICT, dynamic=True)
    with record_compilations() as records:
        for shape in ((4096, 4096), (2, 3), (5000, 77), (129, 4099)):
            x = torch.rand(shape)
            torch.testing.assert_close(run(x).double(), x.double().sum(), rtol=1e-6, atol=0)
    assert len(records[0].kernels) == 2 and "split over" in records[0].kernels[0].schedule
    torch._dynamo.reset()
    with record_compilations() as records:
        run(torch.rand(6, 7))
    assert len(records[0].kernels) == 1


def test_fuse_off_gives_one_kernel_per_operation() -> None:
    with torch.no_grad():
        e = onepass.explain(lambda x: torch.relu(x + 1) * 2, torch.randn(64, 64), options={**STRICT, "fuse": False})
    assert len(e.kernels) == 3


def test_limits_split_a_long_chain_and_it_is_right() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for k in range(300):
            x = x * 1.01 + 0.1 if k % 2 else torch.sin(x)
        return x

    x = torch.randn(16, 16)
    with record_compilations() as records:
        ours = torch.compile(chain, backend="onepass", options=STRICT)(x)
    torch.testing.assert_close(ours, chain(x))
    assert 2 < len(records[0].kernels) < 20


def test_a_large_graph_plans_in_seconds() -> None:
    def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            h = torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (64,), w))
            x = x + h * torch.sigmoid(h)
        return x

    x, w = torch.randn(8, 64), torch.ones(64)
    with record_compilations() as records:
        ours = torch.compile(residual, backend="onepass", options=STRICT)(x, w)
    torch.testing.assert_close(ours, residual(x, w), rtol=1e-4, atol=1e-4)
    assert records[0].stage_seconds["plan"] < 20


def test_equal_layers_build_once(tmp_path: object) -> None:
    def layers(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.softmax(x, -1) for x in xs]

    xs = [torch.randn(40, 52 + 0 * k) for k in range(6)]
    start = time.perf_counter()
    with record_compilations() as records:
        torch.compile(layers, backend="onepass", options=STRICT)(*xs)
    assert time.perf_counter() - start < 60
    assert len({k.source.split("#include")[1] for k in records[0].kernels}) == 1
