"""Threads and forks: how many threads a kernel may use, and locks that a forked child can take.

libgomp's worker threads do not survive a fork, and a parallel region in the child would wait for them
forever. With one thread a region never looks at the pool.
"""

from __future__ import annotations

import os
import threading

import torch

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def thread_count() -> int:
    """Threads for one launch, asked once per call of a compiled graph."""
    return 1 if _forked else torch.get_num_threads()


def fork_safe_lock() -> threading.Lock:
    """A lock that is free in a forked child, whichever thread of the parent held it."""
    lock = threading.Lock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
