"""Two samples of every operator and type, the ordinary use and one more; by ONEPASS_OPDB_SAMPLES and _SEED others."""

from __future__ import annotations

import os

import pytest
import torch

from tests.checking import backend_callable
from tests.opdb.cases import pairs, short, skip_reason, some_samples
from tests.opdb.check import Skipped, check_case

SEED = int(os.environ.get("ONEPASS_OPDB_SEED", "0"))
SAMPLES = int(os.environ.get("ONEPASS_OPDB_SAMPLES", "2"))


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "dtype"), [pytest.param(n, d, id=f"{n}-{short(d)}") for n, d in pairs()])
def test_operator(name: str, dtype: torch.dtype) -> None:
    if reason := skip_reason(name, dtype):
        pytest.skip(reason)
    print(f"ONEPASS_OPDB_SEED={SEED}, {SAMPLES} samples")  # shown with a failure
    reasons = []
    cases = some_samples(name, dtype, SEED, SAMPLES)
    for number, case in enumerate(cases):
        print(f"sample {number}: {[(tuple(t.shape), t.dtype) for t in case.tensors]}")
        # The first trains where it can; the others alternate, so both kinds of graph meet every operator.
        try:
            check_case(case, backend_callable(), training=number % 2 == 0)
        except Skipped as skipped:
            reasons.append(str(skipped))
    if len(reasons) == len(cases):
        pytest.skip(reasons[0] if reasons else "no samples")
