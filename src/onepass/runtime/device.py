"""The GPU at hand, as an entry of the table of targets."""

from __future__ import annotations

import torch
from torch import distributed

from ..errors import UnknownTarget
from ..ir.target import Target, find_chip


def current_chip() -> Target:
    """The target of the current GPU; `UnknownTarget` where the table has none that runs on it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return find_chip(architecture, properties.major, properties.minor)


def runs_here(name: str) -> bool:
    """Whether a target's kernels run on the current GPU."""
    try:
        return torch.cuda.is_available() and current_chip().name == name
    except UnknownTarget:
        return False


def has_other_ranks() -> bool:
    """Whether this process is one of several that compute together.

    What each would measure for itself may differ, and one would wait in an exchange while another measures.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return bool(distributed.get_world_size() > 1)
