"""Masks stored for every row and column: a table of tiles bounds the sweep, and values are right for any data."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.schedule import product_kernels, products
from tests.checking import DEVICE
from tests.contractions.judging import explained, make_library_slow
from tests.contractions.test_visits import KEYS, ROWS, operands
from tests.unbuilt import unbuilt

Attention = Callable[..., Tensor]
BATCH, HEADS = 2, 2


def chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.mT * 0.25).masked_fill(~mask, -torch.inf), -1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.25 + mask, -1) @ v


def given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def seen(kind: str, rows: int = ROWS, keys: int = KEYS) -> Tensor:
    """What rows see of columns."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    made: dict[str, Callable[[], Tensor]] = {
        "causal": lambda: i >= j,
        "later": lambda: i <= j,
        "window": lambda: (i - j).abs() < 40,
        "documents": lambda: i // 37 == j // 37,
        "all": lambda: i >= 0 * j,
        "none": lambda: i < 0 * j,
        "one row": lambda: (i == 77) & (j < 200),
        "one": lambda: (i == 77) & (j == 201),
        "tiles": lambda: (i // 64 + j // 64) % 2 == 0,
        "middle": lambda: (j > 70) & (j < 190) & (i >= 0),
        "but one": lambda: (i != 100) | (j != 130),
        "random": lambda: torch.rand(rows, keys, generator=torch.Generator(DEVICE).manual_seed(0)) < 0.02,
    }
    return made[kind]()


KINDS = (
    "causal",
    "later",
    "window",
    "documents",
    "all",
    "none",
    "one row",
    "one",
    "tiles",
    "middle",
    "but one",
    "random",
)


def as_bias(mask: Tensor) -> Tensor:
    """Zero where a row sees a column, -inf where it does not; a few other numbers."""
    bias = torch.where(mask, 0.0, -math.inf)
    bias[::50, ::3] += 0.5
    return bias


@pytest.fixture(autouse=True)
def _every_sweep_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_STEPS", 0)
    monkeypatch.setattr(product_kernels, "MOST_ASKED", math.inf)
    make_library_slow(monkeypatch)


def compiled(function: Attention, **settings: object) -> Attention:
    options = {"tune": "off", "cache": False, "strict": True}
    options |= {} if DEVICE == "cuda" else {"target": "triton-interpret"}
    torch._dynamo.reset()
    result: Attention = torch.compile(function, backend="onepass", options=options, **settings)
    return result


def assert_as_eager(function: Attention, *inputs: Tensor) -> None:
    found = compiled(function)(*inputs)
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kind", ["window", "one", "tiles", "but one"])
def test_mixed_data(kind: str) -> None:
    assert_as_eager(chosen, *operands(), seen(kind))


@pytest.mark.rotating
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", ["chosen", "added"])
def test_any_data_gives_the_values_of_eager(kind: str, spelling: str) -> None:
    """Rows that see nothing are NaN in both."""
    if spelling == "chosen":
        assert_as_eager(chosen, *operands(), seen(kind))
    else:
        assert_as_eager(added, *operands(), as_bias(seen(kind)))


SHAPES: dict[str, Callable[[], Tensor]] = {
    "of batches": lambda: torch.stack([seen("causal"), seen("window")])[:, None],
    "of heads": lambda: torch.stack([seen("tiles"), seen("one row")])[None],
    "of both": lambda: torch.stack([seen(k) for k in ("all", "none", "later", "middle")]).view(2, 2, ROWS, KEYS),
    "of columns": lambda: torch.stack([seen("middle")[0], seen("all")[0]])[:, None, None],
    "of rows": lambda: torch.stack([seen("later")[:, 90], seen("one")[:, 201]])[:, None, :, None],
    "turned": lambda: seen("causal", KEYS, ROWS).mT,
    "a part": lambda: torch.nn.functional.pad(seen("window"), (7, 4, 3, 0))[3:, 7:-4],
}


@pytest.mark.rotating
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(shape: str) -> None:
    assert_as_eager(chosen, *operands(), SHAPES[shape]())
    assert_as_eager(added, *operands(), torch.where(SHAPES[shape](), 0.0, -math.inf))


def test_other_conditions_beside_it() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        i, j = (torch.arange(t.shape[-2], device=q.device) for t in (q, k))
        return chosen(q, k, v, (mask & (i[:, None] >= j)) | (j < 2))

    assert_as_eager(function, *operands(), seen("documents"))


