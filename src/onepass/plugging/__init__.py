"""Kernels and rewrites that users plug in: `onepass.kernel`, `onepass.replace`.

Each has a reference in torch (`declared.py`). A part of a program whose text in real numbers (`analysis/canonical.py`)
is that of the reference, traced on tensors like those the part reads, runs in the user's way (`places.py`). Before that
the user's function is compared with the reference on samples (`checks.py`); a kernel is also timed against ours. In
training the parts are found before there is a backward graph, in dynamo's (`training.py`).
"""

from __future__ import annotations

from .declared import KernelWarning as KernelWarning
from .declared import kernel as kernel
from .declared import replace_by as replace_by
from .declared import unplug as unplug
from .places import Plugged as Plugged
from .places import plugged as plugged
from .training import plug_into as plug_into
