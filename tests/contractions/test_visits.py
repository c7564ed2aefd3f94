"""Masks that come from data: a sweep visits what they leave to a tile of rows, and values are right for any data."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.ir.dtypes import DType
from onepass.ir.expr import const
from onepass.ir.target import find_target
from onepass.schedule import products
from tests.checking import DEVICE
from tests.contractions.judging import explained, make_library_slow

Mask = Callable[..., Tensor]
ROWS, KEYS = 150, 203  # several steps of keys, the last one cut


def by_positions(i: Tensor, j: Tensor) -> Tensor:
    return i[:, None, :, None] >= j[:, None, None, :]


def windowed(i: Tensor, j: Tensor) -> Tensor:
    far = i[:, None, :, None] - j[:, None, None, :]
    return by_positions(i, j) & (far < 20)  # the distance mixes both sides: only the first condition bounds


def documents(i: Tensor, j: Tensor) -> Tensor:
    return i[:, None, :, None] == j[:, None, None, :]


def either(i: Tensor, j: Tensor) -> Tensor:
    return documents(i, j) | (j[:, None, None, :] < 3)


def neither(i: Tensor, j: Tensor) -> Tensor:
    return ~(i[:, None, :, None] < j[:, None, None, :])


def unequal(i: Tensor, j: Tensor) -> Tensor:
    return i[:, None, :, None] != j[:, None, None, :]


def padding(i: Tensor, j: Tensor) -> Tensor:
    return (j != 0)[:, None, None, :]


def after_padding(i: Tensor, j: Tensor) -> Tensor:
    place = torch.arange(j.shape[1], device=j.device)
    return (place >= j[:, :1])[:, None, None, :] & (place <= torch.arange(i.shape[1], device=i.device)[:, None] + 60)


def lengths(i: Tensor, j: Tensor) -> Tensor:
    return (torch.arange(j.shape[1], device=j.device) < j[:, :1])[:, None, None, :]


def between(i: Tensor, j: Tensor) -> Tensor:
    place = torch.arange(j.shape[1], device=j.device)
    return ((place > i[:, :1]) & (place <= j[:, 1:2]))[:, None, None, :]


def cached(i: Tensor, j: Tensor) -> Tensor:
    return i[:, None, :, None] >= torch.arange(j.shape[1], device=j.device)


MASKS = (
    by_positions, windowed, documents, either, neither, unequal, padding, after_padding, lengths, between, cached
)  # fmt: skip


def attention(mask: Mask) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.25).masked_fill(~mask(i, j), -torch.inf)
        return torch.softmax(scores, -1) @ v

    return function


def data(kind: str, rows: int = ROWS, keys: int = KEYS) -> tuple[Tensor, Tensor]:
    n = max(rows, keys)
    made = {
        "ascending": torch.arange(n).repeat(2, 1),
        "descending": torch.arange(n).flip(0).repeat(2, 1),
        "equal": torch.full((2, n), 7),
        "holes": (torch.arange(n) % 97 == 50).long().repeat(2, 1),
        "repeated": (torch.arange(n) // 40).repeat(2, 1),
        "random": torch.randint(-5, 90, (2, n)),
        "ends": torch.tensor(
            [[-(1 << 63), (1 << 63) - 1, 3, (1 << 63) - 1], [(1 << 63) - 1, -(1 << 63), 70, 9]]
        ).repeat(1, n // 4 + 1),
        "hidden": torch.cat([torch.full((2, n // 2), 1 << 40), torch.zeros(2, n - n // 2, dtype=torch.int64)], 1),
    }[kind]
    return made[:, :rows].clone(), made[:, :keys].clone()


def operands() -> list[Tensor]:
    return [torch.randn(2, 2, n, 16) for n in (ROWS, KEYS, KEYS)]


@pytest.fixture(autouse=True)
def _every_sweep_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_STEPS", 0)
    monkeypatch.setattr(products, "SEEN_BY_THREAD", 1)
    make_library_slow(monkeypatch)


@pytest.fixture(params=[0, 1 << 20], ids=["before", "inside"])
def where_it_is_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel before the one that sweeps, as if programs always followed others, or inside."""
    monkeypatch.setattr(products, "ROUNDS", request.param)


def ask_no_tiles(patch: pytest.MonkeyPatch) -> None:
    """Conditions without a test of columns say nothing."""
    patch.setattr(products, "spelled", lambda *_, **__: const(True, DType.BOOL))


def compiled(mask: Mask, **settings: object) -> Callable[..., Tensor]:
    options = {"tune": "off", "cache": False, "strict": True}
    options |= {} if DEVICE == "cuda" else {"target": "triton-interpret"}
    torch._dynamo.reset()
    result: Callable[..., Tensor] = torch.compile(attention(mask), backend="onepass", options=options, **settings)
    return result


