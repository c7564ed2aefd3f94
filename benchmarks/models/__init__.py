"""Whole models beside eager, Inductor and XLA: `python -m benchmarks --set models`."""
