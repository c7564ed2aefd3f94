"""The persistent cache: content-addressed files that several processes may use at once.

`graphs/<key>.json`, `kernels/<key>.so` and `times/<key>.json` under `ONEPASS_CACHE_DIR` (default: the
user's cache folder). Every file ends with a checksum and is written under a temporary name, then renamed:
readers see a whole entry or none, and a damaged one is removed, never used. Of processes that need the same graph
one builds it and the others wait (`Cache.building`). The folder is private (0700, files
0600); one that others can write to is refused. No fault here stops a program: it costs one warning and a
compilation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

_BOUND_BYTES = 2 << 30
_WRITES_BETWEEN_TRIMS = 256
_TOUCH_SECONDS = 3600  # how stale a "last used" may get: saves a write per hit
_LEFTOVER_SECONDS = 24 * 3600  # a temporary file this old has no writer any more
_MARK = b"\n//onepass sha256 "
_TRAILER_BYTES = len(_MARK) + 64
_WAIT_SECONDS = 300.0  # for another process that builds the same
_FOLDERS = {"graphs": ".json", "kernels": ".so", "times": ".json"}


class CacheWarning(UserWarning):
    """The persistent cache cannot be used as it should."""


def cache_folder() -> Path:
    """Where the cache is, by the environment."""
    if chosen := os.environ.get("ONEPASS_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "onepass"
    except RuntimeError:  # no home folder
        return Path("/nonexistent/onepass")


def default_cache() -> Cache:
    """The cache of this process; the folder is examined once."""
    return _open(cache_folder())


@lru_cache(maxsize=16)
def _open(root: Path) -> Cache:
    return Cache(root)


class Cache:
    """Entries by key. `usable` is False where the folder is missing or not to be trusted."""

    def __init__(self, root: Path, bound_bytes: int = _BOUND_BYTES) -> None:
        self.root, self.bound_bytes = root, bound_bytes
        self._lock = threading.Lock()
        self._writes = 0
        self._warned: set[str] = set()
        self.usable = self._prepare()

    def __repr__(self) -> str:
        return f"Cache({str(self.root)!r}{'' if self.usable else ', not used'})"

    # entries

    def read(self, folder: str, key: str) -> Any | None:
        """The JSON data stored under the key; an entry that is not JSON is removed."""
        content = self._read(folder, key)
        if content is None:
            return None
        try:
            return json.loads(content)
        except ValueError:
            self.discard(folder, key)
            return None

    def write(self, folder: str, key: str, data: Any) -> bool:
        """Store JSON data; False where that was not possible."""
        return self._write(folder, key, json.dumps(data, separators=(",", ":")).encode()) is not None

    @contextlib.contextmanager
    def building(self, key: str, seconds: float = _WAIT_SECONDS) -> Iterator[None]:
        """Held while a graph is built, by one process at a time; who waited for it finds the entry.

        The system takes the lock from a process that dies. After `seconds` nobody is waited for any more.
        """
        path = self._path("graphs", key).with_name(f".{key}.lock")
        lock = _locked(path, seconds) if self.usable else None
        try:
            yield
        finally:
            if lock is not None:
                _remove(path)  # those who wait hold the file, not its name
                os.close(lock)

    def discard(self, folder: str, key: str) -> None:
        """Remove an entry that turned out to be useless."""
        _remove(self._path(folder, key))

    def read_times(self, key: str) -> tuple[float, ...] | None:
        """Times that were measured and stored under the key; one that is no times is removed."""
        times = self.read("times", key)
        if isinstance(times, list) and all(type(t) is float and 0 < t < math.inf for t in times):
            return tuple(times)
        if times is not None:
            self.discard("times", key)
        return None

    def kernel(self, key: str) -> Path | None:
        """The shared object stored under the key, whole as it was written."""
        return None if self._read("kernels", key) is None else self._path("kernels", key)

    def kernel_bytes(self, key: str) -> bytes | None:
        """The machine code stored under the key."""
        return self._read("kernels", key)

    def add_kernel(self, key: str, built: Path) -> Path | None:
        """Store a shared object; where it is now, None where it could not be stored."""
        return self._write("kernels", key, built.read_bytes())

    # the whole

    def size(self) -> int:
        """Bytes of all entries."""
        return sum(s.st_size for _, s in self._files())

    def count(self) -> dict[str, int]:
        """Entries of each kind."""
        counts = dict.fromkeys(_FOLDERS, 0)
        for path, _ in self._files():
            if not path.name.startswith("."):
                counts[path.parent.name] += 1
        return counts

    def clear(self) -> int:
        """Remove everything; the bytes that were freed."""
        return sum(status.st_size for path, status in list(self._files()) if _remove(path))

    def trim(self) -> None:
        """Remove leftovers of killed processes, and the entries unused for longest while over the bound."""
        files = list(self._files())
        now = time.time()
        for path, status in files:
            if path.name.startswith(".") and now - status.st_mtime > _LEFTOVER_SECONDS:
                _remove(path)
        entries = [(s.st_mtime, s.st_size, p) for p, s in files if not p.name.startswith(".")]
        total = sum(size for _, size, _ in entries)
        if total <= self.bound_bytes:
            return
        for _, size, path in sorted(entries):
            _remove(path)
            total -= size
            if total <= self.bound_bytes * 0.8:
                break

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        if not self.usable:
            return
        for folder in _FOLDERS:
            with contextlib.suppress(OSError), os.scandir(self.root / folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_file(follow_symlinks=False):
                            yield Path(entry.path), entry.stat(follow_symlinks=False)

    # the folder

    def _prepare(self) -> bool:
        try:
            for folder in (self.root, *(self.root / f for f in _FOLDERS)):
                if not folder.is_dir():
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if not self.root.is_dir():
                self._warn("folder", f"{self.root} cannot be used ({error.strerror}); kernels are built anew")
                return False
            self._warn("write", f"{self.root} cannot be written ({error.strerror}); new kernels are not kept")
        existing = [self.root, *(self.root / f for f in _FOLDERS if (self.root / f).is_dir())]
        problem = next((p for p in map(_distrust, existing) if p), None)
        if problem:
            self._warn("folder", f"{problem}; it is not used, kernels are built anew")
        return problem is None

    def _warn(self, topic: str, message: str) -> None:
        with self._lock:
            if topic in self._warned:
                return
            self._warned.add(topic)
        text = f"onepass cache: {message}. Set ONEPASS_CACHE_DIR to a folder of your own to change this."
        warnings.warn(text, CacheWarning, stacklevel=3)

    # files

    def _path(self, folder: str, key: str) -> Path:
        if not (key.isascii() and key.isalnum()):
            raise ValueError(f"not a cache key: {key!r}")
        return self.root / folder / f"{key}{_FOLDERS[folder]}"

    def _read(self, folder: str, key: str) -> bytes | None:
        if not self.usable:
            return None
        path = self._path(folder, key)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                content = file.read()
        except OSError:
            return None
        body, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
        if trailer != _trailer(body) or _distrust_status(status):
            _remove(path)
            return None
        if time.time() - status.st_mtime > _TOUCH_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(path)
        return body

    def _write(self, folder: str, key: str, body: bytes) -> Path | None:
        if not self.usable:
            return None
        path = self._path(folder, key)
        temporary = path.with_name(f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(body + _trailer(body))
            os.replace(temporary, path)
        except OSError as error:
            _remove(temporary)
            self._warn("write", f"{self.root} cannot be written ({error.strerror}); new kernels are not kept")
            return None
        with self._lock:
            self._writes += 1
            due = self._writes % _WRITES_BETWEEN_TRIMS == 1
        if due:
            self.trim()
        return path


def _locked(path: Path, seconds: float) -> int | None:
    """A lock on a file; None where there is none to be had."""
    if fcntl is None:
        return None
    until, pause = time.monotonic() + seconds, 0.005
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:  # another process has it, or the file system has no locks
            if not isinstance(error, BlockingIOError) or time.monotonic() > until:
                os.close(descriptor)
                return None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)


def _trailer(body: bytes) -> bytes:
    """How the file of an entry ends."""
    return _MARK + hashlib.sha256(body).hexdigest().encode()


def _distrust(folder: Path) -> str | None:
    """Why code found in this folder must not be run; None where it may."""
    try:
        status = folder.stat()
    except OSError as error:
        return f"{folder} cannot be examined ({error.strerror})"
    problem = _distrust_status(status)
    return f"{folder} {problem}" if problem else None


def _distrust_status(status: os.stat_result) -> str | None:
    # What the superuser put there (a prepared image) is as good as our own.
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users (chmod go-w makes it safe)"
    return None


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