@pytest.mark.usefixtures("where_it_is_asked")
@pytest.mark.parametrize("mask", [by_positions, documents, between])
@pytest.mark.parametrize("kind", ["random", "ends"])
def test_mixed_data(mask: Mask, kind: str) -> None:
    inputs = *operands(), *data(kind)
    torch.testing.assert_close(compiled(mask)(*inputs), attention(mask)(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.rotating
@pytest.mark.usefixtures("where_it_is_asked")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["ascending", "descending", "equal", "holes", "repeated", "random", "hidden", "ends"])
def test_any_data_gives_the_values_of_eager(mask: Mask, kind: str) -> None:
    """Rows without any key that counts are NaN in both."""
    inputs = *operands(), *data(kind)
    found = compiled(mask)(*inputs)
    torch.testing.assert_close(found, attention(mask)(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_narrow_integers(dtype: torch.dtype) -> None:
    inputs = *operands(), *(t.clamp(0, 200).to(dtype) for t in data("random"))
    torch.testing.assert_close(
        compiled(by_positions)(*inputs), attention(by_positions)(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True
    )


def test_sizes_known_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROUNDS", 0)
    run = compiled(documents, dynamic=True)
    for rows, keys in ((150, 203), (64, 512), (31, 257)):
        q, k, v = (torch.randn(2, 2, n, 16) for n in (rows, keys, keys))
        inputs = q, k, v, *data("repeated", rows, keys)
        torch.testing.assert_close(run(*inputs), attention(documents)(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kind", ["holes", "random", "equal"])
def test_a_chunk_of_keys_asks_about_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query: programs share out its keys."""
    ask_no_tiles(monkeypatch)
    inputs = *(torch.randn(2, 1, n, 16) for n in (1, 1501, 1501)), *data(kind, 1, 1501)
    e = explained(attention(padding), *inputs, target="triton-interpret")
    assert "in 4 chunks" in e.kernels[0].schedule and "for v0 in tl.range(max(0, g" in e.kernels[0].source
    torch.testing.assert_close(
        compiled(padding)(*inputs), attention(padding)(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True
    )


def kernels_of(mask: Mask, dtype: torch.dtype = torch.int64) -> list[str]:
    """The kernels for the H200."""
    with FakeTensorMode(), torch.no_grad():
        tensors = [torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16) for _ in range(3)]
        e = explained(attention(mask), *tensors, *(torch.empty(4, 4096, dtype=dtype) for _ in range(2)))
    return [k.source for k in e.kernels]


def source_of(mask: Mask, dtype: torch.dtype = torch.int64) -> str:
    """The one that sweeps."""
    (kernel,) = [k for k in kernels_of(mask, dtype) if "tl.dot" in k]
    return kernel


def sweeps_of(mask: Mask, dtype: torch.dtype = torch.int64) -> list[str]:
    """The loops with products of that kernel, each with its body."""
    loops = re.split(r"\n    (?=for )", source_of(mask, dtype))
    return [loop.split("\n    sum_")[0] for loop in loops if "tl.dot" in loop]


@pytest.mark.parametrize("mask", MASKS)
def test_which_masks_bound_a_sweep(mask: Mask) -> None:
    for loop in sweeps_of(mask):
        head = loop.splitlines()[0]
        assert "end1" in head and ("end0" in head or mask in (lengths, cached)), head


def test_a_condition_without_a_test_of_columns_bounds_nothing_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_no_tiles(monkeypatch)
    assert not any("end0" in loop for loop in sweeps_of(unequal))


@pytest.mark.parametrize("mask", [by_positions, documents, either, neither, padding, after_padding])
def test_masks_are_not_computed_where_they_hold_for_all_rows(mask: Mask) -> None:
    """Of three loops the second one, which data decides the ends of, reads nothing but matrices."""
    early, settled, late = sweeps_of(mask)
    assert "-inf" in early.split("none")[0] and "-inf" in late.split("none")[0]
    assert "tl.load" not in settled and "-inf" not in settled.split("none")[0], settled


@pytest.mark.parametrize(("mask", "loops"), [(lengths, 2), (between, 3), (cached, 2)])
def test_ends_that_are_numbers_are_not_looked_for(mask: Mask, loops: int) -> None:
    (kernel,) = kernels_of(mask)
    assert kernel.count("tl.dot") == 2 * loops and "visited" not in kernel
    assert "tl.load" not in sweeps_of(mask)[loops == 3]


def test_later_rows_start_first_where_larger_data_leaves_them_more() -> None:
    """Later rows have larger positions as a rule, and programs with most to do should not start last.

    So have later rows of conditions that a table of tiles answers for.
    """
    turned = [mask for mask in MASKS if re.search(r"- ?g\d \*", source_of(mask))]
    assert turned == [by_positions, windowed, documents, either, neither, unequal, after_padding, cached]


def test_masks_that_are_not_known_for_all_rows_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_no_tiles(monkeypatch)
    assert ["tl.load" in loop for loop in sweeps_of(windowed)] == [True]


def test_extremes_of_floats_bound_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN among the rows of a tile would hide the others."""
    ask_no_tiles(monkeypatch)
    assert not any("end0" in loop for loop in sweeps_of(by_positions, torch.float32))


@pytest.mark.rotating
def test_a_processor_holds_two_programs() -> None:
    """The loops that compute the mask copy what it is made of to shared memory; they have fewer copies on their way."""
    meta = [torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    places = [torch.empty(4, 4096, dtype=torch.int64, device="meta") for _ in range(2)]
    with torch.no_grad():
        _, kernel = onepass.explain(attention(by_positions), *meta, *places, target="sm_90").kernels
    target = find_target("sm_90")
    assert target.resident_programs(kernel.registers, kernel.shared_bytes, kernel.threads) == 2
    assert (kernel.source.count("num_stages=3"), kernel.source.count("num_stages=2")) == (1, 2)