def test_a_bias_that_hides_nothing() -> None:
    bias = torch.randn(ROWS, KEYS)
    bias[60:130] = 0.0
    bias[5, 7] = math.nan
    assert_as_eager(added, *operands(), bias)


def test_the_library_call_in_halves() -> None:
    q, k, v = (t.half() for t in operands())
    for mask in (seen("window"), as_bias(seen("causal")).half()):
        found = compiled(given)(q, k, v, mask)
        wide = mask if mask.dtype is torch.bool else mask.double()
        exact = given(q.double(), k.double(), v.double(), wide)
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.rotating
def test_sizes_known_at_run_time() -> None:
    run = compiled(chosen, dynamic=True)
    for rows, keys in ((150, 203), (64, 512), (31, 257)):
        inputs = *(torch.randn(2, 2, n, 16) for n in (rows, keys, keys)), seen("documents", rows, keys)
        torch.testing.assert_close(run(*inputs), chosen(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.rotating
@pytest.mark.parametrize("function", [chosen, added])
def test_gradients(function: Attention) -> None:
    mask = seen("window") | seen("tiles") & seen("causal") | (torch.arange(KEYS) == 3)
    inputs = [t.requires_grad_() for t in operands()]
    mask = mask if function is chosen else torch.where(mask, 0.0, -math.inf)
    for one in (found := compiled(function)(*inputs, mask), exact := function(*inputs, mask)):
        one.retain_grad()
    weights = torch.randn_like(exact)
    grads = (torch.autograd.grad((out * weights).sum(), inputs) for out in (found, exact))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


# --- kernels for chips ---


def kernels(
    function: Attention, mask: Tensor, grad: bool = False, rows: int = 4096, target: str = "sm_90"
) -> list[str]:
    tensors = [torch.empty(4, 16, rows, 128, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]
    with torch.set_grad_enabled(grad), unbuilt():
        found = onepass.explain(function, *tensors, mask, target=target, options={"cache": False, "strict": True})
    return [k.source for k in found.kernels]


@pytest.mark.parametrize("spelling", ["chosen", "added"])
def test_the_tables_are_made_in_these_tests(spelling: str) -> None:
    function, mask = (chosen, seen("window")) if spelling == "chosen" else (added, as_bias(seen("window")))
    names = [k.name for k in explained(function, *operands(), mask, target="triton-interpret").kernels]
    assert [name.split("_")[-2:] for name in names[:2]] == [["visits0", "0"], ["visits0", "1"]] and len(names) == 3


@pytest.mark.parametrize("function", [chosen, added, given])
def test_loops_where_a_mask_holds_do_not_read_it(function: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    make_library_slow(monkeypatch)
    dtype = torch.bfloat16 if function is added else torch.bool
    with FakeTensorMode():
        tiles, ends, kernel = kernels(function, torch.empty(4096, 4096, dtype=dtype))
    assert "any" in tiles and "all" in tiles and "min" in ends
    early, settled, late = (loop for loop in kernel.split("\n    for ") if "tl.dot" in loop)
    assert "tl.load" in early and "tl.load" in late
    assert "tl.load" not in settled and "end2" in settled and "end3" in settled


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_backward_is_bounded_too(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the sweep expected, to compute the weights again is predicted to be faster than to store them."""
    monkeypatch.undo()
    with FakeTensorMode():
        found = kernels(chosen, torch.empty(4096, 4096, dtype=torch.bool), grad=True, target=target)
    sweeps = [k for k in found if "tl.dot" in k]
    assert len(sweeps) == 3 and all(k.count("end3") > 1 for k in sweeps)


def test_a_mask_for_every_head_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read it takes as long as what could be gained, or nearly."""
    monkeypatch.undo()
    make_library_slow(monkeypatch)
    with FakeTensorMode():
        (kernel,) = kernels(added, torch.empty(4, 16, 4096, 4096, dtype=torch.bfloat16))
    assert "end0" not in kernel


def test_shorter_sweeps_are_asked_where_half_is_expected_to_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few microseconds of tens: nothing is expected of numbers that are added."""
    monkeypatch.undo()
    make_library_slow(monkeypatch)
    with FakeTensorMode():
        asked = kernels(chosen, torch.empty(1024, 1024, dtype=torch.bool), rows=1024)
        plain = kernels(added, torch.empty(1024, 1024, dtype=torch.bfloat16), rows=1024)
    assert (len(asked), len(plain)) == (3, 1)
