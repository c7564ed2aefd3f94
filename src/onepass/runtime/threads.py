"""How many threads a kernel may use: what `torch.set_num_threads` says, and one in a forked child.

libgomp's worker threads do not survive a fork, and a parallel region in the child would wait for them
forever. With one thread a region never looks at the pool.
"""

from __future__ import annotations

import os

import torch

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def thread_count() -> int:
    """Threads for one launch, asked once per call of a compiled graph."""
    return 1 if _forked else torch.get_num_threads()
