"""The private torch names the partition uses."""

from __future__ import annotations

from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

__all__ = ["functorch_config", "min_cut_rematerialization_partition"]
