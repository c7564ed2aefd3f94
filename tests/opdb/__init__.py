"""torch's operator database under the backend: every operator's own samples, forward and gradients.

`pytest tests/opdb` checks a few samples of each; `python -m tests.opdb` (make opdb) checks all of them,
in parallel and resumable, and writes what is committed in `results/`.
"""
