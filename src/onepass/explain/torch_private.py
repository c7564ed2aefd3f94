"""The private torch names that explaining needs."""

from __future__ import annotations

from torch._dynamo import config as dynamo_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "dynamo_config"]
