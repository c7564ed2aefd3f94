"""Chips that kernels are built for, present or not.

Building is most of what such a test takes. `CHIPS` is one chip in every run and the others by rotation, for most
tests; `EVERY_CHIP` is all of them in every run, for a few programs that stand for the others.
"""

from __future__ import annotations

import pytest

EVERY_CHIP = ("sm_80", "sm_90", "sm_100", "gfx942")
CHIPS = [name if name == "sm_90" else pytest.param(name, marks=pytest.mark.rotating) for name in EVERY_CHIP]
