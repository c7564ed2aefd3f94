"""This process's own temporary folder, where kernels are built before they enter the cache.

Removed when the process ends; what a killed process left is removed by a later one. A forked child makes
its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from .threads import fork_safe_lock

_PREFIX = "onepass-build-"
_LEFTOVER_SECONDS = 24 * 3600
_lock = fork_safe_lock()
_made: dict[int, Path] = {}  # by process, so that a child does not remove its parent's


def scratch_folder() -> Path:
    """The folder, made on first use and again if something removed it."""
    with _lock:
        found = _made.get(os.getpid())
        if found is None or not found.is_dir():
            _remove_leftovers()
            found = _made[os.getpid()] = Path(tempfile.mkdtemp(prefix=_PREFIX))
        return found


@atexit.register
def _remove_own() -> None:
    if found := _made.get(os.getpid()):
        shutil.rmtree(found, ignore_errors=True)


def _remove_leftovers() -> None:
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > _LEFTOVER_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)
