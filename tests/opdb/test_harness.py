"""The checks can fail: backends that are wrong in one way each are caught, aot_eager is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.checking import Compiler, Mismatch, backend_callable
from tests.opdb.cases import some_samples
from tests.opdb.check import Skipped, check_case


def wrong(change: Callable[[torch.Tensor], torch.Tensor]) -> Compiler:
    """A backend whose every output is changed."""

    def compiler(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return lambda *args: [change(o) if isinstance(o, torch.Tensor) else o for o in module(*args)]

    return compiler


def check(name: str, dtype: torch.dtype, compiler: Compiler) -> None:
    check_case(some_samples(name, dtype, 0, 2)[0], compiler, training=True)


def test_right_backend_passes() -> None:
    for name, dtype in [("mul", torch.float32), ("sum", torch.bfloat16), ("bitwise_and", torch.int64)]:
        check(name, dtype, backend_callable("aot_eager"))
    check("nn.functional.dropout", torch.float32, backend_callable("aot_eager"))
    check("transpose", torch.float32, backend_callable("aot_eager"))


FAULTS = [
    ("mul", torch.float32, lambda t: t * (1 + 1e-4)),  # also the gradients
    ("sum", torch.bfloat16, lambda t: t * 1.05),
    ("bitwise_and", torch.int64, lambda t: t + 1),
    ("mul", torch.float32, lambda t: t.double()),
    ("mul", torch.float32, lambda t: t.unsqueeze(0)),
    ("mm", torch.float32, lambda t: t.t().contiguous().t()),  # strides
    ("transpose", torch.float32, lambda t: t.clone()),  # no longer a view
    ("exp", torch.float32, lambda t: torch.where(t > 1, t, torch.nan)),
    ("mul", torch.float32, lambda t: t.detach()),  # gradients lost
    ("randn_like", torch.float32, lambda t: torch.zeros_like(t)),  # not random
    ("mul", torch.float32, lambda t: 1 // 0),  # an error
]


@pytest.mark.parametrize(("name", "dtype", "change"), FAULTS, ids=[f"{i}-{f[0]}" for i, f in enumerate(FAULTS)])
def test_wrong_backend_is_caught(name: str, dtype: torch.dtype, change: Callable[..., Any]) -> None:
    cases = some_samples(name, dtype, 0, 8)
    with pytest.raises(Mismatch):
        for case in cases:
            check_case(case, wrong(change), training=True)


def test_what_aot_eager_cannot_do_is_skipped() -> None:
    with pytest.raises(Skipped, match="aot_eager"):
        check("nonzero", torch.float32, backend_callable("aot_eager"))
