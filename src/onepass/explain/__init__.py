"""What the compiler did and why: compile records in; text, JSON and one HTML page out.

An `Explanation` holds the records; `run_recorded` makes them by running a program once.
"""

from __future__ import annotations

from .capture import run_recorded
from .explanation import Explanation

__all__ = ["Explanation", "run_recorded"]
