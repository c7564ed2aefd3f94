"""Where the time of a program goes: measured kernel by kernel, beside eager, and operation by operation.

`measure_program` compiles and runs a program and gives an `explain.profile.Profile`.
"""

from __future__ import annotations

from .issue import note_issue
from .run import Wanted, measure_program

__all__ = ["Wanted", "measure_program", "note_issue"]
