"""The file of an exported program: a zip archive without compression whose comment is the checksum of all before it.

`zip -l` shows what is inside. Reading starts with the checksum: a file that is cut short or has one changed bit is a
`DamagedFile`, and nothing of it has been parsed by then.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import math
import mmap
import os
import secrets
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..errors import DamagedFile

_MARK = b"onepass sha256 "
_TRAILER_BYTES = len(_MARK) + 64
_BLOCK = 16 << 20
_DATE = (1980, 1, 1, 0, 0, 0)  # the same program gives the same file


def write_archive(path: Path, members: Iterable[tuple[str, Any]]) -> None:
    """Write the members, bytes or tensors, in order; the file appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "w+b") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, content in members:
                    with archive.open(zipfile.ZipInfo(name, _DATE), "w", force_zip64=True) as member:
                        member.write(_memory(content) if isinstance(content, torch.Tensor) else content)
                archive.comment = _MARK + b"0" * 64
            end = file.tell()
            digest = _digest(file, end - _TRAILER_BYTES)
            file.seek(end - 64)
            file.write(digest)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


class Archive:
    """A file that was found to be whole. A context: it is closed at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
        try:
            self._check()
            self._zip = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            self._file.close()
            raise DamagedFile(str(path), str(error)) from error
        except DamagedFile:
            self._file.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()
        self._file.close()

    def _check(self) -> None:
        """The digest is computed of the very file that is read afterwards."""
        length = self._file.seek(0, io.SEEK_END)
        self.checksum = ""
        if length > _TRAILER_BYTES:
            self._file.seek(length - _TRAILER_BYTES)
            trailer = self._file.read()
            if trailer.startswith(_MARK):
                self.checksum = trailer[len(_MARK) :].decode("ascii", "replace")
        if not self.checksum:
            raise DamagedFile(str(self.path), "it does not end as such a file does")
        if _digest(self._file, length - _TRAILER_BYTES) != self.checksum.encode():
            raise DamagedFile(str(self.path), "its checksum is not that of its content")
        self._file.seek(0)

    def read(self, name: str) -> bytes:
        """A member."""
        try:
            return self._zip.read(name)
        except (KeyError, zipfile.BadZipFile) as error:
            raise DamagedFile(str(self.path), f"{name}: {error}") from error

    def read_json(self, name: str) -> Any:
        """A member that is JSON."""
        try:
            return json.loads(self.read(name))
        except ValueError as error:
            raise DamagedFile(str(self.path), f"{name}: {error}") from error

    def names(self) -> list[str]:
        """Of all members."""
        return self._zip.namelist()

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """A member as a tensor on the CPU."""
        try:
            if not is_dense(shape, strides):
                raise ValueError(f"sizes {shape} with strides {strides}")
            size = math.prod(shape) * dtype.itemsize
            with self._zip.open(name) as member:
                if (found := self._zip.getinfo(name).file_size) != size:
                    raise ValueError(f"{found} bytes instead of {size}")
                tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
                target = _memory(tensor)
                for at in range(0, size, _BLOCK):
                    target[at : at + _BLOCK] = member.read(_BLOCK)
                return tensor
        except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise DamagedFile(str(self.path), f"{name}: {error}") from error


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor is all of its memory, each element once."""
    wanted = 1
    for stride, size in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n != 1):
        if (stride != wanted and 0 not in shape) or size < 0:
            return False
        wanted *= size
    return True


def _digest(file: Any, length: int) -> bytes:
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = hashlib.sha256()
        for at in range(0, length, _BLOCK):
            found.update(content[at : min(at + _BLOCK, length)])
    return found.hexdigest().encode()


def _memory(tensor: torch.Tensor) -> Any:
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")
