"""Planning asks the questions of equal layers once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
import onepass.analysis.contraction as contraction
import onepass.analysis.rows as rows
import onepass.backend
from tests.contractions.judging import explained

pytest.importorskip("triton")
WIDTH = 512


def layer(x: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
    batch, rows, _ = x.shape
    heads = F.linear(F.layer_norm(x, (WIDTH,)), qkv).view(batch, rows, 3, 4, -1).permute(2, 0, 3, 1, 4)
    weights = torch.softmax(heads[0] @ heads[1].transpose(-1, -2) * 0.1, -1)
    x = x + F.linear((weights @ heads[2]).transpose(1, 2).reshape(batch, rows, WIDTH), out)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), up)), down)


def tried(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many regions are looked at in a model of so many layers."""
    calls = 0

    def counted(unify: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def count(stores: Any) -> Any:
            nonlocal calls
            calls += 1
            return unify(stores)

        return count

    shapes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    weights = [torch.randn(s, dtype=torch.bfloat16) for _ in range(count) for s in shapes]

    def model(x: Tensor, *weights: Tensor) -> Tensor:
        for k in range(count):
            x = layer(x, *weights[4 * k : 4 * k + 4])
        return x

    with monkeypatch.context() as patch:
        for module in (contraction, rows):
            patch.setattr(module, "unify", counted(module.unify))
        e = onepass.explain(
            model, torch.randn(2, 64, WIDTH, dtype=torch.bfloat16), *weights, target="sm_90", options={"cache": False}
        )
    assert sum("bmm" in x.op for g in e.graphs for x in g.externs) == 0
    return calls


def test_more_layers_ask_no_more_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """From three on: then there is a first layer, a last one, and one between two others."""
    three, four, six = (tried(n, monkeypatch) for n in (3, 4, 6))
    assert three == four == six > 0


def test_no_region_waits_for_itself() -> None:
    """Both products of a chain cannot be one kernel where a sort of what the first one made is needed by the second."""

    def weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2)
        return torch.exp(s - torch.sort(s.amax(-1)).values[..., None]) @ v

    options = {"target": "triton-interpret", "tune": "off", "cache": False}
    inputs = [torch.randn(64, 32) * 0.1 for _ in range(3)]
    with onepass.backend.record_compilations() as records:
        result = torch.compile(weighted, backend="onepass", options=options)(*inputs)
    torch.testing.assert_close(result, weighted(*inputs), rtol=1e-4, atol=1e-5)
    assert [r.fallback for r in records] == [""]
    assert any(d.kind == "chain" and "another step lies between" in d.reason for r in records for d in r.decisions)


def test_products_do_not_store_what_attention_computes_again() -> None:
    """Heads are cut out of projections and widened: the attention reads the projections, which are products alone."""

    def function(x: Tensor, mask: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (16, 64)).transpose(1, 2) for w in weights)
        scores = q.float() @ k.float().transpose(-1, -2) * 0.125 + mask
        return torch.softmax(scores, -1).to(v.dtype) @ v

    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(8, 1024, 1024, dtype=torch.bfloat16)
        weights = [torch.empty(1024, 1024, dtype=torch.bfloat16) for _ in range(3)]
        e = explained(function, x, torch.empty(8, 1, 1, 1024), *weights)
    attention = [k for k in e.kernels if any("bmm" in o["op"] for o in k.operations) and not k.asks]
    assert len(attention) == 1 and not any("bmm" in x.op for x in e.externs)
    others = {o["op"] for k in e.kernels if k not in attention and not k.asks for o in k.operations}
    assert others <= {"aten.mm.default"}, others
    made = 8 * 1024 * 1024 * 2
    assert attention[0].bytes_read <= 1.01 * 3 * made + 8 * 1024 * 4


def test_rotated_keys_are_stored_and_the_mask_of_documents_is_not() -> None:
    """Rotating a key anew for every tile of queries costs more than storing it; comparing two numbers does not."""

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def function(x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (-1, 64)).transpose(1, 2) for w in weights)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (t.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        place = torch.arange(x.shape[1], device=x.device)
        seen = (place[:, None] >= place) & (documents[:, None, :, None] == documents[:, None, None, :])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(8, 1024, 1024, dtype=torch.bfloat16)
        cos, sin = (torch.empty(1024, 64, dtype=torch.bfloat16) for _ in range(2))
        weights = [torch.empty(1024, n, dtype=torch.bfloat16) for n in (1024, 512, 512)]
        e = explained(function, x, cos, sin, torch.empty(8, 1024, dtype=torch.int64), *weights)
    attention = [k for k in e.kernels if any("bmm" in o["op"] for o in k.operations) and not k.asks]
    assert len(attention) == 1 and not any("bmm" in x.op for x in e.externs)
    computed = {o["op"] for o in attention[0].operations}
    assert "aten.eq.Tensor" in computed and "aten.neg.default" not in computed, computed
    heads = 8 * 1024 * (1024 + 512 + 512) * 2  # 16-bit, keys and values not repeated
    assert attention[0].bytes_read <= 1.01 * heads + 8 * 1024 * 8
    assert "ieee" not in attention[0].source


def relative_bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seen: Tensor) -> Tensor:
    """Attention with a bias by the logarithm of distances, for a batch whose mask hides some keys."""
    place = torch.arange(q.shape[2], device=q.device)
    far = (place - place[:, None]).abs()
    bucket = torch.where(far < 8, far, (8 + torch.log(far.float() / 8) * 4).long().clamp(max=15))
    bias = F.embedding(bucket, table).permute(2, 0, 1)[None]
    return torch.softmax(q @ k.mT + bias.masked_fill(~seen, -1e4), -1) @ v


def test_a_bias_that_a_batch_shares_is_computed_once() -> None:
    """On one H200 attention of this size took 250 us with the buckets computed for every score."""
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(8, 16, 512, 64, dtype=torch.bfloat16) for _ in range(3))
        table, seen = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(8, 1, 1, 512, dtype=torch.bool)
        e = explained(relative_bias, q, k, v, table, seen)
    (attention,) = [k for k in e.kernels if any("bmm" in o["op"] for o in k.operations)]
    computed = {o["op"] for o in attention.operations}
    assert "aten.embedding.default" not in computed and "aten.log.default" not in computed, computed
    assert attention.predicted_us < 60 and sum(k.predicted_us for k in e.kernels) < 70


def test_a_shared_bias_has_the_values_of_eager() -> None:
    q, k, v = (torch.randn(4, 2, 37, 16) for _ in range(3))
    table, seen = torch.randn(16, 2), torch.rand(4, 1, 1, 37) > 0.2
    options = {"target": "triton-interpret", "tune": "off", "cache": False, "strict": True}
    found = torch.compile(relative_bias, backend="onepass", options=options)(q, k, v, table, seen)
    torch.testing.assert_close(found, relative_bias(q, k, v, table, seen), rtol=1e-4, atol=1e-5)
