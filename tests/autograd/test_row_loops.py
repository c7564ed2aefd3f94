"""Losses of a product in chunks of rows: which losses, their values and gradients, memory, and what stays as it was."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

import onepass
from onepass import building
from onepass.autograd import row_loops
from onepass.backend import record_compilations
from onepass.building import Building
from onepass.ir.record import CompileRecord
from onepass.ir.row_loop import RowLoop

STRICT = {"strict": True, "cache": False}
N, K, V = 101, 12, 389
Loss = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of tests count as large."""
    monkeypatch.setattr(row_loops, "LEAST_SPARED", 1024)
    monkeypatch.setattr(row_loops, "LEAST_PART", 0.0)
    monkeypatch.setattr(row_loops, "TILE_ROWS", 16)
    monkeypatch.setattr(row_loops, "MOST_SLOWER", 1e9)
    torch._dynamo.reset()


def plain(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ w.T, y)


def turned_weight(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ w.T.contiguous().clone(), y)


def biased(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w, b), y)


def smoothed(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, label_smoothing=0.1)


def with_z_loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w).float()
    return F.cross_entropy(logits, y) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def soft_targets(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ w.T, torch.softmax(t.detach(), -1))


def capped(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(30 * torch.tanh(F.linear(x, w).float() / 30), y)


def summed(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ w.T, y, reduction="sum")


def masked_mean(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(x @ w.T, y, reduction="none")
    mask = (y % 3 != 0).to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def focal(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(x @ w.T, y, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def exponential(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Backward multiplies by what forward's loss is."""
    return torch.exp(0.1 * F.cross_entropy(x @ w.T, y)) * x.float().square().mean()


def one_teacher(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    teacher = torch.log_softmax((x.detach() * 1.5) @ w.detach().T, -1)
    return F.kl_div(torch.log_softmax(x @ w.T, -1), teacher, log_target=True, reduction="batchmean")


def two_heads(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    first, second = torch.log_softmax(x @ w.T, -1), torch.log_softmax(x @ u.T, -1)
    return F.kl_div(first, second, log_target=True, reduction="batchmean")


def shifted(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Labels shifted by one, and all rows in another term."""
    logits = F.linear(torch.stack([x, x.flip(0)]), w).float()
    logits, labels = 20 * torch.tanh(logits / 20), torch.stack([y, y.flip(0)])
    loss = F.cross_entropy(logits[:, :-1].contiguous().view(-1, V), labels[:, 1:].reshape(-1))
    return loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def causal_lm(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As libraries of models have it."""
    logits, labels = F.linear(torch.stack([x, x.flip(0)]), w).float(), torch.stack([y, y.flip(0)])
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100, reduction="sum") / 52


def padded_vocabulary(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((x @ w.T)[:, : V - 9], y.clamp(max=V - 10))


def tied(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((x + F.embedding(y.clamp(min=0), w)) @ w.T, y)


def log_probabilities(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Policy gradient with an entropy term."""
    logs = torch.log_softmax((x @ w.T).float(), -1)
    chosen = logs.gather(1, y.clamp(min=0)[:, None])[:, 0]
    return -(chosen * torch.arange(N)).mean() - 0.01 * -(logs.exp() * logs).sum(-1).mean()


def by_hand(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = (x @ w.T).float()
    logits = logits - logits.max(-1, keepdim=True).values.detach()
    return -(torch.gather(logits, 1, y.clamp(min=0)[:, None])[:, 0] - logits.exp().sum(-1).log()).mean()


def squares(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ w.T - 1).square().mean()


def autocast(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype is torch.float32):
        return F.cross_entropy(F.linear(x, w), y)


def scaled(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 65536 * F.cross_entropy(x @ w.T, y)


LOSSES: list[Loss] = [
    plain, turned_weight, biased, smoothed, with_z_loss, soft_targets, capped, summed, masked_mean, focal, exponential,
    one_teacher, two_heads, shifted, causal_lm, padded_vocabulary, tied, log_probabilities, by_hand, squares, autocast,
    scaled,
]  # fmt: skip


def arguments(loss: Loss, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w, y = torch.randn(N, K), torch.randn(V, K), torch.randint(0, V, (N,))
    y[3] = -100
    extra = {biased: [(V,)], soft_targets: [(N, V)], two_heads: [(V, K)]}
    return [x.to(dtype), w.to(dtype), y, *(torch.randn(s).to(dtype) for s in extra.get(loss, []))]


def results(run: Loss, given: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The loss and the gradients, in float64."""
    own = [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in given]
    value = run(*own)
    value.backward()  # type: ignore[no-untyped-call]
    return [value.detach().double(), *(t.grad.double() for t in own if t.grad is not None)]


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def loops(records: list[CompileRecord]) -> int:
    return sum(r.direction == "rows" for r in records)


def refusals(records: list[CompileRecord]) -> list[str]:
    return [d.reason for r in records for d in r.decisions if d.kind == "row loop" and not d.accepted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: str(f.__name__))
def test_values(loss: Loss, dtype: torch.dtype) -> None:
    """Errors of the loss and of all gradients are at most twice eager's; logits are nowhere as a whole."""
    given = arguments(loss, dtype)
    exact, eager = results(loss, given, torch.float64), results(loss, given, dtype)
    with record_compilations() as records:
        found = results(torch.compile(loss, backend="onepass", options=STRICT), given, dtype)
    assert loops(records) == 1 and not refusals(records)
    calls = [e.op for r in records for e in r.externs]
    assert not any("mm" in op for op in calls)
    for ours, theirs in zip(errors(found, exact), errors(eager, exact), strict=True):
        assert ours <= 2 * theirs + 1e-6


def test_gradients_take_the_place_of_logits() -> None:
    given = arguments(plain, torch.bfloat16)
    with record_compilations() as records:
        results(torch.compile(plain, backend="onepass", options=STRICT), given, torch.bfloat16)
    (rows,) = (r for r in records if r.direction == "rows")
    assert [d.accepted for d in rows.decisions if d.kind == "in-place"] == [True] and len(rows.kernels) == 1


def test_many_chunks_of_16_bits_stay_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk rounds the weight's gradient once more."""
    torch.manual_seed(0)
    n, k, v = 2048, 64, 1024
    given = [torch.randn(n, k).bfloat16(), (torch.randn(v, k) / 8).bfloat16(), torch.randint(0, v, (n,))]
    monkeypatch.setattr(row_loops, "_time_us", lambda *_: 1.0)  # as many as are allowed
    with record_compilations() as records:
        found = results(torch.compile(plain, backend="onepass", options=STRICT), given, torch.bfloat16)
    assert next(r.repeats for r in records if r.direction == "rows") == row_loops.MOST_ROUNDINGS
    exact, eager = results(plain, given, torch.float64), results(plain, given, torch.bfloat16)
    assert all(a <= 2 * b + 1e-6 for a, b in zip(errors(found, exact), errors(eager, exact), strict=True))


def test_backward_again_and_other_tangents() -> None:
    """What forward saved is scaled in its place only where nothing reads it again."""
    x, w, y = (t.requires_grad_() if t.is_floating_point() else t for t in arguments(plain, torch.float32))
    compiled = torch.compile(plain, backend="onepass", options=STRICT)
    want = torch.autograd.grad(plain(x, w, y), (x, w))
    value = compiled(x, w, y)
    for tangent, kept in ((1.0, True), (3.0, True), (0.5, True), (-2.0, False)):
        found = torch.autograd.grad(value, (x, w), torch.tensor(tangent), retain_graph=kept)
        torch.testing.assert_close(found, tuple(tangent * g for g in want))
    for _ in range(2):
        (compiled(x, w, y) * 2).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close((x.grad, w.grad), tuple(4 * g for g in want))


@pytest.mark.parametrize("position", [0, 1])
def test_one_gradient_alone(position: int) -> None:
    given = arguments(plain, torch.float32)
    given[position].requires_grad_()
    with record_compilations() as records:
        value = torch.compile(plain, backend="onepass", options=STRICT)(*given)
    (found,) = torch.autograd.grad(value, given[position])
    (want,) = torch.autograd.grad(plain(*given), given[position])
    torch.testing.assert_close(found, want)
    assert loops(records) == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_without_gradients(reduction: str) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ w.T, y, reduction=reduction)

    given = arguments(plain, torch.float32)
    with record_compilations() as records, torch.no_grad():
        found = torch.compile(loss, backend="onepass", options=STRICT)(*given)
    torch.testing.assert_close(found, loss(*given))
    assert loops(records) == 1 and [r.direction for r in records] == ["inference", "rows"]


def test_an_inference_graph_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library computes is predicted; a graph that is not what runs is neither built nor stored."""
    built: list[str] = []

    def build(graph: GraphModule, *args: Any) -> Building:
        built.append("loop" if any(isinstance(v, RowLoop) for v in vars(graph).values()) else "whole")
        return Building(graph, *args)

    monkeypatch.setattr(building, "Building", build)
    with torch.no_grad():
        torch.compile(plain, backend="onepass", options=STRICT)(*arguments(plain, torch.float32))
    assert sorted(built) == ["loop", "whole"]  # the graph, and what it does for a chunk


class LanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(V, K)
        self.head = torch.nn.Linear(K, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.embedding(ids))).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1))


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_known_at_run_time(dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    compiled = torch.compile(model, backend="onepass", options=STRICT, dynamic=dynamic)
    with record_compilations() as records:
        for shape in ((2, 20), (3, 31), (5, 7)):
            ids = torch.randint(0, V, shape)
            gradients = []
            for run in (compiled, model):
                model.zero_grad()
                run(ids).backward()
                assert model.head.weight.grad is not None
                gradients.append(model.head.weight.grad.clone())
            torch.testing.assert_close(*gradients)
    assert loops(records) == (1 if dynamic else 2) and not refusals(records)


def test_every_number_of_rows() -> None:
    """The last chunk has any number of rows; so has the vocabulary, where that is an argument."""
    torch.manual_seed(0)
    compiled = onepass.jit(plain, dynamic=True, options=STRICT)
    with record_compilations() as records:
        for n, v in ((N, V), (64, V), (65, V), (1, V), (N, V + 3)):
            x, w = torch.randn(n, K, requires_grad=True), torch.randn(v, K, requires_grad=True)
            y = torch.randint(0, v, (n,))
            found, want = compiled(x, w, y), plain(x, w, y)
            torch.testing.assert_close(found, want)
            torch.testing.assert_close(torch.autograd.grad(found, (x, w)), torch.autograd.grad(want, (x, w)))
    assert loops(records) == 1


def test_generated_gpu_kernels_give_the_values() -> None:
    given = arguments(smoothed, torch.float32)
    options = {**STRICT, "target": "triton-interpret"}
    with record_compilations() as records:
        found = results(torch.compile(smoothed, backend="onepass", options=options), given, torch.float32)
    torch.testing.assert_close(found, results(smoothed, given, torch.float32), rtol=1e-5, atol=1e-6)
    assert loops(records) == 1


def test_the_cache_keeps_bodies(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    given = arguments(plain, torch.float32)
    for state in ("miss", "hit"):
        torch._dynamo.reset()
        with record_compilations() as records:
            found = results(torch.compile(plain, backend="onepass", options={"strict": True}), given, torch.float32)
        torch.testing.assert_close(found, results(plain, given, torch.float32), rtol=1e-5, atol=1e-6)
        assert {r.direction: r.cache for r in records} == dict.fromkeys(("forward", "rows", "backward"), state)


def test_a_wrong_label_is_eagers_error() -> None:
    x, w, y = arguments(plain, torch.float32)
    y[N - 2] = V
    with pytest.raises(IndexError, match="out of range"):
        torch.compile(plain, backend="onepass", options=STRICT)(x.requires_grad_(), w, y)


def returned(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x @ w.T
    return F.cross_entropy(logits, y), logits


def normalised(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = x @ w.T
    return F.cross_entropy(logits / logits.square().mean(), y)


def each_row(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ w.T, y, reduction="none")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (returned, "the program returns it"),
        (normalised, "all rows"),
        (each_row, "backward is given more than one number"),
    ],
)
def test_what_stays_as_it_was(function: Callable[..., Any], reason: str) -> None:
    x, w, y = (t.requires_grad_() if t.is_floating_point() else t for t in arguments(plain, torch.float32))
    with record_compilations() as records:
        found = torch.compile(function, backend="onepass", options=STRICT)(x, w, y)
    want = function(x, w, y)
    torch.testing.assert_close(found, want)
    first = [t[0] if isinstance(t, tuple) else t.sum() for t in (found, want)]
    torch.testing.assert_close(*(torch.autograd.grad(t, (x, w)) for t in first))
    assert not loops(records) and reason in refusals(records)[0]


def test_half_precision_keeps_the_scale_of_its_tangent() -> None:
    x, w, y = arguments(plain, torch.float16)
    with record_compilations() as records:
        torch.compile(plain, backend="onepass", options=STRICT)(x.requires_grad_(), w, y)
    assert not loops(records) and "float16" in refusals(records)[0]


@pytest.mark.parametrize("options", [{"precision": "eager"}, {"fuse": False}])
def test_options_that_ask_for_eagers_way(options: dict[str, Any]) -> None:
    x, w, y = arguments(plain, torch.float32)
    with record_compilations() as records:
        torch.compile(plain, backend="onepass", options={**STRICT, **options})(x.requires_grad_(), w, y)
    assert not loops(records)


def test_small_losses_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, w, y = arguments(plain, torch.float32)
    with record_compilations() as records:
        torch.compile(plain, backend="onepass", options=STRICT)(x.requires_grad_(), w, y)
    assert not loops(records) and not refusals(records)


def test_the_plan_for_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, gradients and one chunk's logits: 2.8 GB at most, where logits alone have 2.1."""
    monkeypatch.undo()
    n, k, v = 8192, 4096, 128256
    with FakeTensorMode():
        x = torch.empty(n, k, dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(v, k, dtype=torch.bfloat16, requires_grad=True)
        y = torch.empty(n, dtype=torch.int64)
    e = onepass.explain(plain, x, w, y, options={**STRICT, "target": "sm_90"})
    (loop,) = (x for x in e.externs if "over_rows" in x.op)
    found = re.search(r"(\d+) chunks of (\d+) spare \d+ MB; .* (\d\.\d+) times as long", loop.why)
    assert found is not None
    chunks, rows, slowdown = int(found[1]), int(found[2]), float(found[3])
    assert chunks * rows == n and slowdown < 1.1
    assert 2 * (2 * (n * k + v * k) + rows * v) + 8 * n < 2.8e9
    (part,) = (g for g in e.graphs if g.direction == "rows")
    assert part.repeats == chunks and len(part.kernels) == 1 and part.kernels[0].spilled_bytes == 0
    assert "tl.debug_barrier()" in part.kernels[0].source
    (scale,) = (x for x in e.externs if "scaled" in x.op)
    assert "in its place" in scale.why
    assert f"rows, {chunks} times" in str(e)


@pytest.mark.rotating
def test_peak_memory() -> None:
    """What a process needs beyond its inputs: eager holds 268 MB of logits several times."""
    code = r"""
import re, sys, torch, torch.nn.functional as F, onepass
def kilobytes(what): return int(re.search(what + r":\s+(\d+)", open("/proc/self/status").read())[1])
def loss(x, w, y): return F.cross_entropy(x @ w.T, y)
run = torch.compile(loss, backend="onepass", options={"strict": True}) if sys.argv[1] == "ours" else loss
x, w = torch.randn(2048, 32, requires_grad=True), torch.randn(32768, 32, requires_grad=True)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = kilobytes("VmRSS")
run(x, w, torch.arange(2048)).backward()
print((kilobytes("VmHWM") - before) // 1024)
"""
    peaks = {}
    for way in ("ours", "eager"):
        out = subprocess.run([sys.executable, "-c", code, way], check=True, capture_output=True, text=True).stdout
        peaks[way] = int(out.split()[-1])
    assert peaks["eager"] > 500 and peaks["ours"] < peaks["eager"] - 300, peaks


def test_memory_is_not_bought_at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a product that takes 20 us are launches more than anything else."""

    def best(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w.T).argmax(-1)

    found = {}
    for most in (1.1, 1e9):
        monkeypatch.setattr(row_loops, "MOST_SLOWER", most)
        with FakeTensorMode(), torch.no_grad():
            x, w = torch.empty(65536, 64, dtype=torch.bfloat16), torch.empty(512, 64, dtype=torch.bfloat16)
            e = onepass.explain(best, x, w, options={**STRICT, "target": "sm_90"})
        found[most] = any("over_rows" in extern.op for extern in e.externs)
    assert found == {1.1: False, 1e9: True}
