"""The private torch names that explaining needs."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode"]
