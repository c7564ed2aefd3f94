"""What this machine's CPU can do: bytes of a plain copy and FLOPs of a library product, measured once per process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ..explain.measured import Limits

_COPIED, _SIZE, _ROUNDS = 16 << 20, 1024, 7


@functools.lru_cache(maxsize=4)
def _limits(threads: int) -> Limits:
    source = torch.zeros(_COPIED)
    target = torch.zeros_like(source)
    left, right = (torch.randn(_SIZE, _SIZE) for _ in range(2))
    image, weight = left.view(1, _SIZE, 32, -1), right.view(_SIZE, _SIZE, 1, 1)
    copy_us = _least_us(lambda: target.copy_(source))
    # torch multiplies by one library and convolves by another; the faster one is the limit.
    product_us = min(_least_us(lambda: torch.mm(left, right)), _least_us(lambda: torch.conv2d(image, weight)))
    text = f"measured here: a copy of 64 MiB, a float32 product of {_SIZE}^3, {threads} threads"
    return Limits(2 * source.nbytes / copy_us, 2 * _SIZE**3 / product_us, text)


def measured_limits() -> Limits:
    """The limits of the CPU with as many threads as torch uses now."""
    with torch.inference_mode():
        return _limits(torch.get_num_threads())


def _least_us(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start))
    return min(found)
