"""`onepass demo`: real workloads compiled, checked against eager and float64, and timed."""

from __future__ import annotations

from .run import run_demo

__all__ = ["run_demo"]
