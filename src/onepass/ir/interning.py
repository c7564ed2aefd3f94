"""Interning: structurally equal nodes are one object, so equality is identity and hashing is O(1).

The table is the one permitted global: weak (dead graphs are freed) and locked (backward graphs
compile on another thread).
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from functools import lru_cache
from typing import Any

_table: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
_lock = threading.RLock()


class Interned(type):
    """Metaclass: `Node(a, b)` returns the existing node with those fields, if one is alive."""

    def __call__(cls, *args: Any) -> Any:
        key = (cls, *args)
        reference = _table.data.get(key)  # type: ignore[attr-defined]  # without the lock: most nodes exist
        if reference is not None and (found := reference()) is not None:
            return found
        with _lock:
            found = _table.get(key)
            if found is None:
                found = super().__call__(*args)
                _table[key] = found
            return found


@lru_cache(maxsize=65536)
def digest(text: str) -> int:
    """A number of a text that is the same in every process."""
    return zlib.crc32(text.encode())


def _after_fork() -> None:
    """A lock that another thread held when a process was forked would never be given back in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
