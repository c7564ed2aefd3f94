"""Small changes of large inputs: made in place where nobody reads the old values, and right in any case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.backend import record_compilations
from tests.checking import DEVICE, compare, compiled, execute, fresh, to_float64

LONG = 4096  # of a cache of 2 MiB in float32
Step = Callable[[Tensor, Tensor, Tensor], Any]


def by_index(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    cache[:, at] = new
    return cache.sum(1)


def by_copy(cache: Tensor, new: Tensor, at: Tensor) -> None:
    cache.index_copy_(1, at, new * 2)


def by_slice(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    cache[:, 7:10] = new
    return cache.amax(1)


def by_select(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    cache[:, -2] = new[:, 0]
    return cache[:, -1] + 1


def by_number(cache: Tensor, new: Tensor, at: Tensor) -> None:
    cache[:, 7:10] = 3.0


def by_scatter(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    cache.scatter_(1, at[:1].view(1, 1, 1).expand(4, 1, 32), new[:, :1])
    return cache.mean(1)


def by_adding(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    cache[:, 7:10] += new
    return cache.sum(1)


def by_accumulating(cache: Tensor, new: Tensor, at: Tensor) -> None:
    cache.index_add_(1, at, new)


def several(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    cache[:, at] = new
    cache[:, 100:103] = new * 2
    cache[:, 100] = new[:, 1]
    return cache.sum(1)


def from_itself(cache: Tensor, new: Tensor, at: Tensor) -> None:
    cache[:, 1:4] = cache[:, 20:23]


def nested(cache: Tensor, new: Tensor, at: Tensor) -> None:
    cache[1:3, 5:8] = new[1:3]


def indices_of_a_slice(cache: Tensor, new: Tensor, at: Tensor) -> None:
    cache[:3][:, at] = new[:3] + 1


def one_place(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    cache[2, 7] = new[0, 0]
    return cache[2].sum(0)


def read_before(cache: Tensor, new: Tensor, at: Tensor) -> None:
    """What is read of the old values serves the change alone."""
    cache[:, 7:10] = new + cache[:, 20:23] * 2


IN_PLACE: tuple[Step, ...] = (
    by_index, by_copy, by_slice, by_select, by_number, by_scatter, by_adding, by_accumulating, several, from_itself,
    nested, indices_of_a_slice, one_place, read_before,
)  # fmt: skip


def old_is_returned(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    old = cache * 2
    cache[:, at] = new
    return old


def old_is_summed_later(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    old = cache.clone()
    cache[:, at] = new
    return old.sum(1) + cache.sum(1)


def old_goes_to_another(cache: Tensor, new: Tensor, at: Tensor) -> None:
    new.copy_(cache[:, 7:10])
    cache[:, 7:10] = 1.0


def copy_is_returned(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    """A tensor of its own beside the changed input."""
    changed = cache.index_copy(1, at, new)
    cache.copy_(changed)
    return changed


def many(cache: Tensor, new: Tensor, at: Tensor) -> None:
    """Most of it changes: a kernel is as good."""
    cache[:, : LONG - 96] = cache[:, 96:] * 2


def masked(cache: Tensor, new: Tensor, at: Tensor) -> None:
    cache[cache > 1] = 0.0


OTHERS: tuple[Step, ...] = (
    old_is_returned, old_is_summed_later, old_goes_to_another, copy_is_returned, many, masked,
)  # fmt: skip


def drawn(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, LONG, 32).to(dtype), torch.randn(4, 3, 32).to(dtype), torch.tensor([5, 2000, LONG - 1])]


@pytest.mark.parametrize("step", (*IN_PLACE, *OTHERS))
def test_values(step: Step) -> None:
    """Results, the changed input, strides and aliasing, twice in a row."""
    inputs = drawn()
    run = compiled(step)
    ours, eager = (fresh(inputs) for _ in range(2))
    wide = [to_float64(t) for t in inputs]
    for _ in range(2):
        compare(*(execute(f, t, gradients=False) for f, t in ((run, ours), (step, eager), (step, wide))))


@pytest.mark.parametrize("step", IN_PLACE)
def test_only_what_changes_moves(step: Step) -> None:
    inputs = drawn()
    with record_compilations() as records:
        compiled(step)(*inputs)
    (record,) = records
    size = inputs[0].nbytes
    reads = size if step in (by_index, by_slice, by_scatter, by_adding, several, one_place) else 0
    assert record.bytes_moved < reads + size / 10


@pytest.mark.parametrize("step", OTHERS)
def test_old_values_stay_where_they_are_read(step: Step) -> None:
    with record_compilations() as records:
        compiled(step)(*drawn())
    assert all("into the input itself" not in e.why for record in records for e in record.externs)


def rows_added(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    """Zeros that nobody else has."""
    return torch.zeros_like(cache).index_add(1, at, new) * 2


def rows_of_a_sum(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return (cache + 1).index_copy(1, at, new)


def zeros_of_two(cache: Tensor, new: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """Equal tensors are made once, and each has readers of its own."""
    first, second = torch.zeros_like(cache), torch.zeros_like(cache)
    return first.index_add(1, at, new), second + 1, second.index_copy(1, at, new * 2)


def read_afterwards(cache: Tensor, new: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    base = cache * 2
    return base.index_copy(1, at, new), base.sum(1)


OWN: dict[Step, bool] = {rows_added: True, rows_of_a_sum: True, zeros_of_two: False, read_afterwards: False}


@pytest.mark.parametrize("step", OWN)
def test_tensors_of_the_graph(step: Step) -> None:
    """Changed in place if a kernel made them for that alone."""
    inputs = drawn()
    with record_compilations() as records:
        run = compiled(step)
        compare(*(execute(f, fresh(inputs), gradients=False) for f in (run, step)), None)
    calls = [e for record in records for e in record.externs if "index_" in e.op]
    assert calls and all((e.bytes_moved < inputs[0].nbytes) == OWN[step] for e in calls)


def test_a_position_that_changes() -> None:
    """Compiled once for every position."""

    def step(cache: Tensor, new: Tensor, at: int) -> Tensor:
        cache[:, at : at + 3] = new
        return cache.sum(1)

    run = compiled(step, dynamic=True)
    cache, new, _ = drawn()
    mine, theirs = cache.clone(), cache.clone()
    with record_compilations() as records:
        for at in (5, 6, 900, LONG - 3):
            torch.testing.assert_close(run(mine, new, at), step(theirs, new, at), rtol=1e-4, atol=1e-4)
            assert torch.equal(mine, theirs)
    assert len(records) == 1 and records[0].bytes_moved < 1.2 * cache.nbytes


def test_layouts() -> None:
    """Permuted inputs are changed in place; of an expanded one several elements are one."""
    cache, new, at = drawn()
    for permuted in (cache.transpose(0, 1).contiguous().transpose(0, 1), cache[:, ::2]):
        mine, theirs = (permuted.clone(memory_format=torch.preserve_format) for _ in range(2))
        compiled(by_index)(mine, new, at // 2)
        by_index(theirs, new, at // 2)
        assert torch.equal(mine, theirs)


def test_training() -> None:
    """A buffer of statistics that the forward changes and the backward needs."""

    def step(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
        with torch.no_grad():
            cache[:, at] = x.detach()
        return (cache[:, at] * x).sum()

    cache, new, at = drawn()
    results = []
    for run in (compiled(step), step):
        own, x = cache.clone(), new.clone().requires_grad_()
        run(own, x, at).backward()
        results.append((own, x.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_attention_over_a_cache() -> None:
    """A step of decoding writes one key and reads all of them."""

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        keys[:, :, at] = k
        values[:, :, at] = v
        s = (q @ keys.mT) / 8
        s = s.masked_fill(torch.arange(keys.shape[2], device=s.device) > at, float("-inf"))
        return s.softmax(-1) @ values

    torch.manual_seed(0)
    options = {} if DEVICE == "cuda" else {"target": "triton-interpret"}
    pytest.importorskip("triton")
    q, k, v = (torch.randn(1, 2, 1, 64) for _ in range(3))
    keys, values = (torch.randn(1, 2, 128, 64) for _ in range(2))
    mine = [keys.clone(), values.clone()]
    run = torch.compile(step, backend="onepass", options={"cache": False, **options})
    for n in (0, 5, 127):
        at = torch.tensor([n])
        with record_compilations() as records:
            ours = run(q, k, v, *mine, at)
        torch.testing.assert_close(ours, step(q, k, v, keys, values, at), rtol=1e-4, atol=1e-4)
        assert torch.equal(mine[0], keys) and torch.equal(mine[1], values)
        assert all("mm" not in e.op for record in records for e in record.externs)


def test_the_debug_ladder_and_explain_leave_inputs_as_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, new, at = drawn()
    before = cache.clone()
    e = onepass.explain(by_index, cache, new, at)
    assert "into the input itself" in str(e)
    mine = before.clone()
    torch.compile(by_index, backend="onepass", options={"debug": 5, "cache": False})(mine, new, at)
    by_index(before, new, at)
    assert torch.equal(mine, before)
